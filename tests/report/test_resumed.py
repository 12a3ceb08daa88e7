"""A run with records of every fourth step that was resumed before its last step: times and the first steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks import InspectSession
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.runs.tables import STEP0
from te_precision_callbacks.views.report import facts, write_report
from tests.conftest import feature
from tests.report.conftest import Look

FREQ = 4
CONFIG = {
    "lost": feature(
        "LogFp8TensorStats", ["all"], tensors=["gradient", "weight"], stats=["underflows%", "sqnr_db"], freq=FREQ
    )
}


class Trained(NamedTuple):
    """Ten steps; eight more from the state of step 8; and twelve from that of step 4, which replace what is later. No
    start has scales."""

    run: RecordedRun
    folder: Path


@pytest.fixture(scope="module")
def resumed(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    folder = tmp_path_factory.mktemp("resumed")
    states: dict[int, dict[str, Any]] = {}
    for begin, steps in ((0, 10), (8, 8), (4, 12)):
        torch.manual_seed(0)
        model = torch.nn.ModuleList(te.Linear(32, 32) for _ in range(3))
        with InspectSession(CONFIG, model=model, log_dir=folder) as session:
            if begin:
                session.load_state_dict(states[begin])
            for _ in range(steps):
                with te.autocast(enabled=True, recipe=DelayedScaling()):
                    outs = [layer(torch.randn(16, 32, requires_grad=True)) for layer in model]
                sum((out * torch.randn_like(out) * 7e-6).sum() for out in outs).backward()
                session.step()
                states.setdefault(session.iteration, session.state_dict())
    return Trained(open_run(folder), folder)


def test_the_run_is_one_with_three_segments(resumed: Trained) -> None:
    assert resumed.run.steps["iteration"].to_pylist() == [0, 4, 8, 12]
    assert resumed.run.steps["segment"].to_pylist() == [0, 2, 2, 2]
    values = resumed.run.values()
    assert set(values.filter(values["flags"].to_numpy() & STEP0 != 0)["iteration"].to_pylist()) == {0, 4}


def test_a_step_takes_what_a_step_takes(resumed: Trained) -> None:
    """Not what lies between two steps with records."""
    took = facts.duration(resumed.run)
    times = resumed.run.steps["wall_time"].to_pylist()
    assert took["median_step_seconds"] == pytest.approx((times[3] - times[1]).total_seconds() / 2 / FREQ)


@pytest.mark.slow  # a browser
def test_first_steps_have_no_cell_and_no_point(resumed: Trained, look: Look) -> None:
    """In a page with whole curves, and in one with heat maps alone."""
    for most in (10**7, 1):
        page = write_report(resumed.run, resumed.folder / f"{most}.html", most=most)
        look.open(page, "page=heatmap&statistic=underflows%&tensor=gradient")
        look.everything_drawn()
        assert look.plot("plot.data[0].x") == [7.5, 10, 12.5]
        assert look.plot("plot.data[0].z.map((row) => row.map((cell) => cell === null))") == [[False, False]] * 3
        look.turn("page=layer&layer=0")
        card = look.page.locator(".card", has_text="underflows%").last
        card.scroll_into_view_if_needed()
        card.locator(".plot[data-drawn=yes]").wait_for()
        assert ("from the overview" in card.inner_text()) == (most == 1)
        drawn = card.locator(".plot").evaluate("plot => plot.data.map(({name, x}) => [name, [...x]])")
        assert next(item for item in drawn if item[0] == "gradient")[1] == [8, 12]
