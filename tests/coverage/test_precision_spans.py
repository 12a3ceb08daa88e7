"""``session.precision(at=...)``: the facts of one iteration, and how long they held."""

import contextlib
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling, Format

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import GEMMS, name_of_recipe
from te_precision_callbacks.session import InspectSession
from tests.conftest import feature, statistics
from tests.instrumentation.gemm_spy import ROWS, Handed, Spy, wrong

BF16 = torch.bfloat16
NOTHING = statistics(layers=["nowhere"])
Feature = type[Any]
CURRENT, BLOCK = Float8CurrentScaling(), Float8BlockScaling()
E4M3 = DelayedScaling(fp8_format=Format.E4M3)
E4M3_CURRENT = Float8CurrentScaling(fp8_format=Format.E4M3)

pytestmark = pytest.mark.filterwarnings("ignore:Recipe type changed")


def train(session: InspectSession, net: torch.nn.Module, recipe: Any, *, before_step: Callable[[], Any] = int) -> None:
    x = torch.randn(ROWS, 32, dtype=BF16, requires_grad=True)
    with te.autocast(enabled=recipe is not None, recipe=recipe):
        out = net(x)
    out.float().sum().backward()
    before_step()
    session.step()


def watched(
    folder: Path, config: Any, recipes: Sequence[Any], *, evaluated: Sequence[int] = (), tells: bool = False
) -> tuple[InspectSession, list[Handed]]:
    """A run with a recipe for each step, and an evaluation without FP8 between the backward and ``step()`` of some.

    Args:
        tells: whether the loop says when it evaluates, as the front doors do.
    """
    net, features = te.Linear(32, 64, params_dtype=BF16), ()
    if isinstance(config, type):
        features, config = (config,), {"s": feature(config.__name__, ["linear"])}
    spy = Spy({(64, 32): "linear"}, {})
    session = InspectSession(config, model=net, log_dir=folder, allow_unmatched=True, features=features)
    with contextlib.ExitStack() as stack:
        stack.push(session.start(eval_mode_counts=not tells))
        stack.enter_context(spy.watching())

        def evaluate() -> None:
            spy.training, session.observing = False, not tells
            with torch.no_grad():
                net(torch.randn(ROWS, 32, dtype=BF16))
            spy.training = session.observing = True

        for step, recipe in enumerate(recipes):
            spy.begin_step()
            train(session, net, recipe, before_step=evaluate if step in evaluated else int)
    return session, spy.handed_in


def spans(session: InspectSession, gemm: str) -> list[tuple[int, int | None, str]]:
    """Since, until and the formats of a GEMM of the one layer, over the run."""
    results = [e for at in range(session.iteration) for e in session.precision(at=at) if e.gemm == gemm]
    return list(dict.fromkeys((e.since, e.until, " ".join(e.operands.values()) or e.not_run) for e in results))


def off(*iterations: int) -> Feature:
    class Off:
        def fp8_gemm_enabled(self, config: Any, layer_name: str, gemm: str, iteration: int) -> tuple[bool, int | None]:
            later = [due for due in iterations if due > iteration]
            return gemm != "dgrad" or iteration not in iterations, later[0] if later else None

    return Off


def modified(*iterations: int) -> Feature:
    class Modified:
        def modify_tensor_enabled(
            self, config: Any, layer_name: str, tensor_name: str, gemm: str, iteration: int
        ) -> tuple[bool, int | None]:
            later = [due for due in iterations if due > iteration]
            acts = gemm == "fprop" and tensor_name == "weight" and iteration in iterations
            return acts, later[0] if later else None

        def modify_tensor(
            self,
            config: Any,
            layer_name: str,
            gemm: str,
            tensor_name: str,
            tensor: torch.Tensor,
            *call: Any,
            **more: Any,
        ) -> torch.Tensor:
            return tensor * 2

    return Modified


WARM_UP = [None, None, CURRENT, CURRENT, CURRENT, None, None, E4M3, E4M3]


@pytest.mark.parametrize(
    ("config", "recipes"),
    [
        (NOTHING, WARM_UP),
        (statistics(freq=4), WARM_UP),
        (statistics(), WARM_UP),
        (NOTHING, [CURRENT, E4M3, BLOCK, BLOCK, CURRENT, CURRENT]),
        (off(2, 3, 4), [CURRENT] * 8),
        (off(2, 4, 6), [CURRENT] * 10),
        (off(0, 3, 6), [CURRENT] * 8),
        (off(1, 2, 4, 5), [None, None, *[CURRENT] * 6]),
        (modified(0, 2, 4), [None] * 7),
        (modified(2, 3), [None] * 6),
    ],
)
def test_it_is_what_the_gemms_of_each_iteration_were_handed(tmp_path: Path, config: Any, recipes: list[Any]) -> None:
    session, handed_in = watched(tmp_path, config, recipes, evaluated=[3])
    for step, handed in enumerate(handed_in):
        assert wrong(session.precision(at=step), handed) == [], step
        recipe = "none" if recipes[step] is None else name_of_recipe(recipes[step])
        assert {entry.recipe for entry in session.precision(at=step) if not entry.not_run} == {recipe}, step


def test_a_recipe_is_told_where_the_formats_do_not_show_it(tmp_path: Path) -> None:
    """Delayed and current scaling have the same format."""
    for config in (NOTHING, statistics()):
        session, _ = watched(tmp_path / str(config is NOTHING), config, [E4M3, E4M3, E4M3_CURRENT, E4M3_CURRENT])
        for entry in session.precision:
            assert set(entry.operands.values()) == {"FP8 E4M3"}
            assert entry.recipe == "fp8_delayed_scaling -> fp8_current_scaling"
            at = [session.precision(at=at)[GEMMS.index(entry.gemm)] for at in range(4)]
            assert [(e.recipe, e.since, e.until) for e in at] == [
                *[("fp8_delayed_scaling", 0, 1)] * 2,
                *[("fp8_current_scaling", 2, None)] * 2,
            ]


