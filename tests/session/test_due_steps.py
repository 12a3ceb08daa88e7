"""Steps in which features act: those of ``early_steps=``, and those that a run does not reach, as its end says."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.dumps import load
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper, feature
from tests.training import observed

CHANGES: dict[str, Any] = {"gemms": ["fprop"]}
LOOKS: dict[str, Any] = {"tensors": ["weight"], "stats": ["max"]}


def run(folder: Path, name: str, options: dict[str, Any], **session: Any) -> InspectSession:
    config = {"s": feature(name, ["all"], **options)}
    return observed(folder, config, net=torch.nn.Sequential(te.Linear(32, 32)), steps=4, **session)


@pytest.mark.parametrize(
    ("name", "options", "steps"),
    [
        ("DisableQuantizationGEMM", {**CHANGES, "start_step": 4}, "steps 4 on"),
        ("DisableQuantizationGEMM", {"gemms_struct": [{"gemm": "fprop", "start_end_list": [[4, 4]]}]}, "step 4"),
        ("LogTensorStats", {**LOOKS, "start_step": 1, "freq": 10}, "steps 1 on that are multiples of 10"),
        ("LogGemmError", {**CHANGES, "start_step": 1}, "steps 1 on that are multiples of 500"),
        ("DumpTensors", {**CHANGES, "start_step": 9}, "steps 9 on"),
    ],
)
def test_what_the_run_does_not_reach(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, options: dict[str, Any], steps: str
) -> None:
    run(tmp_path, name, options, records="off")
    [text] = [record.getMessage() for record in caplog.records if "first time" in record.getMessage()]
    assert text == (
        "The run ended after step 3, before these features acted for the first time: the config mapping (section 's'):"
        f" {name}, {steps}. Choose steps up to 3, or run longer; steps count from 0."
    )


@pytest.mark.parametrize(
    ("options", "session"),
    [
        ({"start_step": 3}, {}),
        ({"freq": 100}, {}),
        ({"end_step": 1}, {"start_step": 50}),  # a resumed run: it acted before
        ({"start_step": 1, "freq": 10}, {"early_steps": [2]}),
    ],
)
def test_nothing_is_said_of_what_it_reaches(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict[str, Any], session: dict[str, Any]
) -> None:
    run(tmp_path, "LogTensorStats", {**LOOKS, **options}, records="off", **session)
    assert "first time" not in caplog.text


@pytest.mark.parametrize(
    ("options", "session", "why"),
    [
        ({"start_step": 9, "freq": 5}, {}, "the run began at iteration 0, and it is first due at iteration 10"),
        ({"end_step": 1}, {"start_step": 50}, "the run began at iteration 50, and it is not due from there on"),
    ],
)
def test_the_rules_of_gemms_that_were_never_due_are_not_judged(
    tmp_path: Path, options: dict[str, Any], session: dict[str, Any], why: str
) -> None:
    running = run(tmp_path, "LogGemmError", {**CHANGES, **options}, **session)
    results = {item.rule: item.why for item in running.findings.not_judged if item.rule.startswith("gemm-")}
    assert len(results) == 5
    assert set(results.values()) == {f"LogGemmError has measured nothing: {why}"}
    assert diagnose(tmp_path) == running.findings


DUMPED: dict[str, Any] = {"tensors": ["gradient"], "high_precision_tensor": True, "freq": 4}


@pytest.mark.parametrize(
    ("options", "session", "steps", "due"),
    [
        (None, {}, 101, [0, 1, 2, 5, 10, 20, 50, 100]),
        (None, {"early_steps": False}, 11, [0]),
        (None, {"start_step": 3}, 9, [5, 10]),  # a resumed run counts from the begin of the training
        ({"freq": 4}, {}, 7, [0, 4]),
        ({"freq": 4}, {"early_steps": True}, 7, [0, 1, 2, 4, 5]),
        ({"freq": 4}, {"early_steps": [3]}, 7, [0, 3, 4]),
        ({"freq": 4, "start_step": 2, "end_step": 4}, {"early_steps": True}, 7, [2, 4]),
        ({"tensors_struct": [{"tensor": "gradient", "freq": 4}]}, {"early_steps": [1]}, 5, [0, 1, 4]),
    ],
)
def test_early_steps(
    tmp_path: Path, keeper: Keeper, options: Any, session: dict[str, Any], steps: int, due: list[int]
) -> None:
    config = None
    if options is not None:
        tensors = {} if "tensors_struct" in options else {"tensors": ["gradient"]}
        config = {
            "own": feature("LogTensorStats", ["all"], stats=["cur_amax"], **tensors, **options),
            "dumps": feature("DumpTensors", ["all"], **DUMPED),
        }
    observed(tmp_path, config, steps=steps, sinks=[keeper], **session)
    assert sorted(keeper.values("cur_amax", tensor="gradient")) == due
    dumps = {load(path).header.iteration for path in tmp_path.rglob("*.safetensors")}
    assert dumps == (set() if options is None else {0, 4})


@pytest.mark.parametrize("wrong", ["1, 2", [], [-1], [True]], ids=str)
def test_values_that_it_does_not_take(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"early_steps= must be True, False, None, or a list of whole numbers"):
        SessionOptions.from_keywords(None, early_steps=wrong)
