"""``te-precision replay``: exit codes, JSON, and the script that runs alone."""

import json
import re
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.cli import app
from te_precision_callbacks.dumps import DumpError, load
from te_precision_callbacks.replay import replay, replay_folder, shown
from tests.combinations import half
from tests.dumps.gemms import RECIPES, train
from tests.reference import processes
from tests.replay import faults

pytestmark = pytest.mark.usefixtures("any_gpu")


def run(*arguments: object, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["replay", *map(str, arguments)])
    if isinstance(result.exception, PrecisionDebugError):
        raise result.exception
    assert result.exit_code == code
    return result.output


def test_exit_codes(tmp_path: Path) -> None:
    train(tmp_path / "good", "current")
    with faults.kernel(faults.KERNEL["tile zeroed"][0]):
        (*_, wgrad) = train(tmp_path / "bad", "current")
    assert "3 recorded GEMMs, 0 with a fault." in run(tmp_path / "good")
    text = run(tmp_path / "good", "--repro", tmp_path / "healthy.py")
    assert "No fault was found in this record" in " ".join(text.split())
    text = run(wgrad, code=1)
    assert "0 wgrad, step 0: kernel: rows 16 to 47, columns 32 to 63: 1,024 elements are" in text
    wgrad.write_bytes(wgrad.read_bytes()[:5000])
    text = run(tmp_path / "bad", code=1)
    assert text.startswith("2 recorded GEMMs, 2 with a fault; 1 file could not be read.\nNot read")
    for path in (tmp_path / "bad").rglob("*.safetensors"):
        path.write_bytes(b"")
    run(tmp_path / "bad", code=3)
    assert "No script was written" in run(tmp_path / "bad", "--repro", tmp_path / "repro.py", code=3)
    assert not (tmp_path / "repro.py").exists()
    with pytest.raises(PrecisionDebugError, match=r"nowhere: .*No such file"):
        run(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(PrecisionDebugError, match=r"empty: no records of GEMMs\. DumpTensors writes them with 'gemms'"):
        run(tmp_path / "empty")


def test_json(tmp_path: Path) -> None:
    with faults.quantizer(faults.QUANTIZER["all-zero codes"]):
        train(tmp_path, "mxfp8", gemms="fprop")
    result = json.loads(run(tmp_path, "--json", code=1))
    (record,) = result["records"]
    assert result["first_bad"] == record["path"]
    assert [(fault["cause"], fault["operand"]) for fault in record["faults"]] == [
        ("quantizer", "activation"),
        ("quantizer", "weight"),
    ]
    assert [lane["name"] for lane in record["lanes"]] == ["original", "codes", "result"]


def test_records_are_in_the_order_of_their_time(tmp_path: Path) -> None:
    """Also those of two runs, in two folders or in one."""
    (good,) = train(tmp_path / "b", "current", gemms="fprop")
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        (bad,) = train(tmp_path / "a", "current", gemms="fprop", steps=2)
    train(tmp_path / "b", "current", gemms="fprop")
    result = replay_folder(tmp_path)
    *in_order, last = result.records
    assert in_order == [good, bad.parent.parent / "iter_000000" / bad.name, bad]
    assert (last.parent, result.unread) == (good.parent, {})
    assert result.first_bad[0] == in_order[1]


@pytest.mark.parametrize(("name", "accumulates"), half(RECIPES, (False, True)))
def test_the_script_runs_the_gemm_now(tmp_path: Path, name: str, accumulates: bool) -> None:
    """A record of a wrong kernel gives the right result where the kernel is right, and the other way round."""
    for path in train(tmp_path, name, accumulates=accumulates):
        recorded = load(path)
        gemm = recorded.header.gemm
        result = shown.run_now(recorded, gemm, torch.device("cpu"))
        assert torch.equal(result.tensors["out"], recorded.tensors["out"])
        with faults.kernel(faults.KERNEL["rows swapped"][0]):
            wrong = replay(shown.run_now(recorded, gemm, torch.device("cpu")))
        assert [fault.cause for fault in wrong.faults] == ["kernel"]
        assert faults.KERNEL["rows swapped"][1] in wrong.verdict


def test_no_file_is_overwritten_by_a_script(tmp_path: Path) -> None:
    (file,) = train(tmp_path, "current", gemms="fprop")
    (tmp_path / "made.py").write_text("mine")
    for name, said in {
        "x.txt": f"a script ends in .py. Name it {tmp_path / 'x.py'}",
        "": f"is a folder. Name the script: {tmp_path / 'repro.py'}",
        "made.py": "exists already, and is not overwritten. Name another script.",
    }.items():
        with pytest.raises(DumpError, match=re.escape(said)):
            run(file, "--repro", tmp_path / name)
    assert (tmp_path / "made.py").read_text() == "mine"
    run(file, "--repro", file.with_suffix(".py"))
    assert file.with_suffix(".py").is_file()


@pytest.mark.processes
def test_the_script_without_transformer_engine(tmp_path: Path) -> None:
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        (file,) = train(tmp_path, "current", gemms="fprop")
    assert "Wrote" in run(file, "--repro", tmp_path / "bug" / "repro.py", code=1)
    alone = processes.python(
        "import sys; sys.modules['transformer_engine'] = None; import runpy; "
        f"runpy.run_path({str(tmp_path / 'bug' / 'repro.py')!r}, run_name='__main__')"
    )
    assert alone.returncode == 1, alone.stderr
    assert re.search(r"recorded on cpu: 0 fprop, step 0: kernel: rows 3, 17: \d+ elements are wrong", alone.stdout)
    assert "not run now on cpu: " in alone.stdout
