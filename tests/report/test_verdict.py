"""The verdict in the report: it comes first, leads to the plots, and is there in full on a page."""

from pathlib import Path
from urllib.parse import parse_qs

import pytest

from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.views.report import write_report
from te_precision_callbacks.views.report.data import page_data
from tests.planted import BAD, defective
from tests.report.conftest import Look


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
    assert "3:-1" in curves["std", "gradient"]
    assert stated["exact"]["curves"] < stated["exact"]["series"]


def test_no_magnitude_is_in_the_list_of_worst_layers(run: RecordedRun) -> None:
    stated = page_data(run, 10**7)[0]
    assert {stated["families"][item["family"]]["statistic"] for item in stated["worst_layers"]} == {"nonfinite_num"}


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
    assert "Not checked: " + ", ".join(item.rule for item in verdict.not_judged) in said
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
    assert ", ".join(verdict.judged) in look.page.locator("main").inner_text()
    for row, missing in zip(look.page.locator("tbody tr").all_inner_texts(), verdict.not_judged, strict=True):
        assert row.split("\t")[0] == missing.rule
        assert missing.collect in row
