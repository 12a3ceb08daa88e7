"""The sinks of docs/custom-features.md: the code blocks, sinks that fail, and the lifetime of records."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks import InspectSession
from te_precision_callbacks.sinks import Sink, StepRecords
from tests.conftest import Keeper
from tests.docs.pages import blocks
from tests.lightning.models import board_scalars

PRINTER, ALARM, LARGEST, BOARD = blocks("docs/custom-features.md", "python")[3:]
NUMBERS = 2 * 2 * 2  # layers, tensors, statistics


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the names and the output of the first block.

    What the page takes from docs/session.md is given: a model, its optimizer, four batches, and a config.
    """
    monkeypatch.chdir(tmp_path)
    (config,) = blocks("docs/session.md", "yaml", "# config.yaml")
    Path("config.yaml").write_text(config)
    torch.manual_seed(0)
    model = torch.nn.Sequential(te.LayerNormLinear(64, 64), te.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    results = {"te": te, "model": model, "optimizer": optimizer, "loader": torch.randn(4, 32, 64)}
    exec(PRINTER, results)
    results["printed"] = capsys.readouterr().out.splitlines()
    return results


def train(names: dict[str, Any], *sinks: Any, **keywords: Any) -> InspectSession:
    with InspectSession("config.yaml", model=names["model"], log_dir="run", sinks=sinks, **keywords) as session:
        for step, batch in enumerate(names["loader"]):
            names["model"](batch).pow(2).mean().backward()
            session.step(logging_step=100 + step)
    return session


def test_the_printer(names: dict[str, Any]) -> None:
    first, *lines, last = names["printed"]
    assert (first, last) == ("rank 0 of 1, 2 layers", "done")
    assert len(lines) == 4 * NUMBERS
    assert {line.rsplit(" ", 1)[0] for line in lines} >= {f"{step} 1 gradient std" for step in range(4)}


def test_the_alarm(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    exec(ALARM, names)

    class Fails(Sink):
        def write(self, records: StepRecords) -> None:
            if records.iteration == 2:
                raise ValueError("no room")

    train(names, Fails(), names["Alarm"]())
    assert capsys.readouterr().out == "2 writing records to Fails: ValueError: no room\n"


def test_the_columns(names: dict[str, Any], keeper: Keeper) -> None:
    exec(LARGEST, names)
    largest = names["Largest"]()
    train(names, largest, keeper)
    for records in keeper.steps:
        assert records.logging_step == 100 + records.iteration
        assert len(records) == len(records.series) == len(records.values) == NUMBERS
        row = max(records, key=lambda row: row.value)
        assert largest.found[records.iteration] == (row.layer, row.value)


def test_the_logger(names: dict[str, Any], keeper: Keeper) -> None:
    exec(BOARD, names)
    train(names, names["Board"]("board"), keeper)
    logged = board_scalars(Path("board"))
    expected = {
        (row.layer, row.statistic, 100 + records.iteration): row.value
        for records in keeper.steps
        for row in records
        if row.tensor == "activation"
    }
    results = {
        (name.split("/")[0].removeprefix("te."), name.split("/")[2], step): value
        for name, points in logged.items()
        if name.startswith("te.")
        for step, value in points.items()
    }
    assert results == pytest.approx(expected)
    assert {name for name in logged if name.startswith("te/")} >= {"te/all/gradient/max/median"}


class Failing(Sink):
    """A sink that fails in its second step."""

    def __init__(self) -> None:
        self.closed: list[BaseException | None] = []

    def write(self, records: StepRecords) -> None:
        if records.iteration == 1:
            raise OSError("disk full")

    def close(self, error: BaseException | None) -> None:
        self.closed.append(error)


def test_a_sink_that_fails_is_closed_with_its_own_exception_and_the_others_go_on(
    names: dict[str, Any], keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    failing = Failing()
    session = train(names, failing, keeper)
    assert [str(error) for error in failing.closed] == ["disk full"]
    assert [record.message.count("disk full") for record in caplog.records if record.levelname == "ERROR"] == [1]
    assert keeper.iterations == list(range(session.iteration)) == [0, 1, 2, 3]
    assert keeper.closed == [None]
