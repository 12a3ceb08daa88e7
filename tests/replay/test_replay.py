"""Replay: right on records of every format, healthy and with each planted fault; its command, script and page."""

import json
import math
import re
import runpy
import shlex
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from transformer_engine.common.recipe import Float8CurrentScaling
from typer.testing import CliRunner

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.cli import app
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.dumps import DumpError, load
from te_precision_callbacks.replay import replay, replay_file, replay_folder, shown
from te_precision_callbacks.session import InspectSession
from tests.combinations import diagonal, half
from tests.docs.pages import blocks
from tests.dumps.gemms import RECIPES, train
from tests.reference import processes
from tests.replay import faults

pytestmark = pytest.mark.usefixtures("any_gpu")

FLOORS = {"nvfp4": (0.08, 0.3), "nvfp4 without": (0.08, 0.3)}
"""The format's share of the error; 0.02 to 0.08 for FP8 (E4M3 3.7 %, E5M2 times E4M3 5 %)."""


@pytest.mark.parametrize(("name", "accumulates"), half(RECIPES, (False, True)))
def test_healthy_records_have_no_faults(tmp_path: Path, name: str, accumulates: bool) -> None:
    files = train(tmp_path, name, accumulates=accumulates)
    folder = replay_folder(tmp_path)
    assert (list(folder.records), folder.unread, folder.first_bad) == (files, {}, None)
    for record in folder.records.values():
        lanes = {lane.name: lane.error for lane in record.lanes}
        assert record.faults == ()
        assert lanes["codes"] < 0.004
        assert record.gain == pytest.approx(1, abs=1e-2)
        if record.gemm.gemm == "wgrad":
            assert lanes["original"] is None
            assert "the quantizer of activation" in record.verdict
        elif name != "delayed":  # its first scale is 1
            low, high = FLOORS.get(name, (0.02, 0.08))
            assert low < lanes["original"] < high


@pytest.mark.parametrize(("name", "broken"), half(RECIPES, [math.inf, math.nan]))
def test_an_inf_or_nan_is_neither_the_quantizers_fault_nor_the_kernels(
    tmp_path: Path, name: str, broken: float
) -> None:
    for path in train(tmp_path, name, broken=broken, measures=True):
        result = replay_file(path)
        assert result.faults == ()
        if result.gemm.gemm == "fprop":
            assert "1 element of activation with inf or nan, and their scales" in result.not_checked
        if result.gain is None:
            assert "the kernel, since each row of the product has inf or nan" in result.not_checked
    assert not [item for item in diagnose(tmp_path) if item.rule.startswith("gemm")]


@pytest.mark.parametrize(("name", "fault"), diagonal(RECIPES, faults.KERNEL))
def test_faults_of_a_kernel(tmp_path: Path, name: str, fault: str) -> None:
    damage, stated = faults.KERNEL[fault]
    with faults.kernel(damage):
        train(tmp_path, name)
    result = replay_folder(tmp_path)
    assert len(result.records) == 3
    for replayed in result.records.values():
        assert [fault.cause for fault in replayed.faults] == ["kernel"]
        assert stated in replayed.verdict


@pytest.mark.parametrize(("name", "fault"), half(RECIPES, faults.QUANTIZER))
def test_faults_of_a_quantizer(tmp_path: Path, name: str, fault: str) -> None:
    with faults.quantizer(faults.QUANTIZER[fault]):
        (file,) = train(tmp_path, name, gemms="fprop")
    assert {(fault.cause, fault.operand) for fault in replay_file(file).faults} == {
        ("quantizer", "activation"),
        ("quantizer", "weight"),
    }


# --- the command, and the script that runs alone


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
    assert "This record has no fault" in " ".join(text.split())
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


def test_json_has_the_faults_and_the_first_bad_record(tmp_path: Path) -> None:
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
    """Also records of two runs, in two folders or in one."""
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


# ---------------------------------------------------------------------- the page's section


PAGE = "docs/gemm-error.md"


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"fc2": te.Linear(64, 128, params_dtype=torch.bfloat16)})
    config, with_condition = map(yaml.safe_load, blocks(PAGE, "yaml", "record_"))
    with faults.kernel(faults.KERNEL["rows swapped"][0]):
        for sections, folder in ((config, "run"), (with_condition, "run2")):
            with InspectSession(sections, model=model, log_dir=folder) as session:
                with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
                    out = model["fc2"](torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True))
                out.float().square().sum().backward()
                session.step()
    assert [path.name for path in Path("run2").rglob("*_gemm.safetensors")] == ["fc2.fprop_gemm.safetensors"]
    printed, by_script = blocks(PAGE, "text")
    for block in blocks(PAGE, "bash"):
        (line,) = block.strip().splitlines()
        result = CliRunner().invoke(app, shlex.split(line)[1:], env={"COLUMNS": "200"})
        assert result.exit_code == 1
        assert result.output.startswith(printed)
    assert {path.name for path in Path("bug").iterdir()} == {"repro.py", "repro.safetensors"}
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("bug/repro.py", run_name="__main__")
    assert capsys.readouterr().out == by_script
    assert ended.value.code == 0
    Path("bug/repro.safetensors").unlink()
    with pytest.raises(SystemExit) as ended:
        runpy.run_path("bug/repro.py", run_name="__main__")
    assert ended.value.code == 2
    assert "repro.safetensors is missing" in capsys.readouterr().err
