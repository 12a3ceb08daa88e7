"""Data of a page: each cell the worst of its steps, each number within half a level, all within the size."""

import math
from collections import namedtuple
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from te_precision_callbacks import InspectSession
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.runs import RecordedRun, UnknownSubjectError, open_run
from te_precision_callbacks.runs.tables import REDUCED, STEP0
from te_precision_callbacks.sinks.metrics import MetricSelection
from te_precision_callbacks.statistics.series import family_of
from te_precision_callbacks.views.report import ReportError, write_report
from te_precision_callbacks.views.report.data import (
    Columns,
    Subjects,
    curves_of,
    events,
    heat_map,
    histograms,
    page_data,
)
from te_precision_callbacks.views.report.packing import bfloat16
from te_precision_callbacks.views.show.view import RunView as look_at
from tests.conftest import Keeper, feature
from tests.planted import BAD, defective
from tests.report.conftest import Look
from tests.report.runs import drifting, empty
from tests.runs.making import RunWriter
from tests.training import observed

RUN = drifting(blocks=2, steps=37, histograms=False)


@pytest.mark.parametrize("most", [1, 5, 37, 100])
def test_a_cell_is_the_worst_of_its_steps(most: int) -> None:
    subjects = Subjects(RUN)
    columns = Columns(RUN, most)
    assert len(columns.first) == min(most, 37)
    for series in subjects.families:
        family = series.family
        shown = heat_map(series, curves_of(RUN, series.series.tolist()), columns)
        grid = RUN.grid(family.statistic, family.tensor)
        assert [subjects.layers[layer].name for layer in series.layer] == grid.layers
        for column, (first, last) in enumerate(zip(columns.first, columns.last, strict=True)):
            for row, values in enumerate(grid.values[:, first : last + 1]):
                assert shown.cells[row, column] == max(values, key=family.badness)
        assert series.worst.tolist() == grid.values[np.arange(len(grid.layers)), series.worst_at].tolist()
        assert series.worst.tolist() == [max(values, key=family.badness) for values in grid.values]


@pytest.mark.parametrize(("cells_per_row", "columns"), [(0.5, 1), (3, 3), (100, 37)])
def test_the_heat_maps_of_all_statistics_share_the_cells(
    monkeypatch: pytest.MonkeyPatch, cells_per_row: float, columns: int
) -> None:
    families = Subjects(RUN).families
    rows = sum(len(family.series) for family in families)
    monkeypatch.setattr("te_precision_callbacks.views.report.data._CELLS", int(cells_per_row * rows))
    shapes = [family["arrays"]["cells"]["shape"] for family in page_data(RUN, 10**7)[0]["families"]]
    assert shapes == [(len(family.series), columns) for family in families]


def test_a_family_has_the_gemm_of_its_series() -> None:
    assert {series.family.gemm for series in Subjects(RUN).families} == {None}
    column = RUN.series.schema.get_field_index("gemm")
    gemms = pa.array(["fprop"] * len(RUN.series), RUN.series.schema.field(column).type)
    run = replace(RUN, series=RUN.series.set_column(column, "gemm", gemms))
    assert {series.family.gemm for series in Subjects(run).families} == {"fprop"}


@pytest.mark.processes
def test_of_several_ranks_the_worst_counts() -> None:
    run = drifting(blocks=1, steps=6, ranks=(0, 2), statistics=("sqnr_db",), histograms=False)
    (family, *_) = Subjects(run).families
    item = [run.grid("sqnr_db", "activation", rank=rank).values for rank in (0, 2)]
    (worst,) = family.worst_rows(1)
    assert family.worst[worst] == min(values.min() for values in item)
    assert family.rank[worst] == (0, 2)[int(np.argmin([values.min() for values in item]))]


