"""``te-precision replay``: exit codes, JSON, and the script that runs alone."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.cli import app
from tests.capability import any_capability
from tests.dumps.gemms import train
from tests.replay import faults


@pytest.fixture(autouse=True)
def any_gpu() -> Iterator[None]:
    with any_capability():
        yield


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    if isinstance(result.exception, PrecisionDebugError):
        raise result.exception
    return result.exit_code, result.output


def test_exit_codes(tmp_path: Path) -> None:
    train(tmp_path / "good", "current")
    with faults.kernel(faults.KERNEL["tile zeroed"][0]):
        (*_, wgrad) = train(tmp_path / "bad", "current")
    code, text = run(tmp_path / "good")
    assert code == 0
    assert "3 recorded GEMMs, 0 with a fault." in text
    code, text = run(wgrad)
    assert code == 1
    assert "0 wgrad, step 0: kernel: rows 16 to 47, columns 32 to 63: all zeros" in text
    lines = text.splitlines()
    drawn = lines[next(number for number, line in enumerate(lines) if "256 rows x 192 columns" in line) + 1 :][:32]
    marked = {
        (row, column) for row, line in enumerate(drawn) for column, mark in enumerate(line.strip()) if mark == "#"
    }
    assert marked == {(row, column) for row in range(2, 6) for column in range(10, 22)}  # of 8 rows, of 3 columns
    wgrad.write_bytes(wgrad.read_bytes()[:5000])
    code, text = run(tmp_path / "bad")
    assert code == 1
    assert "Not read" in text
    for path in (tmp_path / "bad").rglob("*.safetensors"):
        path.write_bytes(b"")
    assert run(tmp_path / "bad")[0] == 3
    with pytest.raises(PrecisionDebugError, match=r"nowhere: there is no such file"):
        run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PrecisionDebugError, match=r"empty: no records of GEMMs\. DumpTensors writes them with 'gemms'"):
        run(tmp_path / "empty")


def test_json(tmp_path: Path) -> None:
    with faults.quantizer(faults.QUANTIZER["all-zero codes"]):
        train(tmp_path, "mxfp8", gemms="fprop")
    code, text = run(tmp_path, "--json")
    found = json.loads(text)
    (record,) = found["records"]
    assert (code, found["first_bad"]) == (1, record["path"])
    assert [(fault["cause"], fault["operand"]) for fault in record["faults"]] == [
        ("quantizer", "activation"),
        ("quantizer", "weight"),
    ]
    assert [lane["name"] for lane in record["lanes"]] == ["original", "own quantizer", "codes", "accumulator", "result"]


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_the_script_says_the_same(tmp_path: Path, name: str) -> None:
    """Its functions, on a fault of the kernel, one of the quantizer, and a healthy record."""
    from te_precision_callbacks.replay import shown

    train(tmp_path / "good", name)
    with faults.kernel(faults.KERNEL["0.1 % wrong"][0]):
        train(tmp_path / "kernel", name)
    with faults.quantizer(faults.QUANTIZER["rounding always down"]):
        train(tmp_path / "quantizer", name, gemms="fprop")
    said = {}
    for kind in ("good", "kernel", "quantizer"):
        files = [shown.read(path) for path in (tmp_path / kind).rglob("*.safetensors")]
        said[kind] = {(shown.kernel(*file), shown.quantizer(file[0], "a", file[1])) for file in files}
    assert said == {"good": {(False, False)}, "kernel": {(True, False)}, "quantizer": {(False, True)}}


def test_the_script_runs_alone(tmp_path: Path) -> None:
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        (file,) = train(tmp_path, "current", gemms="fprop")
    code, text = run(file, "--repro", tmp_path / "bug" / "repro.py")
    assert (code, "Wrote" in text) == (1, True)
    alone = subprocess.run(
        [
            sys.executable,
            "-S",
            "-c",
            f"import sys; sys.path[:0] = {[p for p in sys.path if 'site-packages' in p]}; "
            "sys.modules['te_precision_callbacks'] = sys.modules['transformer_engine'] = None; import runpy; "
            "runpy.run_path(sys.argv[1], run_name='__main__')",
            str(tmp_path / "bug" / "repro.py"),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert alone.returncode == 1, alone.stderr
    assert "of 32768 wrong" in alone.stdout
