"""What the pictures of a run have: all of it, or a line that says what is left out; and nothing is cut."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.patches import Rectangle

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.views.report import pictures
from te_precision_callbacks.views.report.subjects import ReportError
from tests.compare.recorded import record
from tests.report.runs import drifting

STEPS = 4


def recorded(folder: Path, statistics: list[str], names: tuple[str, ...] = ("fc1", "fc2")) -> RecordedRun:
    numbers = {(name, "weight", statistic): 2.0 + np.arange(STEPS) for name in names for statistic in statistics}
    return record(folder, numbers)


def test_a_layer_has_a_panel_for_each_statistic(tmp_path: Path) -> None:
    statistics = ["max", "min", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range", "numel"]
    figure = pictures.layer(recorded(tmp_path, statistics))
    assert [axes.get_title(loc="left") for axes in figure.axes] == statistics
    assert not figure.get_supxlabel()


def test_what_has_no_panel_is_named(tmp_path: Path) -> None:
    statistics = [f"own{number}" for number in range(30)]
    figure = pictures.layer(recorded(tmp_path, statistics))
    assert [axes.get_title(loc="left") for axes in figure.axes] == statistics[:24]
    said = figure.get_supxlabel()
    assert said == "Not drawn here: own24, own25, own26, own27, own28 and 1 more. --statistic NAME draws one."


@pytest.mark.parametrize("histograms", [True, False])
def test_no_bar_of_a_profile_is_cut(histograms: bool) -> None:
    figure = pictures.profile(drifting(blocks=2, steps=12, histograms=histograms))
    (axes,) = figure.axes
    low, high = axes.get_xlim()
    bars = [patch.get_bbox() for patch in axes.patches if hasattr(patch, "get_bbox")]
    assert len(bars) == 8
    assert low < min(bar.x0 for bar in bars) - 0.1
    assert max(bar.x1 for bar in bars) + 0.1 < high
    top, bottom = axes.get_ylim()[::-1]
    assert top < min(bar.y0 for bar in bars)
    assert max(bar.y1 for bar in bars) < bottom


def test_a_profile_without_bars_says_what_to_add(tmp_path: Path) -> None:
    figure = pictures.profile(recorded(tmp_path, ["cur_amax"]))
    (axes,) = figure.axes
    assert "add dynamic_range or exponent_histogram" in axes.get_title(loc="left")
    (points,) = [line for line in axes.lines if line.get_label() == "largest"]
    assert np.asarray(points.get_xdata()).tolist() == [np.log2(2.0 + STEPS - 1)] * 2


def test_rows_keep_what_differs(tmp_path: Path) -> None:
    names = tuple(f"model.esm.encoder.layers.{n}.self_attention.layernorm_qkv" for n in range(3))
    run = recorded(tmp_path, ["cur_amax"], names)
    for figure in (pictures.heatmap(run), pictures.profile(run)):
        labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
        assert labels == [f"…layers.{n}.self_attention.layernorm_qkv" for n in range(3)]
    assert names[0] in pictures.layer(run, name=names[0]).get_suptitle()


def test_a_profile_is_of_a_step_with_numbers(tmp_path: Path) -> None:
    numbers = {("fc1", "weight", "cur_amax"): 2.0 + np.arange(3)}
    run = record(tmp_path, numbers, first=1, freq=5, scalars={"loss": np.arange(3.0)})
    for step, said in ((4, "The nearest are 1 and 6, of steps 1 to 11."), (99, "The nearest is 11, of steps 1 to 11.")):
        with pytest.raises(ReportError, match=f"no magnitudes of weight at step {step}. {said}"):
            pictures.profile(run, step=step)
    longer = record(tmp_path / "longer", numbers, first=1, freq=5, scalars={"loss": np.arange(9.0)})
    assert "at step 11" in pictures.profile(longer).axes[0].get_title(loc="left")
    with pytest.raises(ReportError, match="no step 99"):
        pictures.heatmap(run, step=99)


OUTSIDE = {"above": 448 * 1.1, "over": 100.0, "under": 100.0, "inside": 100.0, "assumed": 1e4}
"""Layers by their largest magnitude, at a recorded scale factor of 1 but for the last one."""


def beyond_limits(folder: Path) -> RecordedRun:
    """A run in which layers are outside of E4M3 for every reason there is."""
    numbers = {(layer, "weight", "cur_amax"): np.full(3, amax) for layer, amax in OUTSIDE.items()}
    numbers |= {(layer, "weight", "dynamic_range"): np.full(3, 10.0) for layer in OUTSIDE}
    for layer in list(OUTSIDE)[:-1]:
        numbers |= {(layer, "weight", f"scale_inv_{end}"): np.ones(3) for end in ("min", "max")}
    numbers["over", "weight", "overflows%"] = np.array([0.0, 0.5, 0.0])
    numbers["under", "weight", "underflows%"] = np.array([0.0, 1.0, 0.9])
    return record(folder, numbers, order=list(OUTSIDE))


@pytest.mark.parametrize(("step", "outside"), [(0, ["above"]), (1, ["above", "over", "under"]), (2, ["above"])])
def test_what_is_outside_is_orange(tmp_path: Path, step: int, outside: list[str]) -> None:
    figure = pictures.profile(beyond_limits(tmp_path), step=step)
    (axes,) = figure.axes
    orange = {
        round(bar.get_y() + bar.get_height() / 2) for bar in bars_of(axes) if to_hex(bar.get_facecolor()) == "#d55e00"
    }
    assert [name for place, name in enumerate(OUTSIDE) if place in orange] == outside
    assert "range, known to be outside" in [text.get_text() for text in figure.legends[0].get_texts()]
    largest = next(patch for patch in axes.patches if patch.get_label() == "E4M3: largest")
    assert largest.get_data().values.tolist() == pytest.approx([*[np.log2(448)] * 4, np.log2(1e4)])


def bars_of(axes: Any) -> list[Any]:
    return [patch for patch in axes.patches if isinstance(patch, Rectangle)]
