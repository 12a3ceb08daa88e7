"""``te-precision map``."""

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.check.factory import RecipeError
from tests.manual.test_command import one_line
from tests.maps.making import checkpoint, dense, fp8, matcher, precision_file

MODELS = """
import torch
import transformer_engine.pytorch as te

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.self_attention = torch.nn.ModuleDict({"linear_qkv": te.Linear(32, 96), "linear_proj": te.Linear(32, 32)})
        self.mlp = torch.nn.ModuleDict({"linear_fc1": te.LayerNormLinear(32, 64), "linear_fc2": te.Linear(32, 32)})

def build():
    layers = torch.nn.ModuleList([Block(), Block()])
    return torch.nn.ModuleDict({"layers": layers, "output_layer": torch.nn.Linear(32, 8)})

def nothing(role):
    return None

def fails(role):
    raise ValueError("no such role")
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("mapped_models.py").write_text(MODELS)
    yield tmp_path
    sys.modules.pop("mapped_models", None)


def command(line: str, code: int = 0) -> str:
    result = CliRunner().invoke(cli.app, shlex.split(line), env={"COLUMNS": "200"})
    if isinstance(result.exception, PrecisionDebugError):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.output


def test_one_source(folder: Path) -> None:
    checkpoint(folder / "model", dense(), config=fp8("lm_head", "model.layers.*.mlp.gate"))
    text = one_line(command("map model --engine vllm", 1))
    assert "model: 30 modules with weights." in text
    assert "model.layers.{0-3}.self_attn.q_proj" in text
    assert "FP8 block E4M3" in text
    assert "modules_to_not_convert[1] 'model.layers.*.mlp.gate' takes no module" in text
    assert "Note: A model of vllm may keep layers" in text
    saved = command("map model --engine vllm --json", 1)
    Path("rollout.json").write_text(saved)
    assert json.loads(saved)["modules"]["lm_head"]["weight"] == "BF16"
    assert "0 differences" in command("map rollout.json model --engine vllm", 1), "the finding remains"


def test_two_sources(folder: Path) -> None:
    served = fp8("lm_head", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj")
    checkpoint(folder / "rollout", dense(2), config=served)
    file = precision_file(folder, every=matcher("*layers*", "mxfp8"))
    line = f"map {file} rollout --modules mapped_models:build --recipe mxfp8 --engine vllm"
    text = one_line(command(line, 1))
    assert "layers.{0-1}.self_attention.linear_qkv" in text
    assert "15 pairs of modules compared: 14 differences. Not compared: 1 module of one side. Not" in text
    assert "MXFP8 E4M3" in text
    checkpoint(folder / "stored", dense(2)[1:])
    text = one_line(command(f"map stored {file} --modules mapped_models:build --recipe none", 1))
    assert "15 pairs of modules compared: 0 differences. Not compared: the activation of 15 pairs" in text
    data: dict[str, Any] = json.loads(command(f"{line} --json", 1))
    unequal = [entry for entry in data["differences"] if entry["format_b"] == "BF16"]
    assert {entry["b"] for entry in unequal} == {"model.layers.0.mlp.gate_proj", "model.layers.0.mlp.up_proj"}


def test_a_plan_and_a_custom_recipe(folder: Path) -> None:
    text = one_line(command("map mapped_models:build --recipe fp8_current_scaling"))
    assert "layers.{0-1}.mlp.linear_fc1" in text
    assert "output_layer FP32 FP32 FP32 plan of mapped_models:build, recipe fp8_current_scaling; not a TE layer" in text
    assert "0 differences" in command("map mapped_models:build mapped_models:build --recipe fp8_current_scaling")
    zoo = "transformer_engine.pytorch.custom_recipes.quantizer_factories:current_scaling_factory"
    data = json.loads(command(f"map mapped_models:build --recipe {zoo} --json"))
    formats = data["modules"]["layers.0.mlp.linear_fc1"]
    assert (formats["weight"], formats["activation"], formats["gradient"]) == ("FP8 E4M3", "FP8 E4M3", "FP8 E5M2")
    for name, message in (("nothing", "has returned None for"), ("fails", "ValueError: no such role"), ("x", "failed")):
        with pytest.raises(RecipeError, match=message):
            command(f"map mapped_models:build --recipe mapped_models:{name}")


def test_a_plan_that_must_be_like_a_rollout(folder: Path) -> None:
    Path("config.yaml").write_text("{}")
    checkpoint(folder / "rollout", dense(2), config=fp8("lm_head", "model.layers.0.mlp.down_proj"))
    check = "check config.yaml --model mapped_models:build --recipe fp8_block_scaling --same-as rollout"
    text = one_line(command(check, 1))
    assert "1 finding" in text
    assert "A is the plan, B is rollout: layers.0.mlp.linear_fc2 (model.layers.0.mlp.down_proj in B): weight" in text
    Path("alignment.yaml").write_text("allow: ['layers.0.*fc2']")
    assert "finding" not in command(f"{check} --alignment alignment.yaml")
    assert "an alignment is for --same-as" in one_line(
        command("check config.yaml --model mapped_models:build --alignment alignment.yaml", 2)
    )


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("map model --engine trt", "'trt' is not one of 'vllm', 'sglang'"),
        ("map model --bf16-layers 1", "requires 2 arguments"),
        ("map model --alignment alignment.yaml", "an alignment is for two sources"),
    ],
)
def test_wrong_use(folder: Path, line: str, message: str) -> None:
    checkpoint(folder / "model", dense())
    assert message in one_line(command(line, 2))