def with_values(run: RecordedRun, change: dict[tuple[str, int], float]) -> RecordedRun:
    """A run with some changed values of activation underflows%: (layer, iteration) -> value."""
    numbers = {layer: run.select(statistic="underflows%", tensor="activation", layer=layer)[0] for layer, _ in change}

    def read(wanted: list[int] | None) -> pa.Table:
        table = run.read_values(wanted)
        values = table["value"].to_numpy().copy()
        for (layer, iteration), value in change.items():
            is_it = (table["series"].to_numpy() == numbers[layer]) & (table["iteration"].to_numpy() == iteration)
            values[is_it] = value
        return table.set_column(3, "value", pa.array(values))

    worst = run.series.to_pylist()
    for (layer, iteration), value in change.items():
        worst[numbers[layer]] |= {"worst": value, "worst_at": iteration}
    return replace(run, read_values=read, series=pa.Table.from_pylist(worst, run.series.schema))


def test_what_is_not_finite_is_the_worst_and_survives() -> None:
    first, second = RUN.ordered_layers[:2]
    run = with_values(RUN, {(first, 3): math.nan, (second, 4): math.inf})
    (family,) = (
        series
        for series in Subjects(run).families
        if (series.family.statistic, series.family.tensor) == ("underflows%", "activation")
    )
    cells = heat_map(family, curves_of(run, family.series.tolist()), Columns(run, 4)).cells
    assert [(family.layer[row], family.rank[row]) for row in family.worst_rows(2)] == [(0, REDUCED), (1, REDUCED)]
    assert math.isnan(cells[0, 0])
    assert math.isinf(cells[1, 0])
    assert math.isnan(family.worst[family.worst_rows(1)[0]])


def test_the_best_possible_value_has_a_cell(tmp_path: Path) -> None:
    """In any recipe: an infinite SQNR is no first step of delayed scaling."""
    torch.manual_seed(0)
    model = te.Linear(32, 32)
    torch.nn.init.constant_(model.weight, 448.0)
    config = {"s": feature("LogFp8TensorStats", ["all"], tensors=["weight"], stats=["sqnr_db"], freq=1)}
    observed(tmp_path, config, net=model, steps=2, recipe=Float8CurrentScaling())
    run = open_run(tmp_path)
    assert run.grid("sqnr_db", "weight").values.tolist() == [[math.inf, math.inf]]
    (family,) = Subjects(run).families
    shown = heat_map(family, curves_of(run, family.series.tolist()), Columns(run, 10))
    assert shown.present.all()
    assert shown.cells.tolist() == [[math.inf, math.inf]]
    assert (family.worst_rows(2), family.worst, family.worst_at) == ([0], [math.inf], [0])


def test_the_numbers_of_cells_have_three_digits() -> None:
    values = np.concatenate([-np.geomspace(1e-30, 1e30, 500), [0.0, 1.0, 100.0, 448.0, math.inf, math.nan]])
    result = (bfloat16(values).astype(np.uint32) << 16).view(np.float32)  # as the page reads them
    assert result[500:].tolist() == pytest.approx([0.0, 1.0, 100.0, 448.0, math.inf, math.nan], rel=0, nan_ok=True)
    np.testing.assert_allclose(result, values, rtol=0.006)


