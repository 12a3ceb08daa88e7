"""What the pictures of a run have: all of it, or a line that says what is left out; and nothing is cut."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.views.report import pictures
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
