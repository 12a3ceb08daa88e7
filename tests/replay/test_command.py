"""``te-precision replay``: exit codes, JSON, and the script that runs alone."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.cli import app
from te_precision_callbacks.dumps import load
from te_precision_callbacks.dumps.dump_files import write
from te_precision_callbacks.dumps.errors import DumpError
from te_precision_callbacks.replay import ReplayedFolder, replay_folder, shown
from tests.capability import any_capability
from tests.dumps.gemms import RECIPES, train
from tests.reference import processes
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
    _, text = run(tmp_path / "good", "--repro", tmp_path / "healthy.py")
    assert "No fault was found in this record" in " ".join(text.split())
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
    assert text.startswith("2 recorded GEMMs, 2 with a fault; 1 file could not be read.\nNot read")
    for path in (tmp_path / "bad").rglob("*.safetensors"):
        path.write_bytes(b"")
    assert run(tmp_path / "bad")[0] == 3
    assert "No script was written" in run(tmp_path / "bad", "--repro", tmp_path / "repro.py")[1]
    assert not (tmp_path / "repro.py").exists()
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


def test_records_of_two_runs(tmp_path: Path) -> None:
    (good,) = train(tmp_path / "b", "current", gemms="fprop")
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        (bad,) = train(tmp_path / "a", "current", gemms="fprop", steps=2)
    found = replay_folder(tmp_path)
    assert (list(found.records), found.unread) == ([bad.parent.parent / "iter_000000" / bad.name, bad, good], {})
    code, text = run(tmp_path, "--json")
    folders = [str(tmp_path / name / "tensor_dumps") for name in "ab"]
    assert (code, list(json.loads(text)["runs"])) == (1, folders)
    assert "The records are of 2 runs." in " ".join(run(tmp_path)[1].split())
    assert json.loads(run(tmp_path / "a", "--json")[1])["runs"] == {}
    records = {
        path: replace(each, header=replace(each.header, rank=int(path != good))) for path, each in found.records.items()
    }
    assert ReplayedFolder(records, {}).runs == {}, "of ranks that have a folder each"


def test_records_of_two_runs_in_one_folder(tmp_path: Path) -> None:
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        train(tmp_path, "current", gemms="fprop", steps=2)
    train(tmp_path, "current", gemms="fprop", steps=2)
    records = {path: each.header for path, each in replay_folder(tmp_path).records.items()}
    assert [header.iteration for header in records.values()] == [0, 1, 0, 1]
    assert len({header.run for header in records.values()}) == 2
    _, text = run(tmp_path)
    assert "The records are of 2 runs." in text
    told = " ".join(text.split())
    assert "2 recorded GEMMs, 2 with a fault, the first: " in told
    assert "2 recorded GEMMs, 0 with a fault" in told
    assert "128 rows x 256 columns of the result, a character for 4 x 4;" in told


def test_a_fault_beyond_a_tolerance_that_no_device_has_confirmed(tmp_path: Path) -> None:
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        (file,) = train(tmp_path / "cpu", "current", gemms="fprop")
    assert "unconfirmed" not in run(file)[1]
    dump = load(file)
    assert dump.header.gemm is not None
    gemm = replace(dump.header.gemm, device="NVIDIA H200", capability=(9, 0))
    write(replace(dump, header=replace(dump.header, gemm=gemm)), tmp_path / "gpu.safetensors")
    code, text = run(tmp_path / "gpu.safetensors")
    assert code == 1
    assert "kernel (unconfirmed): rows 3 and 17 are swapped" in text
    assert "has confirmed the tolerance of fp8_current_scaling on NVIDIA H200" in " ".join(text.split())
    (fault,) = json.loads(run(tmp_path / "gpu.safetensors", "--json")[1])["records"][0]["faults"]
    assert fault["is_confirmed"] is False


@pytest.mark.parametrize("name", ["current", "block", "mxfp8", "nvfp4"])
def test_the_script_says_the_same(tmp_path: Path, name: str) -> None:
    """Its functions, on a fault of the kernel, one of the quantizer, and a healthy record."""
    train(tmp_path / "good", name)
    with faults.kernel(faults.KERNEL["0.1 % wrong"][0]):
        train(tmp_path / "kernel", name)
    with faults.quantizer(faults.QUANTIZER["rounding always down"]):
        train(tmp_path / "quantizer", name, gemms="fprop")
    said = {}
    for kind in ("good", "kernel", "quantizer"):
        files = [shown.read(path) for path in (tmp_path / kind).rglob("*.safetensors")]
        said[kind] = {
            (shown.kernel(gemm, tensors, tensors["out"], "recorded"), shown.quantizer(gemm, "a", tensors))
            for gemm, tensors in files
        }
    assert said == {"good": {(False, False)}, "kernel": {(True, False)}, "quantizer": {(False, True)}}


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_the_script_runs_the_gemm_now(
    tmp_path: Path, name: str, accumulates: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """A record of a wrong kernel gives the right result where the kernel is right, and the other way round."""
    for path in train(tmp_path, name, accumulates=accumulates):
        gemm, tensors = shown.read(path)
        what, result = shown.run_now(gemm, tensors)
        assert result is not None, what
        assert torch.equal(result, tensors["out"])
        with faults.kernel(faults.KERNEL["rows swapped"][0]):
            _, wrong = shown.run_now(gemm, tensors)
        assert wrong is not None
        capsys.readouterr()
        assert shown.kernel(gemm, tensors, wrong, "run now")
        # with what it was added to, which was not swapped, a row of the sum is not another one's
        told = "rows 3, 17: " if "before" in tensors else "rows 3 and 17 are swapped\n"
        assert capsys.readouterr().out.startswith(f"run now: {told}")


def test_no_file_is_overwritten_by_a_script(tmp_path: Path) -> None:
    (file,) = train(tmp_path, "current", gemms="fprop")
    (tmp_path / "made.py").write_text("mine")
    (tmp_path / "made.1.safetensors").write_text("mine")
    for name, said in {
        "x.txt": f"a script ends in .py. Name it {tmp_path / 'x.py'}",
        "": f"is a folder. Name the script: {tmp_path / 'repro.py'}",
        "made.py": f"exists already, and is not overwritten. Name another script, such as {tmp_path / 'made.2.py'}",
    }.items():
        with pytest.raises(DumpError, match=re.escape(said)):
            run(file, "--repro", tmp_path / name)
    assert (tmp_path / "made.py").read_text() == "mine"
    code, _ = run(file, "--repro", file.with_suffix(".py"))
    assert (code, file.with_suffix(".py").is_file()) == (0, True)


@pytest.mark.processes
def test_the_script_runs_alone(tmp_path: Path) -> None:
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        (file,) = train(tmp_path, "current", gemms="fprop")
    code, text = run(file, "--repro", tmp_path / "bug" / "repro.py")
    assert (code, "Wrote" in text) == (1, True)
    alone = processes.python(
        "import sys; sys.modules['te_precision_callbacks'] = sys.modules['transformer_engine'] = None; import runpy; "
        f"runpy.run_path({str(tmp_path / 'bug' / 'repro.py')!r}, run_name='__main__')"
    )
    assert alone.returncode == 1, alone.stderr
    assert "recorded on cpu: rows 3 and 17 are swapped" in alone.stdout
    assert "codes are not" not in alone.stdout
    assert "not run now: Transformer Engine cannot be imported" in alone.stdout
