"""docs/records.md: its code as it stands there."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks import InspectSession
from te_precision_callbacks.runs import list_runs, open_run, writing
from te_precision_callbacks.runs.tables import EVENTS, FACTS, SCALARS, STEPS, VALUES, VECTORS
from tests.conftest import statistics
from tests.docs.pages import PAGES, blocks
from tests.runs.making import write_run

PANDAS, POLARS, DUCKDB, OPEN, LOOP = blocks("docs/records.md", "python")


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("code", [PANDAS, POLARS, DUCKDB], ids=["pandas", "polars", "DuckDB"])
def test_other_libraries_read_it(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert len([line for line in code.splitlines() if line]) == 3
    monkeypatch.setattr(writing, "CLOSE_BYTES", 1)
    run_id = write_run(Path("logs"), range(5))
    write_run(Path("logs"), range(5, 7), run_id=run_id)
    names: dict[str, Any] = {}
    exec(code, names)
    assert {str(layer): value for layer, value in np.asarray(names["values"]).tolist()} == {
        "net.0": 60.0,
        "net.1": 61.0,
    }


def test_reading_with_this_package() -> None:
    run_id = write_run(Path("logs"), range(5), statistic="cur_amax")
    names: dict[str, Any] = {}
    exec(OPEN, names)
    assert list_runs("logs") == (run_id,)
    assert len(names["table"]) == 5
    assert names["grid"].layers == ["net.1", "net.0"]


def test_a_loop_of_your_own() -> None:
    model = torch.nn.Sequential(te.Linear(32, 32))
    names = {"model": model, "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loader": torch.randn(3, 16, 32)}
    with InspectSession(statistics(), model=model, log_dir="logs") as session:
        exec(LOOP, {**names, "session": session})
    rows = [(row["name"], row["iteration"]) for row in open_run("logs").scalars.to_pylist()]
    assert sorted(rows) == [(name, iteration) for name in ("loss", "lr") for iteration in range(3)]


def test_the_tables_and_kinds_of_the_page() -> None:
    text = PAGES["docs/records.md"].read_text()
    for name in FACTS:
        assert f"`{name}`" in text
    for schema in (VALUES, VECTORS, STEPS, SCALARS, EVENTS):
        assert schema.names[0] == "segment"
