"""The last steps before it broke, in a browser: the first bad cell, the loss below, and many, few and healthy steps."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.flight.rows import StepRow, TensorSlot
from te_precision_callbacks.flight.steps import LastSteps
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.runs.summary import last_steps
from te_precision_callbacks.views.report import write_report
from tests.report.conftest import Look
from tests.runs.making import RunWriter
from tests.session.test_every_step import Blocks, nan_at, train

pytestmark = pytest.mark.slow  # a browser

TENSORS = ("weight", "activation", "gradient", "wgrad", "dgrad")


def trained(folder: Path, steps: int, broken: int | None = None) -> Path:
    if broken is None:
        train(Blocks("current"), steps, folder)
    else:
        train(Blocks("current"), steps, folder, nan_at("between", broken, 0))
    return write_report(open_run(folder), folder / "report.html")


def recorded(steps: LastSteps, *, is_problem: bool = True) -> dict[str, object]:
    return {"of_all": False, "is_problem": is_problem, **steps.as_json()}


def last_of(layers: int, steps: int, bad: tuple[int, int] | None = None, start: int = 0) -> LastSteps:
    """Steps of a model; ``bad``: the layer and step where its activation and all later tensors become nan."""
    slots = [TensorSlot(f"decoder.layers.{layer}.mlp.fc1", tensor) for layer in range(layers) for tensor in TENSORS]
    order = sorted(range(len(slots)), key=lambda slot: _time(slots, slot, layers))
    draw = np.random.default_rng(0)
    scale = np.exp2(draw.uniform(-8, 4, len(slots)))
    last = LastSteps(slots)
    for step in range(start, start + steps):
        magnitudes = (scale * np.exp2(draw.normal(0, 0.2, len(slots)))).astype(np.float32)
        first = None
        if bad is not None and step >= bad[1]:
            first = order.index(slots.index(TensorSlot(f"decoder.layers.{bad[0]}.mlp.fc1", "activation")))
            magnitudes[[slot for slot in order[first:] if slots[slot].tensor != "weight"]] = np.nan
        last.add(StepRow(step, order, magnitudes=magnitudes, first=first))
    return last


def _time(slots: Sequence[TensorSlot], slot: int, layers: int) -> tuple[bool, int]:
    layer = slot // len(TENSORS)
    in_backward = slots[slot].tensor not in ("weight", "activation")
    return in_backward, (layers - layer if in_backward else layer) * len(TENSORS) + slot % len(TENSORS)


def made(folder: Path, *steps: LastSteps, loss: Sequence[float] = ()) -> Path:
    with RunWriter.begin(folder) as run:
        for iteration, value in enumerate(loss):
            run.add_step(iteration)
            run.add_scalars(iteration, {"loss": value})
        for number, each in enumerate(steps):
            text = f"The last {len(each.rows)} steps before: record {number}."
            run.add_event("last_steps", text, iteration=each.rows[-1].iteration, data=recorded(each))
    return write_report(open_run(folder), folder / "report.html")


def cells(look: Look) -> list[list[float | None]]:
    return look.plot("plot.data.find((trace) => trace.type === 'heatmap').z")


@pytest.mark.extended
def test_the_first_bad_cell_and_where_it_leads(look: Look, tmp_path: Path) -> None:
    look.open(trained(tmp_path, 12, broken=9), "page=steps")
    look.everything_drawn()
    data = json.loads(CliRunner().invoke(cli.app, ["show", str(tmp_path), "--last-steps", "--json"]).output)
    place, step = data["first"]
    assert (data["tensors"][place], step) == (["linear", "activation"], 9)
    assert "First inf or nan: the activation of linear, in step 9." in look.page.locator(".first").inner_text()
    marked = look.plot("(({x, y}) => [x[0], y[0]])(plot.data.find((trace) => trace.name === 'first inf or nan'))")
    assert marked == [9, place]
    ticks = look.plot("plot.layout.yaxis.ticktext")
    assert ticks[place] == "● linear activation"
    assert [tick.removeprefix("● ") for tick in ticks] == [" ".join(pair) for pair in data["tensors"]]
    shown = cells(look)
    assert shown[place][-1] > 8
    assert all(abs(cell or 0) <= 8 for row in shown for cell in row[:-1])
    said = look.tip(8, place)
    assert f"{data['magnitudes'][place][8]:.3g}" in said
    assert "linear activation" in said
    assert "step 8" in said
    head, *rows = look.saved(look.page.locator("button.csv"))
    assert head == ["layer", "tensor", "step", "largest magnitude"]
    assert ["linear", "activation", "9", "NaN"] in rows
    look.page.mouse.click(*look.at(5, place))
    look.page.wait_for_selector("h1.layer-name")
    assert look.page.locator("h1").inner_text() == "linear"


def test_a_finding_leads_to_the_last_steps(look: Look, tmp_path: Path) -> None:
    look.open(trained(tmp_path, 12, broken=9))
    look.go(look.page.get_by_role("link", name="Last steps: inf or nan").first)
    assert look.page.locator("h1").inner_text() == "Last steps"


@pytest.mark.parametrize("width", [400])
def test_one_step_without_a_bad_cell(look: Look, tmp_path: Path, width: int) -> None:
    look.page.set_viewport_size({"width": width, "height": 900})
    look.open(trained(tmp_path, 1), "page=steps")
    look.everything_drawn()
    assert "No inf or nan in these steps." in look.page.locator(".first").inner_text()
    assert "before: the end of the run" in look.page.locator("main").inner_text()
    assert {len(row) for row in cells(look)} == {1}
    assert look.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"


def test_the_earliest_bad_cell_of_several_records(tmp_path: Path) -> None:
    """Each rank writes its values; only one of them has the first nan."""
    made(tmp_path, last_of(2, 5), last_of(2, 9, (1, 7)), last_of(2, 9, (0, 5)))
    data = last_steps(open_run(tmp_path))
    assert data is not None
    assert data["text"] == "The last 9 steps before: record 2."
    assert data["first"][1] == 5


def test_a_run_without_them(look: Look, tmp_path: Path) -> None:
    train(Blocks("current"), 2, tmp_path, every_step=False)
    look.open(write_report(open_run(tmp_path), tmp_path / "report.html"), "page=steps")
    assert "every_step=False" in look.page.locator("main").inner_text()
