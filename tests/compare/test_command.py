"""``te-precision compare``."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from tests.compare.recorded import Values, record
from tests.runs.making import RunWriter

STEPS = 20


def values(factor: float = 1.0) -> Values:
    results = {(layer, "weight", "cur_amax"): np.linspace(1, 2, STEPS) for layer in ("fc1", "fc2", "fc3")}
    results["fc2", "weight", "cur_amax"][8:] *= factor
    return results


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    record(tmp_path / "a", values(), order=["fc1", "fc2", "fc3"])
    record(tmp_path / "b", values(4.0), order=["fc1", "fc2", "fc3"])
    return tmp_path


def compare(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, ["compare", *map(str, arguments)])


def refusal(*arguments: object) -> str:
    """The message of a refusal: one of this package, which ``main`` prints with exit code 2."""
    result = compare(*arguments)
    if result.exit_code == 2:
        return " ".join(result.output.split())
    assert isinstance(result.exception, cli.PrecisionDebugError), result.exception
    return str(result.exception)


def test_without_a_finding_the_code_is_0(folder: Path) -> None:
    result = compare(folder / "a", folder / "a")
    assert result.exit_code == 0
    assert result.output.startswith("A and B are the same run, so nothing can differ.")
    assert "All numbers that pair are equal, to the last bit." in result.output
    assert not compare(folder / "a", folder / "b").output.startswith("A and B are")


def test_json_has_it_all(folder: Path) -> None:
    result = compare(folder / "a", folder / "b", "--json")
    assert result.exit_code == 1
    actual = json.loads(result.output)
    assert actual["findings"] is True
    (parting,) = actual["parted"]
    assert (parting["layer"], parting["tensor"], parting["iteration"]) == ("fc2", "weight", 8)
    assert parting["departures"][0]["difference"] == pytest.approx(2)
    assert actual["pairing"]["series"] == 3
    assert actual["floor"] is None


def test_a_page(folder: Path) -> None:
    page = folder / "compare.html"
    assert f"{page}: " in " ".join(compare(folder / "a", folder / "b", "-o", page).output.split())
    assert page.stat().st_size > 1_000_000
    page.unlink()
    assert json.loads(compare(folder / "a", folder / "b", "--report", page, "--json").output)["findings"] is True
    assert page.exists()
    (folder / "folder.html").mkdir()
    assert "cannot be written" in refusal(folder / "a", folder / "b", "--report", folder / "folder.html")
    assert "there is no folder" in refusal(folder / "a", folder / "b", "--report", folder / "new" / "compare.html")
    assert "Name it" in refusal(folder / "a", folder / "b", "--report", folder / "compare.png")


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("missing", "no such file or folder"),
        ("nothing", "no recorded run is in this folder"),
        ("foreign.parquet", "no recorded run"),
        ("empty", "has no numbers yet"),
        ("other", "share no layer"),
    ],
)
def test_what_cannot_be_compared_is_told(folder: Path, name: str, says: str) -> None:
    (folder / "nothing").mkdir()
    pq.write_table(pa.table({"x": [1, 2]}), folder / "foreign.parquet")
    RunWriter.begin(folder / "empty").close("ended")
    record(folder / "other", {("h.0", "weight", "cur_amax"): np.ones(5)})
    assert says in refusal(folder / "a", folder / name)
    assert says in refusal(folder / "a", folder / "b", "--noise", folder / name)


def test_wrong_use_is_told(folder: Path) -> None:
    assert "give a second run to compare with" in refusal(folder / "a")
    assert "lasting= must be 1 step or more, not 0" in refusal(folder / "a", folder / "b", "--lasting", 0)