def test_a_span_is_from_its_first_iteration_to_its_last(tmp_path: Path) -> None:
    session, _ = watched(tmp_path, off(2, 3, 4), [CURRENT] * 8)
    fp8 = "FP8 E5M2 FP8 E4M3"
    assert spans(session, "dgrad") == [(0, 1, fp8), (2, 4, "BF16 BF16"), (5, None, fp8)]
    assert spans(session, "wgrad") == [(0, None, fp8)]
    whole = {entry.gemm: entry for entry in session.precision}
    assert whole["dgrad"].operands == {"gradient": "FP8 E5M2 -> BF16", "weight": "FP8 E4M3 -> BF16"}
    assert (whole["dgrad"].since, whole["dgrad"].until) == (0, None)


@pytest.mark.parametrize("tells", [True, False])
def test_a_single_step_is_known(tmp_path: Path, tells: bool) -> None:
    recipes = [CURRENT, CURRENT, None, CURRENT, CURRENT]
    session, handed_in = watched(tmp_path, NOTHING, recipes, tells=tells)
    assert [wrong(session.precision(at=step), handed) for step, handed in enumerate(handed_in)] == [[]] * 5
    assert not session.precision(at=2)[0].seen


@pytest.mark.parametrize("config", [NOTHING, statistics()])
def test_a_gemm_that_is_left_out_from_some_step_on(tmp_path: Path, config: Any) -> None:
    """In a layer without features it is noticed at the end of that step, and told from the next on."""
    net = te.Linear(32, 64, params_dtype=BF16)
    with InspectSession(config, model=net, log_dir=tmp_path, allow_unmatched=True) as session:
        for step in range(6):
            net.weight.requires_grad_(step < 3)
            train(session, net, CURRENT)
    since = 4 if config is NOTHING else 3
    assert spans(session, "wgrad") == [(0, since - 1, "FP8 E5M2 FP8 E4M3"), (since, None, "frozen weight")]


def test_an_iteration_that_has_not_run_is_an_error(tmp_path: Path) -> None:
    net = te.Linear(32, 64, params_dtype=BF16)
    with InspectSession(NOTHING, model=net, log_dir=tmp_path, allow_unmatched=True, start_step=7) as session:
        assert session.precision == ()
        with pytest.raises(LookupError, match="None has run yet"):
            session.precision(at=7)
        for _ in range(3):
            train(session, net, CURRENT)
        assert [entry.since for entry in session.precision(at=9)] == [7] * 3
        for at in (6, 10):
            with pytest.raises(PrecisionDebugError, match=rf"at={at}\): that iteration has not run .* 7 to 9"):
                session.precision(at=at)


def returned_to_1(folder: Path, *again: Any) -> InspectSession:
    """A run of two iterations in FP8 and two in BF16, which goes on from iteration 1 in other recipes."""
    net = te.Linear(32, 64, params_dtype=BF16)
    with InspectSession(statistics(), model=net, log_dir=folder) as session:
        for recipe in (CURRENT, CURRENT, None, None):
            train(session, net, recipe)
        session.iteration = 1
        for recipe in again:
            train(session, net, recipe)
    return session


def test_an_iteration_that_runs_again_counts_as_it_ran_last(tmp_path: Path) -> None:
    session = returned_to_1(tmp_path, BLOCK, BLOCK)
    assert spans(session, "fprop") == [(0, 0, "FP8 E4M3 FP8 E4M3"), (1, None, "FP8 block E4M3 FP8 block E4M3")]
    with pytest.raises(LookupError, match="0 to 2"):
        session.precision(at=3)


@pytest.mark.parametrize("again", [None, CURRENT], ids=["as at the end", "as before"])
def test_an_iteration_that_runs_again_as_an_earlier_one_did(tmp_path: Path, again: Any) -> None:
    session = returned_to_1(tmp_path, again)
    fp8 = (0, None if again else 0, "FP8 E4M3 FP8 E4M3")
    assert spans(session, "fprop") == ([fp8] if again else [fp8, (1, None, "BF16 BF16")])


def test_a_look_between_forward_and_backward_changes_nothing(tmp_path: Path) -> None:
    recipes = [CURRENT, CURRENT, None, None, CURRENT]

    def run(folder: Path, *, looks: bool) -> InspectSession:
        net = te.Linear(32, 64, params_dtype=BF16)
        with InspectSession(statistics(), model=net, log_dir=folder) as session:
            if looks:
                net.register_forward_hook(lambda *_: list(session.precision) and None)
            for recipe in recipes:
                train(session, net, recipe)
        return session

    looked, alone = run(tmp_path / "looked", looks=True), run(tmp_path / "alone", looks=False)
    for gemm in GEMMS:
        assert spans(looked, gemm) == spans(alone, gemm)
    assert looked.precision == alone.precision


def test_a_run_that_changes_in_every_step_keeps_a_few_bytes_of_each(tmp_path: Path) -> None:
    session, _ = watched(tmp_path, off(*range(0, 100, 2)), [CURRENT] * 12)
    size = len(pickle.dumps(session.precision))
    longer, _ = watched(tmp_path, off(*range(0, 100, 2)), [CURRENT] * 52)
    assert len(spans(longer, "dgrad")) == 52
    assert len(pickle.dumps(longer.precision)) - size <= 40 * 40
