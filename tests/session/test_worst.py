"""What a session tells without a config, and which of it is the worst of the run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Recipe

from te_precision_callbacks import InspectSession
from tests.conftest import Keeper, feature

PLAIN = {"min", "max", "mean", "std", "cur_amax", "nonfinite_num"}
QUANTIZED = {"underflows%", "overflows%", "scale_inv_max", "scale_inv_min"}
LOST = {"s": feature("LogFp8TensorStats", ["all"], tensors=["gradient"], stats=["underflows%", "sqnr_db"], freq=2)}


@pytest.fixture
def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(32, 32), te.Linear(32, 32))


def train(session: InspectSession, net: torch.nn.Module, recipes: list[Recipe | None]) -> Iterator[int]:
    """A step for each recipe, with a gradient of the size that a mean over a batch has."""
    for recipe in recipes:
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = net(torch.randn(16, 32))
        (out * torch.randn_like(out) * 7e-6).sum().backward()
        yield session.iteration
        session.step()


def test_the_default_config_tells_what_quantization_loses(tmp_path: Path, net: torch.nn.Module, keeper: Keeper) -> None:
    with InspectSession(model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        list(train(session, net, [DelayedScaling()] * 11 + [None] * 10))
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
    """Its scale is 1: most of a gradient underflows, which says nothing of the steps after it."""
    if start is not None:  # a checkpoint brings the scales
        with InspectSession(LOST, model=net, log_dir=tmp_path / "before") as session:
            list(train(session, net, recipes))
    with InspectSession(LOST, model=net, log_dir=tmp_path, sinks=[keeper], start_step=start) as session:
        list(train(session, net, recipes))
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
        assert row.value == worst(of_series.values())
        assert of_series[iteration] == row.value
