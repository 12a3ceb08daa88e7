"""``early_steps=``: statistics come early in a run, whatever ``freq`` says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.dumps import load
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.sinks.step_records import StepRecords
from tests.conftest import Keeper


def config(**options: Any) -> dict[str, Any]:
    features = {"LogTensorStats": {"enabled": True, "tensors": ["gradient"], "stats": ["cur_amax"], **options}}
    return {"own": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": features}}


class Steps(Keeper):
    """Keeps the iterations that had statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def write(self, records: StepRecords) -> None:
        if any(record.statistic == "cur_amax" for record in records):
            self.found.append(records.iteration)


def due_in(folder: Path, steps: int, config: Any, **keywords: Any) -> list[int]:
    kept, layer = Steps(), te.Linear(32, 32)
    options: dict[str, Any] = {"log_dir": folder, "sinks": [kept], "records": "off", "statistics_log": "off"}
    with InspectSession(config, model=layer, **options, **keywords) as session:
        for _ in range(session.iteration, steps):
            layer(torch.ones(32, 32)).sum().backward()
            session.step()
    return kept.found


def test_the_default_config_has_them(tmp_path: Path) -> None:
    assert due_in(tmp_path, 101, None) == [0, 1, 2, 5, 10, 20, 50, 100]
    assert due_in(tmp_path, 11, None, early_steps=False) == [0]


def test_an_own_config_has_them_if_asked(tmp_path: Path) -> None:
    assert due_in(tmp_path, 7, config(freq=4)) == [0, 4]
    assert due_in(tmp_path, 7, config(freq=4), early_steps=True) == [0, 1, 2, 4, 5]
    assert due_in(tmp_path, 7, config(freq=4), early_steps=[3]) == [0, 3, 4]
    assert due_in(tmp_path, 7, config(freq=4, start_step=2, end_step=4), early_steps=True) == [2, 4]


def test_a_resumed_run_counts_from_the_begin_of_the_training(tmp_path: Path) -> None:
    assert due_in(tmp_path, 12, None, start_step=3) == [5, 10]


def test_items_have_them(tmp_path: Path) -> None:
    items = [{"tensor": "gradient", "freq": 4}]
    own = config()
    own["own"]["transformer_engine"]["LogTensorStats"].pop("tensors")
    own["own"]["transformer_engine"]["LogTensorStats"]["tensors_struct"] = items
    assert due_in(tmp_path, 5, own, early_steps=[1]) == [0, 1, 4]


def test_dumps_stay_as_they_are(tmp_path: Path) -> None:
    own = config(freq=4)
    own["own"]["transformer_engine"]["DumpTensors"] = {
        "enabled": True, "tensors": ["gradient"], "high_precision_tensor": True, "freq": 4,
    }  # fmt: skip
    assert due_in(tmp_path, 5, own, early_steps=[1]) == [0, 1, 4]
    assert {load(path).header.iteration for path in tmp_path.rglob("*.safetensors")} == {0, 4}


@pytest.mark.parametrize("wrong", ["1, 2", [], [-1], [True]], ids=str)
def test_values_that_it_does_not_take(wrong: Any) -> None:
    with pytest.raises(OptionError, match=r"early_steps= must be True, False, None, or a list of whole numbers"):
        SessionOptions.from_keywords(None, early_steps=wrong)
