"""What goes into a page: each cell the worst of its steps, each number within half a level, all within the size."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks import InspectSession
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.runs.index import REDUCED
from te_precision_callbacks.views.report import ReportError, write_report
from te_precision_callbacks.views.report.data import page_data, worst_layers
from te_precision_callbacks.views.report.overview import Columns, histograms, overviews, pieces
from te_precision_callbacks.views.report.packing import INF, LEVELS, NAN, ZERO, PackedScale
from te_precision_callbacks.views.report.subjects import FamilySeries, Subjects
from tests.conftest import feature
from tests.report.runs import drifting, empty

RUN = drifting(blocks=2, steps=37, histograms=False)


def family_of_run(run: RecordedRun) -> FamilySeries:
    return next(
        family
        for family in Subjects(run).families
        if (family.family.statistic, family.family.tensor) == ("underflows%", "activation")
    )


@pytest.mark.parametrize("most", [1, 5, 37, 100])
def test_a_cell_is_the_worst_of_its_steps(most: int) -> None:
    subjects = Subjects(RUN)
    columns = Columns.of(RUN, most)
    assert len(columns) == min(most, 37)
    for overview in overviews(RUN, subjects.families, columns):
        family = overview.family
        grid = RUN.grid(family.statistic, family.tensor)
        assert [subjects.layers[layer].name for layer in overview.layers] == grid.layers
        for column, (first, last) in enumerate(zip(columns.first, columns.last, strict=True)):
            for row, values in enumerate(grid.values[:, first : last + 1]):
                assert overview.cells[REDUCED][row, column] == max(values, key=family.badness)
        at = overview.worst_at[REDUCED]
        assert overview.worst[REDUCED].tolist() == grid.values[np.arange(len(grid.layers)), at].tolist()
        assert overview.worst[REDUCED].tolist() == [max(values, key=family.badness) for values in grid.values]


def test_families_that_are_read_in_pieces_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    subjects, columns = Subjects(RUN), Columns.of(RUN, 9)
    whole = list(overviews(RUN, subjects.families, columns))
    monkeypatch.setattr("te_precision_callbacks.views.report.overview.pieces", lambda counts: pieces(counts, 100))
    for first, other in zip(whole, overviews(RUN, subjects.families, columns), strict=True):
        assert first.family == other.family
        np.testing.assert_array_equal(first.cells[REDUCED], other.cells[REDUCED])


@pytest.mark.processes
def test_of_several_ranks_the_worst_counts() -> None:
    run = drifting(blocks=1, steps=6, ranks=(0, 2), statistics=("sqnr_db",), histograms=False)
    (overview, *_) = overviews(run, Subjects(run).families, Columns.of(run, 6))
    item = [run.grid("sqnr_db", "activation", rank=rank).values for rank in (0, 2)]
    row, rank = overview.worst_rows(1)[0]
    assert overview.worst[rank][row] == min(values.min() for values in item)


def with_values(run: RecordedRun, change: dict[tuple[str, int], float]) -> RecordedRun:
    """A run in which some numbers of activation underflows% are others: (layer, iteration) -> value."""
    numbers = {layer: run.select(statistic="underflows%", tensor="activation", layer=layer)[0] for layer, _ in change}

    def read(wanted: list[int] | None) -> pa.Table:
        table = run.read_values(wanted)
        values = table["value"].to_numpy().copy()
        for (layer, iteration), value in change.items():
            is_it = (table["series"].to_numpy() == numbers[layer]) & (table["iteration"].to_numpy() == iteration)
            values[is_it] = value
        return table.set_column(3, "value", pa.array(values))

    return replace(run, read_values=read)


def test_what_is_not_finite_is_the_worst_and_survives() -> None:
    first, second = RUN.ordered_layers[:2]
    run = with_values(RUN, {(first, 3): math.nan, (second, 4): math.inf})
    (overview,) = overviews(run, [family_of_run(run)], Columns.of(run, 4))
    assert overview.worst_rows(2) == [(0, REDUCED), (1, REDUCED)]
    cells = overview.cells[REDUCED]
    assert math.isnan(cells[0, 0])
    levels = PackedScale.of(cells).bytes(cells, overview.present[REDUCED])
    assert (levels[0, 0], levels[1, 0]) == (NAN, INF)
    assert math.isnan(page_data(run, 10**7)[0]["worst_layers"][0]["items"][0]["value"])


def test_the_best_possible_value_has_a_cell(tmp_path: Path) -> None:
    """In any recipe: an infinite SQNR is no first step of delayed scaling."""
    torch.manual_seed(0)
    model = te.Linear(32, 32)
    torch.nn.init.constant_(model.weight, 448.0)
    config = {"s": feature("LogFp8TensorStats", ["all"], tensors=["weight"], stats=["sqnr_db"], freq=1)}
    with InspectSession(config, model=model, log_dir=tmp_path) as session:
        for _ in range(2):
            with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
                model(torch.randn(16, 32)).sum().backward()
            session.step()
    run = open_run(tmp_path)
    assert run.grid("sqnr_db", "weight").values.tolist() == [[math.inf, math.inf]]
    (overview,) = overviews(run, Subjects(run).families, Columns.of(run, 10))
    assert overview.present[REDUCED].all()
    assert overview.cells[REDUCED].tolist() == [[math.inf, math.inf]]
    assert page_data(run, 10**7)[0]["worst_layers"] == [{"family": 0, "items": [], "counted": True}]


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.linspace(3, 40, 500), "linear"),
        (np.geomspace(1e-6, 100, 500), "log"),
        (np.concatenate([-np.geomspace(1e-7, 5, 300), np.geomspace(1e-7, 5, 300)]), "asinh"),
        (np.full(7, 2.5), "linear"),
    ],
)
def test_a_level_is_near(values: np.ndarray, kind: str) -> None:  # type: ignore[type-arg]
    scale = PackedScale.of(values, centred=kind == "asinh")
    assert scale.kind == kind
    levels = scale.bytes(values, np.ones(values.shape, bool))
    assert levels.min() >= 1
    assert levels.max() <= LEVELS
    ends = {"linear": (float, float), "log": (np.log, np.exp), "asinh": (np.arcsinh, np.sinh)}
    place, value = (np.vectorize(function) for function in ends[kind])
    low, high = place(np.array([scale.low, scale.high]) / scale.bend)
    result = scale.bend * value(low + (levels - 1.0) / (LEVELS - 1) * (high - low))  # as the page reads them
    if kind == "linear":
        assert np.abs(result - values).max() <= np.ptp(values) / (LEVELS - 1) / 2 + 1e-12
    else:
        large = np.abs(values) > (scale.bend if kind == "asinh" else 0)
        assert np.abs(result[large] / values[large] - 1).max() < 0.08


def test_zero_has_a_byte_of_its_own_on_a_logarithmic_scale() -> None:
    values = np.array([0.0, 1e-9, 1.0])
    scale = PackedScale.of(values)
    assert scale.bytes(values, np.array([True, True, True])).tolist() == [ZERO, 1, LEVELS]
    assert scale.bytes(values, np.array([False, True, True]))[0] == 0


@pytest.mark.processes
def test_worst_layers_leave_out_what_is_as_good_as_can_be() -> None:
    run = drifting(blocks=2, steps=20, statistics=("nonfinite_num", "numel"), histograms=False)
    made = list(overviews(run, Subjects(run).families, Columns.of(run, 20)))
    result = worst_layers(made)
    assert {made[item["family"]].family.statistic for item in result} == {"nonfinite_num"}, "numel has no direction"
    assert [item["layer"] for first in result for item in first["items"]] == [5, 5, 5], "only the layer that has any"


@pytest.mark.processes
def test_histograms_are_added_up_by_column() -> None:
    run = drifting(blocks=1, steps=4)
    (series, *_) = run.select(statistic="exponent_histogram", tensor="weight")
    family = next(histogram for histogram in Subjects(run).histograms if histogram.family.tensor == "weight")
    ((_, _, lowest, counts),) = histograms(run, family, Columns.of(run, 2), {series})
    expected = np.zeros((2, counts.shape[1]))
    for step, row in enumerate(run.vectors([series]).to_pylist()):
        expected[step // 2, np.array(row["bin"]) - lowest] += row["count"]
    assert counts.tolist() == expected.tolist()


def test_the_page_stays_within_its_size(tmp_path: Path) -> None:
    run = drifting(blocks=2, steps=60, histograms=False)
    small, large = (page_data(run, most)[1] for most in (60_000, 10**7))
    assert sum(map(len, small)) <= 60_000 < sum(map(len, large))
    assert write_report(run, tmp_path / "report.html").stat().st_size <= 10_000_000


@pytest.mark.processes
def test_an_empty_run_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="nothing was recorded"):
        write_report(empty(), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []
