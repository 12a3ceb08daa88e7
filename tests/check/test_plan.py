"""The plan of a model is what three steps of training run, as a spy at the extension's entries sees them."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import transformer_engine.pytorch as te
import yaml

from tests import te_debug_features as page
from tests.check.running import BF16, KINDS, RECIPES, Chain, chain, compare, gpu_with
from tests.conftest import feature

ROOT = Path(__file__).parents[2]

CONFIGS: dict[str, str] = {
    "LogTensorStats": page.LOG_TENSOR_STATS,
    "LogFp8TensorStats": page.LOG_FP8_TENSOR_STATS,
    "DisableFp8Gemm": page.DISABLE_FP8_GEMM,
    "DisableFp8Layer": page.DISABLE_FP8_LAYER,
    "PerTensorScaling": page.PER_TENSOR_SCALING.replace("self_attn.layernorm_q", "self_attn.layernorm_qkv"),
    "FakeQuant": page.FAKE_QUANT,
    **{
        name: (ROOT / "examples" / name).read_text()
        for name in ("config.yaml", "accelerate_fp8.yaml", "hf_trainer_fp8.yaml")
    },
}


CASES = [
    (config, recipe)
    for config in CONFIGS
    for recipe in RECIPES
    if "PerTensorScaling" not in CONFIGS[config] or recipe == "fp8_delayed_scaling"  # which it needs
]


@pytest.mark.parametrize(("config", "recipe"), CASES)
def test_the_documented_configs(config: str, recipe: str, tmp_path: Path) -> None:
    with gpu_with(recipe):
        model = chain(random.Random(0), ["TransformerLayer", "LayerNormLinear"])
        compare(model, yaml.safe_load(CONFIGS[config]), recipe, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_operations(recipe: str, tmp_path: Path) -> None:
    with gpu_with(recipe):
        linears = [te.ops.Linear(*sizes, dtype=BF16) for sizes in ((64, 96), (96, 32))]
        linears[1].weight.requires_grad_(False)
        parts = {"ops": te.ops.Sequential(linears[0], te.ops.GELU(), linears[1])}
        model = Chain(64, parts, {(96, 64): "parts.ops.0", (32, 96): "parts.ops.2"})
        config = {"kept": feature("DisableFP8Layer", ["all"])}
        checked = compare(model, config, recipe, tmp_path)
    assert {product.family for product in checked.coverage} == {"te_ops"}


def drawn_config(draw: random.Random, layers: list[str], recipe: str) -> dict[str, Any]:
    """Features on some of the layers, at most one that changes precision on each."""
    config: dict[str, Any] = {"watched": feature("LogTensorStats", ["all"], tensors=["weight"], stats=["max"])}
    for number, layer in enumerate(layers):
        gemms = draw.sample(["fprop", "dgrad", "wgrad"], draw.randint(1, 3))
        changes: list[tuple[str, dict[str, Any]]] = [
            ("DisableFP8Layer", {}),
            ("DisableQuantizationLayer", {}),
            ("DisableFP8GEMM", {"gemms": gemms}),
            ("DisableQuantizationGEMM", {"gemms_struct": [{"gemm": gemm} for gemm in gemms]}),
            (
                "FakeQuant",
                {
                    "gemms": gemms,
                    "tensors": draw.sample(["activation", "weight", "gradient"], 2),
                    "quant_format": draw.choice(["FP8E4M3", "FP8E5M2", "MXFP8E4M3"]),
                },
            ),
        ]
        if recipe == "fp8_delayed_scaling":
            changes.append(("PerTensorScaling", {"gemms": gemms, "tensors": ["activation", "weight", "gradient"]}))
        name, options = draw.choice([*changes, ("", {})])
        if name:
            section = feature(name, [], **options)
            config[f"s{number}"] = {**section, "layers": {"exact_layer_names": [layer]}}
    return config


@pytest.mark.parametrize("seed", range(30))
def test_any_model_and_config(seed: int, tmp_path: Path) -> None:
    draw = random.Random(seed)
    recipe = list(RECIPES)[seed % len(RECIPES)]
    with gpu_with(recipe):
        model = chain(draw, draw.choices(KINDS, k=draw.randint(1, 3)))
        for parameter in model.parameters():
            parameter.requires_grad_(parameter.ndim == 1 or draw.random() < 0.8)
        layers = [
            name
            for path in model.shapes.values()
            for name in ([f"{path}.gemm_0", f"{path}.gemm_1"] if path.endswith("experts") else [path])
        ]
        checked = compare(model, drawn_config(draw, layers, recipe), recipe, tmp_path)
    assert {product.layer for product in checked.coverage} == set(layers)