@pytest.mark.processes
def test_histograms_are_added_up_by_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_precision_callbacks.views.report.data._MOST_HISTOGRAMS_AT_ONCE", 3)  # read in pieces
    run = drifting(blocks=1, steps=4)
    series, other, *_ = run.select(statistic="exponent_histogram", tensor="weight")
    (_, shown) = histograms(run, [other, series], Columns(run, 2))
    lowest, counts = shown.lowest, shown.counts
    expected = np.zeros((2, counts.shape[1]))
    for step, row in enumerate(run.vectors([series]).to_pylist()):
        expected[step // 2, np.array(row["bin"]) - lowest] += row["count"]
    assert counts.tolist() == expected.tolist()


def test_an_event_has_what_is_known_of_it(tmp_path: Path) -> None:
    with RunWriter.begin(tmp_path) as run:
        run.add_step(0)
        run.add_event("dump_written", "first", iteration=0, layer="fc1", severity="warning")
        run.add_event("note", "second", iteration=0, severity="info")
    rows, count = events(open_run(tmp_path))
    assert count == len(rows)
    first, second = ({key: row[key] for key in row.keys() - {"time"}} for row in rows)
    known = {"segment": 0, "iteration": 0, "ranks": [0]}
    assert first == known | {"kind": "dump_written", "text": "first", "layer": "fc1", "severity": "warning"}
    assert second == known | {"kind": "note", "text": "second", "severity": "info"}


def test_the_page_stays_within_its_size(tmp_path: Path) -> None:
    run = drifting(blocks=2, steps=60, histograms=False)
    small, large = (page_data(run, most)[1] for most in (60_000, 10**7))
    assert sum(map(len, small)) <= 60_000 < sum(map(len, large))
    assert write_report(run, tmp_path / "report.html").stat().st_size <= 10_000_000


@pytest.mark.processes
def test_an_empty_run_is_no_page(tmp_path: Path) -> None:
    with pytest.raises(ReportError, match="has no records"):
        write_report(empty(), tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------- worst layers: the same in ``show``, in the report and in loggers


LAYERS, LOSSY, STEPS, MOST = 16, (3, 12), 4, 5
CONFIG = {
    "lost": feature(
        "LogFp8TensorStats",
        ["all"],
        tensors=["activation", "weight", "gradient"],
        stats=["sqnr_db", "underflows%"],
        freq=1,
    )
}


Trained = namedtuple("Trained", "run session keeper")
LOSSY_NAMES = [str(number) for number in LOSSY]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """A run under delayed scaling.

    In its first step, with the scale 1, nearly all of each gradient underflows. Later, the weights of the lossy layers
    lose most: a tenth of their elements vanish next to an outlier, which is kept so well that their SQNR is the best.
    """
    torch.manual_seed(0)
    model = torch.nn.ModuleList(te.Linear(32, 32, bias=False) for _ in range(LAYERS))
    with torch.no_grad():
        for number in LOSSY:
            model[number].weight.uniform_(-0.04, 0.04)
            model[number].weight[0, 0] = 2000.0 + number
    log_dir, keeper = tmp_path_factory.mktemp("trained"), Keeper()
    with InspectSession(CONFIG, model=model, log_dir=log_dir, sinks=[keeper]) as session:
        for _ in range(STEPS):
            with te.autocast(enabled=True, recipe=DelayedScaling()):
                outs = [layer(torch.randn(16, 32)) for layer in model]
            sum((out * torch.randn_like(out) * 7e-6).sum() for out in outs).backward()
            session.step()
    return Trained(open_run(log_dir), session, keeper)


def by_hand(run: RecordedRun, statistic: str, tensor: str) -> list[str]:
    worst = {}
    for number in run.select(statistic=statistic, tensor=tensor):
        table = run.values([number])
        columns = (table[name].to_pylist() for name in ("value", "flags"))
        kept = [value for value, flags in zip(*columns, strict=True) if not flags & STEP0]
        assert len(kept) == STEPS - 1, "the first step of delayed scaling is marked"
        worst[run.series["layer"][number].as_py()] = max(map(family_of(tensor, statistic).badness, kept))
    return sorted(worst, key=lambda layer: -worst[layer])


def test_the_losses_are_where_the_run_has_them(trained: Trained) -> None:
    assert by_hand(trained.run, "underflows%", "weight")[:2] != by_hand(trained.run, "sqnr_db", "weight")[:2]
    assert sorted(by_hand(trained.run, "underflows%", "weight")[:2]) == sorted(LOSSY_NAMES)
    assert set(by_hand(trained.run, "sqnr_db", "weight")[-2:]) == set(LOSSY_NAMES), "which the SQNR does not see"
    assert min(trained.keeper.steps[0].families[family_of("gradient", "underflows%")].values()) > 50


def test_show_chooses_after_it_has_left_the_first_step_out(trained: Trained) -> None:
    shown = look_at(trained.run, ["underflows%"], most=2).worst["underflows%"]
    assert {series.subject[1:3] for series in shown} == {(layer, "weight") for layer in LOSSY_NAMES}
    assert all(series.worst > 5 and series.worst_iteration > 0 for series in shown)


def test_the_report_names_the_same(trained: Trained) -> None:
    subjects = Subjects(trained.run)
    families = {(each.family.statistic, each.family.tensor): each for each in subjects.families}
    for tensor in ("activation", "weight", "gradient"):
        for statistic in ("underflows%", "sqnr_db"):
            family = families[statistic, tensor]
            worst = [row for row in family.worst_rows(MOST) if family.worst[row]]
            named = [subjects.layers[family.layer[row]].name for row in worst]
            assert named == by_hand(trained.run, statistic, tensor)[: len(named)]
            assert all(family.worst_at[row] > 0 for row in worst)


def test_loggers_choose_the_same(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("te_precision_callbacks.sinks.metrics.MOST_SERIES", 1)
    monkeypatch.setattr("te_precision_callbacks.sinks.metrics.PLACES", 4)
    metrics = MetricSelection()(trained.keeper.steps[-1])
    assert {f"te.{layer}/weight/underflows%" for layer in LOSSY_NAMES} <= metrics.keys()
    worst = {f"te.{layer}/weight/sqnr_db" for layer in by_hand(trained.run, "sqnr_db", "weight")[:4]}
    assert {name for name in metrics if name.startswith("te.") and name.endswith("/weight/sqnr_db")} == worst


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ({"layer": "nope"}, r"the run has no layer 'nope'\. It has '0', '1', '10' and 13 more\."),
        ({"statistic": "sqnr"}, r"the run has no statistic 'sqnr'\. It has 'sqnr_db', 'underflows%'\."),
        ({"tensor": "grad"}, r"no tensor 'grad'\. It has 'activation', 'gradient', 'weight'\."),
        ({"rank": 3}, r"no rank 3\. All its values are reduced over ranks\."),
        ({"gemm": "fprop"}, r"no gemm 'fprop'\. It names no gemm\."),
    ],
)
def test_what_a_run_does_not_have_is_an_error(trained: Trained, wanted: dict[str, Any], says: str) -> None:
    with pytest.raises(UnknownSubjectError, match=says):
        trained.run.select(**wanted)
    if wanted.keys() & {"statistic", "tensor"}:
        with pytest.raises(UnknownSubjectError, match=says):
            trained.run.grid(**{"statistic": "sqnr_db", "tensor": "weight"} | wanted)


def test_a_selection_by_another_name_is_an_error(trained: Trained) -> None:
    with pytest.raises(OptionError, match="takes no lyer="):
        trained.run.select(lyer="0")


# --------------------------------------------------- the verdict: first, with links to the plots, and in full on a page


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return open_run(defective(tmp_path_factory.mktemp("defective")))


@pytest.fixture(scope="module")
def report(run: RecordedRun) -> Path:
    return write_report(run, run.path / "report.html")


def test_the_curves_of_findings_come_first(tmp_path: Path) -> None:
    run = open_run(defective(tmp_path, steps=200))
    stated = page_data(run, 1_000)[0]
    curves = {(item["statistic"], item["tensor"]): list(item["curves"]) for item in stated["families"]}
    assert sum(map(len, curves.values())) <= 1
    stated = page_data(run, 40_000)[0]
    curves = {(item["statistic"], item["tensor"]): list(item["curves"]) for item in stated["families"]}
    assert 3 in curves["std", "gradient"]
    assert sum(map(len, curves.values())) < sum(item["arrays"]["layer"]["shape"][0] for item in stated["families"])


@pytest.mark.slow
def test_no_magnitude_is_in_the_list_of_worst_layers(look: Look, report: Path) -> None:
    look.open(report)
    assert look.page.locator(".worst").count() == 0
    (clean,) = look.page.locator(".clean").all_inner_texts()
    assert "nonfinite_num of " in clean
    assert "std" not in clean


@pytest.mark.slow
def test_the_first_screen_begins_with_the_verdict(look: Look, run: RecordedRun, report: Path) -> None:
    verdict = diagnose(run)
    look.open(report)
    region = look.page.get_by_role("region", name=verdict.summary)
    assert region.bounding_box()["y"] < 120  # type: ignore[index]
    assert look.page.locator("main").inner_text().startswith(verdict.summary)
    said = region.inner_text()
    for text in (verdict[0].subject, verdict[0].seen, verdict[0].remedy, "since step 0", "warning"):
        assert text in said
    rules = dict.fromkeys(item.rule for item in verdict.not_checked if item.rule not in verdict.checked)
    assert f"Not checked: {', '.join(rules)}. " in said
    ink, back = (region.locator(".severity").evaluate(f"node => getComputedStyle(node).{name}")
                 for name in ("color", "backgroundColor"))  # fmt: skip
    assert ink != back


@pytest.mark.slow
def test_the_heat_map_marks_the_row_of_a_finding(look: Look, report: Path) -> None:
    look.open(report, "page=heatmap&statistic=std&tensor=gradient", dark=True)
    plot = look.page.locator(".js-plotly-plot")
    layout = plot.evaluate("node => ({shapes: node.layout.shapes, ticks: node.layout.yaxis.ticktext})")
    (row,) = [at for at, name in enumerate(layout["ticks"]) if name.startswith("● ")]
    (shape,) = [item for item in layout["shapes"] if item["type"] == "rect"]
    assert (shape["y0"], shape["y1"]) == (row - 0.5, row + 0.5)
    assert shape["line"]["color"] == plot.evaluate(
        "() => getComputedStyle(document.documentElement).getPropertyValue('--warn').trim()"
    )
    short = layout["ticks"][row].removeprefix("● ")
    assert plot.get_attribute("aria-label") == f"Heatmap of std of gradient; marked: {short}, with a finding"
    assert f"● has a finding: {short}" in look.page.locator(".card").inner_text()
    assert "worst" not in look.page.locator("main").inner_text()
    look.turn("page=heatmap&statistic=cur_amax&tensor=weight")
    assert not plot.evaluate("node => node.layout.shapes.length")


@pytest.mark.extended
@pytest.mark.slow
def test_a_finding_leads_to_its_plots_by_keyboard(look: Look, report: Path) -> None:
    look.open(report)
    look.page.get_by_role("link", name="Heat map: std of gradient").focus()
    look.go_by(lambda: look.page.keyboard.press("Enter"))
    asked = parse_qs(look.page.url.partition("#")[2])
    assert (asked["page"], asked["statistic"], asked["tensor"]) == (["heatmap"], ["std"], ["gradient"])
    look.everything_drawn()
    assert look.page.locator(".card h2").inner_text() == "std of gradient"
    look.page.go_back()
    look.go(look.page.get_by_role("link", name=f"Curves: {BAD}"))
    assert look.page.locator("h1").inner_text() == BAD
    assert look.page.locator(".three").last.locator(".card h2").first.inner_text() == "std"


@pytest.mark.slow
def test_the_page_of_findings_has_all_of_each(look: Look, run: RecordedRun, report: Path) -> None:
    verdict = diagnose(run)
    (finding,) = verdict.findings
    look.open(report)
    look.go(look.page.get_by_role("link", name="All details"))
    said = look.page.get_by_role("region", name=f"warning {finding.subject}").inner_text()
    for text in (finding.seen, finding.why, finding.remedy, finding.disproof, finding.source, finding.title, BAD):
        assert text in said
    assert "steps 0 to 39" in said
    assert ", ".join(verdict.checked) in look.page.locator("main").inner_text()
    for row, missing in zip(look.page.locator("tbody tr").all_inner_texts(), verdict.not_checked, strict=True):
        assert row.split("\t")[0] == missing.rule
        assert missing.collect in row
