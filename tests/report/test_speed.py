"""The page Speed: expected times; and what it says where nothing is known."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pytest

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.tables import GEMMS, OPERANDS
from te_precision_callbacks.speed import device_named
from te_precision_callbacks.speed.estimate import estimate_step
from te_precision_callbacks.speed.recorded import step_of_run
from te_precision_callbacks.views.report import write_report
from te_precision_callbacks.views.report.facts import speed_facts
from te_precision_callbacks.views.show.view import look as look_at
from tests.report.conftest import Look
from tests.report.runs import drifting, empty
from tests.speed.planted import products, tables

pytestmark = pytest.mark.processes

H100 = "NVIDIA H100 80GB HBM3"
NASTY = "fc<script>window.hurt=1</script>$x$.0"


def on(run: RecordedRun, gpu: str | None) -> RecordedRun:
    (segment,) = run.segments
    return replace(run, segments=(replace(segment, facts={**segment.facts, "gpu": gpu}),))


def recorded(folder: Path, *, gpu: str | None = H100, rename: Callable[[str], str] = str) -> RecordedRun:
    gemms, operands = tables([replace(product, layer=rename(product.layer)) for product in products()])
    return replace(
        on(drifting(blocks=1, steps=4, names=("head",)), gpu),
        path=folder,
        gemms=pa.Table.from_pylist(gemms, GEMMS),
        operands=pa.Table.from_pylist(operands, OPERANDS),
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RecordedRun:
    return recorded(tmp_path_factory.mktemp("speed") / "run")


def test_the_times_are_those_of_the_command(run: RecordedRun) -> None:
    facts, speed = speed_facts(run), estimate_step(step_of_run(run), device_named("h100"))
    rows = facts["kinds"]["rows"]
    kinds = {row["name"]: row["layers"] for row in rows}
    assert (kinds["head"], kinds["layers.{0-1}.mlp.fc1"]) == (1, 2)
    for key in ("high_ms", "low_ms", "cast_ms"):
        assert sum(row[key] for row in rows) == pytest.approx(getattr(speed.total, key))
    assert facts["total"]["speedup"] == speed.total.speedup
    assert facts["summary"].startswith(f"The matrix products of a step: expected {speed.total.speedup:.2f} (")
    assert facts["summary"].endswith("as fast as BF16 on NVIDIA H100 SXM; 8 layers gain nothing")
    assert [fact["text"] for fact in facts["advice"]] == [item.text for item in speed.advice]
    assert [fact["saves_ms"] for fact in facts["advice"]] == sorted((a.saves_ms for a in speed.advice), reverse=True)


@pytest.mark.parametrize(
    ("gpu", "why"),
    [(None, "ran without a GPU"), ("Radeon", "The speed of 'Radeon'")],
)
def test_no_number_without_a_device(run: RecordedRun, gpu: str | None, why: str) -> None:
    facts = speed_facts(on(run, gpu))
    assert facts["summary"] == "The speed of this run is unknown"
    assert why in facts["unknown"]
    assert "te-precision report RUN --device h200" in facts["unknown"]
    assert not {"total", "kinds", "advice"} & set(facts)
    assert look_at(on(run, gpu)).speed == ""
    assert speed_facts(on(run, gpu), device_named("h200"))["device"] == "NVIDIA H200 SXM"


@pytest.fixture(scope="module")
def report(run: RecordedRun, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(run, tmp_path_factory.mktemp("report") / "report.html")


@pytest.mark.slow  # a browser
def test_the_page_begins_with_the_answer_and_draws_all(look: Look, run: RecordedRun, report: Path) -> None:
    look.open_in_the_dark(report, {"speed": 1})
    region = look.page.get_by_role("region", name=speed_facts(run)["summary"])
    assert region.bounding_box()["y"] < 160  # type: ignore[index]
    names, colours = zip(*look.plot("plot.data.map((trace) => [trace.name, trace.marker.color])"), strict=True)
    assert names == ("BF16", "as it runs: GEMMs", "as it runs: casts", "interval of 95 %")
    assert len(set(colours)) == len(colours)


@pytest.mark.slow  # a browser
def test_names_are_text_and_nothing_is_guessed(look: Look, tmp_path: Path) -> None:
    run = recorded(tmp_path / "run", rename=lambda name: NASTY if name == "head" else name)
    look.open(write_report(run, tmp_path / "report.html"), "page=speed")
    look.everything_drawn()
    assert look.page.evaluate("window.hurt") is None
    assert NASTY in look.page.locator("table").nth(0).inner_text()
    look.open(write_report(on(run, None), tmp_path / "report.html"), "page=speed")
    said = look.page.locator(".verdict").inner_text()
    assert said.startswith("The speed of this run is unknown.")
    assert "--device h200" in said
    assert look.page.locator(".advice").count() == 0
    nothing = replace(empty(), events=run.events)
    look.open(write_report(nothing, tmp_path / "report.html", device=device_named("h200")), "page=speed")
    assert "no matrix products with sizes" in look.page.locator(".verdict").inner_text()
    assert look.everything_drawn() == 0
