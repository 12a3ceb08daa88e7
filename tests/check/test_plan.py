"""The plan of a model is what three steps of training run."""

import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import transformer_engine.pytorch as te
import yaml
from hypothesis import given
from hypothesis import strategies as st

from te_precision_callbacks.base.vocabulary import GEMMS, OPERANDS
from tests import te_debug_features as page
from tests.check.running import BF16, KINDS, RECIPES, Chain, chain, compare, gpu_with
from tests.conftest import feature
from tests.docs.pages import ROOT
from tests.properties import examples, randoms

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


@pytest.mark.few
@pytest.mark.parametrize(
    ("config", "recipe"),
    # Each config in one recipe, neighbours in the others; PerTensorScaling in the one that it needs.
    [
        (config, recipe)
        for number, config in enumerate(CONFIGS)
        for place, recipe in enumerate(RECIPES)
        if (
            recipe == "fp8_delayed_scaling"
            if "PerTensorScaling" in CONFIGS[config]
            else (number + place) % len(RECIPES) == 0
        )
    ],
)
def test_the_documented_configs(config: str, recipe: str, tmp_path: Path) -> None:
    with gpu_with(recipe):
        model = chain(random.Random(0), ["TransformerLayer", "LayerNormLinear"])
        compare(model, yaml.safe_load(CONFIGS[config]), recipe, tmp_path)


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_of_te_ops_equals_a_run(recipe: str, tmp_path: Path) -> None:
    with gpu_with(recipe):
        linears = [te.ops.Linear(*sizes, dtype=BF16) for sizes in ((64, 96), (96, 32))]
        linears[1].weight.requires_grad_(False)
        parts = {"ops": te.ops.Sequential(linears[0], te.ops.GELU(), linears[1])}
        model = Chain(64, parts, {(96, 64): "parts.ops.0", (32, 96): "parts.ops.2"})
        checked = compare(model, {"kept": feature("DisableFP8Layer", ["all"])}, recipe, tmp_path)
    assert {product.family for product in checked.coverage} == {"te_ops"}


@st.composite
def configs(draw: st.DrawFn, layers: list[str], recipe: str) -> dict[str, Any]:
    config: dict[str, Any] = {"watched": feature("LogTensorStats", ["all"], tensors=["weight"], stats=["max"])}
    changes = [
        "",
        "DisableFP8Layer",
        "DisableQuantizationLayer",
        "DisableFP8GEMM",
        "DisableQuantizationGEMM",
        "FakeQuant",
        *(["PerTensorScaling"] if recipe == "fp8_delayed_scaling" else []),
    ]
    for number, layer in enumerate(layers):
        name: str = draw(st.sampled_from(changes))
        if not name:
            continue
        options: dict[str, Any] = {}
        gemms = draw(st.lists(st.sampled_from(GEMMS), min_size=1, unique=True))
        if name == "DisableQuantizationGEMM":
            options = {"gemms_struct": [{"gemm": gemm} for gemm in gemms]}
        elif not name.endswith("Layer"):
            options = {"gemms": gemms}
        if name in ("FakeQuant", "PerTensorScaling"):
            taking_part = sorted({tensor for gemm in gemms for tensor in OPERANDS[gemm]})
            others = draw(st.lists(st.sampled_from(["activation", "weight", "gradient"]), unique=True))
            options["tensors"] = list(dict.fromkeys([draw(st.sampled_from(taking_part)), *others]))
        if name == "FakeQuant":
            options["quant_format"] = draw(st.sampled_from(["FP8E4M3", "FP8E5M2", "MXFP8E4M3", "MXFP8E5M2"]))
        config[f"s{number}"] = {**feature(name, [], **options), "layers": {"exact_layer_names": [layer]}}
    return config


@st.composite
def models(draw: st.DrawFn) -> Chain:
    model = chain(draw(randoms()), draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3)))
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.ndim == 1 or draw(st.integers(0, 4)) != 4)
    return model


@pytest.mark.few
@pytest.mark.parametrize("recipe", RECIPES)
@given(data=st.data())
@examples(2, shrink=False)  # which runs each example again
def test_any_model_and_config(recipe: str, data: st.DataObject) -> None:
    with gpu_with(recipe), TemporaryDirectory() as folder:
        model = data.draw(models())
        layers = [
            name
            for path in model.shapes.values()
            for name in ([f"{path}.gemm_0", f"{path}.gemm_1"] if path.endswith("experts") else [path])
        ]
        checked = compare(model, data.draw(configs(layers, recipe)), recipe, Path(folder))
    assert {product.layer for product in checked.coverage} == set(layers)
