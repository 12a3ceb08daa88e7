"""Statements of docs/session.md: on the state of recipes, which is Transformer Engine's, and on start_step."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe

from te_precision_callbacks.session import InspectSession
from tests.combinations import pairs
from tests.conftest import Keeper, feature, statistics
from tests.training import train


def forward(net: torch.nn.Module, recipe: Recipe) -> None:
    with te.autocast(recipe=recipe):
        net(torch.randn(128, 128)).sum().backward()


def saved(recipe: Recipe) -> dict[str, Any]:
    net, file = te.Linear(128, 128), io.BytesIO()
    for _ in range(2):
        forward(net, recipe)
    torch.save(net.state_dict(), file)
    file.seek(0)
    return torch.load(file)


def test_start_step_is_the_iteration_of_the_first_step(tmp_path: Path, keeper: Keeper) -> None:
    """Schedules count from 0 in any case, and attaching again does not restart them."""
    net = te.Linear(128, 128)
    with InspectSession(statistics(freq=5), model=net, log_dir=tmp_path, sinks=[keeper], start_step=7) as session:
        for step in range(7, 17):
            assert session.iteration == step
            train(session, net, 1, x=torch.randn(128, 128))
            if step == 12:
                session.attach(net)
    assert [records.iteration for records in keeper.steps if records] == [10, 15]


DELAYED = DelayedScaling(amax_history_len=4)


@pytest.mark.usefixtures("trusted_checkpoints")
@pytest.mark.parametrize(
    ("start", "has_state", "length", "behind_attach"),
    [(0, True, 1, False), (7, True, 4, False), (0, False, 4, False), (7, False, 1, False), (0, True, 4, True)],
)
def test_a_layer_has_a_scale_where_its_state_was_loaded(
    tmp_path: Path,
    keeper: Keeper,
    start: int,
    has_state: bool,
    length: int,
    behind_attach: bool,
) -> None:
    """Before the session begins, or behind attach, as ``Accelerator.load_state`` does it."""
    recipe = DelayedScaling(amax_history_len=length)
    state, net = saved(recipe), te.Linear(128, 128)
    if not has_state:
        del state["_extra_state"]
    if not behind_attach:
        net.load_state_dict(state, strict=False)
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper], start_step=start) as session:
        if behind_attach:
            net.load_state_dict(state)
        train(session, net, x=torch.randn(128, 128), recipe=recipe)
    assert [records.unscaled for records in keeper.steps] == [set() if has_state else {"linear"}, set(), set()]


CURRENT = Float8CurrentScaling()


@pytest.mark.parametrize(
    ("has_state", "ran", "freq", "without"),
    [
        (False, [None, None, DELAYED, DELAYED], 2, [2]),
        (False, [None, DELAYED, DELAYED, DELAYED], 2, []),  # it began in a step without statistics
        (False, [DELAYED, None, None, DELAYED], 1, [0]),  # Transformer Engine has kept its scales
        (False, [DELAYED, CURRENT, CURRENT, DELAYED, DELAYED], 1, [0, 3]),  # and here has not
        (True, [None, DELAYED, DELAYED], 1, [1]),
    ],
)
def test_a_layer_that_begins_delayed_scaling_later_has_none_in_its_first_step(
    tmp_path: Path, keeper: Keeper, has_state: bool, ran: list[Recipe | None], freq: int, without: list[int]
) -> None:
    net = te.Linear(128, 128)
    if has_state:
        with torch.no_grad(), te.autocast(recipe=DELAYED):
            net(torch.randn(128, 128))
    with InspectSession(statistics(freq=freq), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for recipe in ran:
            train(session, net, 1, x=torch.randn(128, 128), recipe=recipe)
    assert {records.iteration: records.unscaled for records in keeper.steps if records.unscaled} == {
        iteration: {"linear"} for iteration in without
    }


@pytest.mark.parametrize(("start", "length"), [(0, 1), (7, 4)])
def test_neither_quantized_weights_nor_an_evaluation_give_it_a_scale(
    tmp_path: Path, keeper: Keeper, start: int, length: int
) -> None:
    """Both leave an amax that is not used yet; and micro-batches are one step."""
    recipe = DelayedScaling(amax_history_len=length)
    with te.quantized_model_init(recipe=recipe):
        net = te.Linear(128, 128)
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper], start_step=start) as session:
        for _ in range(3):
            with torch.no_grad(), te.autocast(recipe=recipe):
                net(torch.randn(128, 128))
            for _ in range(3):
                forward(net, recipe)
            with torch.no_grad():
                net(torch.randn(128, 128))  # which leaves a layer that seems not to run in FP8
            session.step()
    assert [bool(records.unscaled) for records in keeper.steps] == [True, False, False]


PLAIN = {"min", "max", "mean", "std", "cur_amax", "nonfinite_num"}
QUANTIZED = {"underflows%", "underflow_norm%", "overflows%", "scale_inv_max", "scale_inv_min"}
LOST = {"s": feature("LogFp8TensorStats", ["all"], tensors=["gradient"], stats=["underflows%", "sqnr_db"], freq=2)}


@pytest.fixture
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))


def steps_of(session: InspectSession, net: torch.nn.Module, recipes: list[Recipe | None]) -> Iterator[int]:
    """A step for each recipe, with a gradient of the size that a mean over a batch has."""
    for recipe in recipes:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = net(torch.randn(16, 32))
        (out * torch.randn_like(out) * 7e-6).sum().backward()
        yield session.iteration
        session.step()


def test_the_default_config_tells_what_quantization_loses(tmp_path: Path, net: torch.nn.Module, keeper: Keeper) -> None:
    with InspectSession(model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        list(steps_of(session, net, [DelayedScaling()] * 11 + [None] * 10))
    assert keeper.iterations == [0, 1, 2, 5, 10, 20]
    *_, in_fp8, in_high_precision = keeper.steps
    assert {row.statistic for row in in_fp8} == PLAIN | QUANTIZED
    assert len(in_fp8) == 2 * 3 * len(PLAIN | QUANTIZED)
    assert {row.statistic for row in in_high_precision} == PLAIN, "and not what current scaling would give"


@pytest.mark.parametrize(
    ("recipes", "start", "left_out"),
    [
        ([DelayedScaling()] * 5, None, {0}),
        ([Float8CurrentScaling()] * 5, None, set()),
        ([DelayedScaling()] * 3, 100, set()),
        ([None, None, *[DelayedScaling()] * 3], None, {2}),
    ],
    ids=["delayed", "current", "resumed", "switched on"],
)
def test_the_first_step_of_delayed_scaling_is_nobodys_worst(
    tmp_path: Path, net: torch.nn.Module, keeper: Keeper, recipes: list[Any], start: int | None, left_out: set[int]
) -> None:
    """Its scale is 1: most of a gradient underflows, which is no sign of the steps after it."""
    if start is not None:  # a checkpoint brings the scales
        with InspectSession(LOST, model=net, log_dir=tmp_path / "before") as session:
            list(steps_of(session, net, recipes))
    with InspectSession(LOST, model=net, log_dir=tmp_path, sinks=[keeper], start_step=start) as session:
        list(steps_of(session, net, recipes))
    values = [
        (records.iteration, row)
        for records in keeper.steps
        for row in records
        if row.statistic in ("underflows%", "sqnr_db")
    ]
    assert {records.iteration for records in keeper.steps if records.unscaled} == left_out
    for iteration, row in values:
        if row.statistic == "underflows%":
            assert (row.value > 60) == (iteration in left_out), "the example of docs/statistics.md"
    of_own_recipe = [worst for worst in session.worst_statistics if worst.row.statistic in ("underflows%", "sqnr_db")]
    assert len(of_own_recipe) == 4
    for row, iteration in of_own_recipe:
        worst = max if row.statistic == "underflows%" else min
        of_series = {i: r.value for i, r in values if r[:4] == row[:4] and i not in left_out}
        assert row.value == worst(of_series.values()) == of_series[iteration]


@pytest.mark.few
@pytest.mark.usefixtures("trusted_checkpoints")
@pytest.mark.parametrize(
    ("length_and_steps", "restores", "micro_batches"), pairs([(4, 9), (64, 3), (1, 3)], [True, False], [1, 3])
)
def test_scales_that_a_resume_without_the_sessions_state_has_lost(
    tmp_path: Path, length_and_steps: tuple[int, int], restores: bool, micro_batches: int
) -> None:
    """A history may be full, began later than the optimizer, or has one row."""
    length, steps = length_and_steps
    recipe, nets = DelayedScaling(amax_history_len=length), [_two_layers(), _two_layers()]
    optimizers = [torch.optim.AdamW(net.parameters(), lr=1e-3) for net in nets]
    for step in range(steps):
        _update(nets[0], optimizers[0], None if step == 0 else recipe, micro_batches)
    state = nets[0].state_dict()
    kept = {key: value for key, value in state.items() if restores or not key.endswith("_extra_state")}
    with InspectSession(model=nets[1], log_dir=tmp_path) as session:
        nets[1].load_state_dict(kept, strict=restores)
        optimizers[1].load_state_dict(optimizers[0].state_dict())
        for _ in range(3):
            _update(nets[1], optimizers[1], recipe, micro_batches)
            session.step()
    lost = [finding.layers for finding in session.findings if finding.rule == "resume"]
    assert lost == ([] if restores else [("0", "1")])


def _two_layers() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.LayerNormLinear(32, 64), te.Linear(64, 32))


def _update(net: torch.nn.Module, optimizer: torch.optim.Optimizer, recipe: Recipe | None, micro_batches: int) -> None:
    for _ in range(micro_batches):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = net(torch.randn(32, 32)).square().mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
