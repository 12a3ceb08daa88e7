"""The log of events names each feature that acts, with the tensor or the GEMM that it acts on."""

from __future__ import annotations

import re
from pathlib import Path

import torch
import transformer_engine.pytorch as te

from te_precision_callbacks import InspectSession

EVERY = {"enabled": True, "freq": 1}


def acting(events: str) -> list[tuple[str, str, str]]:
    """Feature, call and what it is about, of each line about a feature of the layer."""
    return re.findall(r"LAYER=fc: Feature=(\w+), API=(\w+): (.+)", events)


def test_each_feature_that_acts_on_a_tensor_has_a_line(tmp_path: Path) -> None:
    """Given a tensor with three observers, a GEMM in high precision and a modified tensor; each is named once."""
    features = {
        "LogTensorStats": {**EVERY, "tensors": ["activation", "output"], "stats": ["max"]},
        "LogFp8TensorStats": {**EVERY, "tensors": ["activation"], "stats": ["mse"]},
        "DumpTensors": {**EVERY, "tensors": ["activation"], "high_precision_tensor": True},
        "DisableFP8GEMM": {"enabled": True, "gemms": ["fprop"]},
        "PerTensorScaling": {"enabled": True, "gemms": ["dgrad"], "tensors": ["gradient"]},
    }
    section = {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": features}
    model = torch.nn.ModuleDict({"fc": te.Linear(32, 32)})
    with InspectSession({"s": section}, model=model, log_dir=tmp_path) as session:
        for _ in range(2):
            with te.autocast(enabled=True):
                out = model["fc"](torch.randn(32, 32, requires_grad=True))
            out.sum().backward()
            session.step()
    (events,) = (tmp_path / "nvdlfw_inspect_logs").iterdir()
    assert sorted(acting(events.read_text())) == [
        ("DisableFP8GEMM", "fp8_gemm_enabled", "fprop"),
        ("DumpTensors", "inspect_tensor", "activation"),
        ("LogFp8TensorStats", "inspect_tensor", "activation"),
        ("LogTensorStats", "inspect_tensor", "activation"),
        ("LogTensorStats", "inspect_tensor", "output"),
        ("PerTensorScaling", "modify_tensor", "dgrad, gradient"),
    ]
