"""The log of events names each feature that acts, with the tensor or the GEMM that it acts on."""

import re
from pathlib import Path

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from tests.coverage.test_coverage import Net
from tests.instrumentation.steps import stepped

EVERY = {"enabled": True, "freq": 1}


def acting(events: str) -> list[tuple[str, str, str]]:
    return re.findall(r"LAYER=fc: Feature=(\w+), API=(\w+): (.+)", events)


def test_each_feature_that_acts_on_a_tensor_has_a_line(tmp_path: Path) -> None:
    features = {
        "LogTensorStats": {**EVERY, "tensors": ["activation", "output"], "stats": ["max"]},
        "LogFp8TensorStats": {**EVERY, "tensors": ["activation"], "stats": ["mse"]},
        "DumpTensors": {**EVERY, "tensors": ["activation"], "high_precision_tensor": True},
        "DisableFP8GEMM": {"enabled": True, "gemms": ["fprop"]},
        "PerTensorScaling": {"enabled": True, "gemms": ["dgrad"], "tensors": ["gradient"]},
    }
    section = {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": features}
    model = Net(lambda net, x: net.fc(x), fc=te.Linear(32, 32))
    stepped(model, tmp_path, [DelayedScaling()] * 2, {"s": section})
    (events,) = (tmp_path / "nvdlfw_inspect_logs").iterdir()
    assert sorted(acting(events.read_text())) == [
        ("DisableFP8GEMM", "fp8_gemm_enabled", "fprop"),
        ("DumpTensors", "inspect_tensor", "activation"),
        ("LogFp8TensorStats", "inspect_tensor", "activation"),
        ("LogTensorStats", "inspect_tensor", "activation"),
        ("LogTensorStats", "inspect_tensor", "output"),
        ("PerTensorScaling", "modify_tensor", "dgrad, gradient"),
    ]
