"""te-precision check --speed."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.base.errors import PrecisionDebugError

KEYS = {"layer", "gemm", "m", "n", "k", "recipe", "high_ms", "low_ms", "cast_ms", "speedup"}

MODEL = """
import torch
import transformer_engine.pytorch as te

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.big = te.Linear(8192, 8192, params_dtype=torch.bfloat16)
        self.small = te.Linear(1024, 256, params_dtype=torch.bfloat16)
        self.head = torch.nn.Linear(256, 32000)

class Attention(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = te.MultiheadAttention(256, 4, params_dtype=torch.bfloat16)
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("speed_models.py").write_text(MODEL)
    Path("config.yaml").write_text("{}\n")
    yield tmp_path
    sys.modules.pop("speed_models", None)


def check(*arguments: str, model: str = "Net", recipe: str = "fp8_current_scaling") -> Result:
    command = ("check", "config.yaml", "--model", f"speed_models:{model}", "--recipe", recipe, *arguments)
    return CliRunner().invoke(cli.app, command, env={"COLUMNS": "200"})


def speed_of(*arguments: str, model: str = "Net") -> dict[str, Any]:
    result = check(*arguments, "--json", model=model)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["speed"]  # type: ignore[no-any-return]


def test_the_times_of_each_layer_and_gemm() -> None:
    speed = speed_of("--tokens", "8192", "--speed", "h200")
    assert speed["device"] == "NVIDIA H200 SXM"
    products = speed["products"]
    assert {(item["layer"], item["gemm"]) for item in products} == {
        (layer, gemm) for layer in ("big", "small", "head") for gemm in ("fprop", "dgrad", "wgrad")
    }
    assert [set(item) for item in products] == [KEYS] * 9
    assert {item["recipe"] for item in products if item["layer"] == "head"} == {None}
    big = [item for item in products if item["layer"] == "big"]
    # 2 x 8192^3 operations at 0.7192 of the peak of 989 TFLOPS, which the H200 NVL has reached
    assert [item["high_ms"] for item in big] == pytest.approx([2 * 8192**3 / 989e9 / 0.7192] * 3)
    assert all(item["speedup"] == pytest.approx(item["high_ms"] / item["low_ms"]) for item in big)
    for key in ("high_ms", "low_ms", "cast_ms"):
        assert speed["total"][key] == pytest.approx(sum(item[key] for item in products))
    assert list(speed["without_gain"]) == ["small"]
    assert any("3 GEMMs in FP32" in note for note in speed["notes"])
    assert any("fitted to times of NVIDIA H200 NVL" in note for note in speed["notes"])


def test_the_table_names_what_gains_nothing_and_why() -> None:
    printed = check("--tokens", "8192", "--speed", "h200").output
    assert re.search(r"\n +big +8192x8192x8192 .* 1\.\d\d *\n", printed)
    assert re.search(r"\n +small +8192x1024x256 .* 0\.\d\d +too small: the casts take longer", printed)
    assert re.search(r"\n +head +8192x256x32000 .* not a TE layer: torch.nn.Linear\n", printed)
    assert "No gain: small (too small: the casts take longer than the GEMMs save)." in printed


def test_attention_has_no_time_and_is_named_by_the_plan() -> None:
    result = check("--tokens", "64", "--speed", "b300", "--json", model="Attention")
    content = json.loads(result.stdout)
    assert all(item["gemm"] in ("fprop", "dgrad", "wgrad") for item in content["speed"]["products"])
    assert any(text.startswith("attention of attention") for text in content["unknown"])


@pytest.mark.parametrize(
    ("device", "recipe", "said"),
    [
        ("h200", "nvfp4", "NVIDIA H200 SXM does not run nvfp4: .* or another device"),
        ("b3000", "mxfp8", "There is no device 'b3000'. Did you mean 'b300'"),
    ],
)
def test_what_cannot_be_estimated(device: str, recipe: str, said: str) -> None:
    error = check("--tokens", "64", "--speed", device, recipe=recipe).exception
    assert isinstance(error, PrecisionDebugError)
    assert re.search(said, str(error))


def test_wrong_use() -> None:
    for result, said in (
        (CliRunner().invoke(cli.app, ("check", "config.yaml", "--speed", "h200")), "also give --model"),
        (check("--speed", "h200"), "need --tokens"),
    ):
        assert result.exit_code == 2
        assert said in " ".join(result.output.replace("│", " ").split())
