"""The page of a search, in the browser; and log-probabilities beside the metrics of a run."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.search import search
from tests.compare.recorded import record
from tests.report.conftest import Look
from tests.search.models import RECIPES, Net, batches, closure_of


@pytest.mark.slow
def test_the_frontier_is_drawn(look: Look, tmp_path: Path) -> None:
    model = Net(RECIPES["current"](), blocks=2)
    result = search(model, closure_of(model), batches(), low_share=0.7, folder=tmp_path, progress=False)
    look.open_in_the_dark(tmp_path / "search.html", {"summary": 1})
    costs = look.plot("plot.data[0].x")
    assert costs == pytest.approx([100 * (1 - point.low_share) for point in result.frontier])
    assert look.plot("plot.data[0].y") == pytest.approx([point.expected_error for point in result.frontier])
    choice = look.plot("[plot.data[2].x[0], plot.data[2].y[0]]")
    assert choice == pytest.approx([100 * (1 - result.low_share), result.effect.error])
    text = look.page.locator("main").inner_text()
    assert all(name in text for name in result.high)
    look.page.set_viewport_size({"width": 400, "height": 900})
    look.open(tmp_path / "search.html")
    assert look.everything_drawn() == 1
    assert look.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "nothing sticks out"
    assert look.plot("plot.clientWidth >= plot.querySelector('.main-svg').getBoundingClientRect().width")


@pytest.mark.slow
def test_log_probabilities_are_curves_beside_the_findings(look: Look, tmp_path: Path) -> None:
    values = np.ones(20)
    values[12:] = np.inf
    record(tmp_path / "run", {("fc", "activation", "cur_amax"): values}, scalars={"loss": np.linspace(2, 1, 20)})
    steps = np.repeat(np.arange(20), 8)
    trainer = np.where(steps < 12, -1.0, -1.5)
    columns = {"sample": steps * 0, "token": steps * 0, "trainer": trainer, "rollout": steps * 0 - 1.0}
    pq.write_table(pa.table(columns), tmp_path / "without.parquet")
    pq.write_table(pa.table({**columns, "step": steps}), tmp_path / "tokens.parquet")
    command = ["report", str(tmp_path / "run"), "-o", str(tmp_path / "report.html"), "--logprobs"]
    refused = CliRunner().invoke(cli.app, [*command, str(tmp_path / "without.parquet")])
    assert "without.parquet has no column 'step'" in str(refused.exception)
    written = CliRunner().invoke(cli.app, [*command, str(tmp_path / "tokens.parquet")])
    assert written.exit_code == 0, written.output
    look.open(tmp_path / "report.html", "scalar=log-probabilities, mean |d|")
    look.everything_drawn()
    drawn = look.page.locator(".plot[aria-label='Trainer metrics over steps']")
    curve = drawn.evaluate("plot => plot.data[0].y")
    assert curve == [0.0] * 12 + [0.5] * 8
    findings = drawn.evaluate("plot => plot.layout.shapes.map((shape) => shape.x0)")
    assert findings == [12]
