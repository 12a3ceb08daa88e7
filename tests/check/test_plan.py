"""The plan of a model is what three steps of training run; with a batch, it has the products of a step."""

import functools
import random
import warnings
from collections import namedtuple
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import yaml
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.base.vocabulary import GEMMS, OPERANDS
from te_precision_callbacks.check import BatchError, CheckedModel, check_model
from te_precision_callbacks.check.dry_run import NotOnMetaError
from te_precision_callbacks.check.factory import meta_device
from te_precision_callbacks.config import load_config
from te_precision_callbacks.coverage.coverage import Coverage, Reason
from te_precision_callbacks.session import InspectSession
from tests import te_debug_features as page
from tests.capability import stand_for
from tests.check.running import BF16, KINDS, RECIPES, Chain, chain, compare, gpu_with
from tests.conftest import feature
from tests.coverage.test_coverage import (
    BATCH,
    HEADS,
    HUGGING_FACE,
    INNER,
    LENGTH,
    TOKENS,
    WIDTH,
    Layers,
    Taught,
    words,
)
from tests.docs.pages import ROOT
from tests.functions import Function
from tests.fused_attention import emulate_kernel
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


# --------------------------------------------------------------------------------------------------------- with a batch


CURRENT = recipes.Float8CurrentScaling


class Mixed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = te.GroupedLinear(2, WIDTH, WIDTH)
        self.norm = te.LayerNorm(WIDTH)
        self.biased = te.Linear(WIDTH, WIDTH, return_bias=True)
        self.normed = te.LayerNormLinear(WIDTH, INNER, return_layernorm_output=True)
        self.mlp = te.LayerNormMLP(INNER, WIDTH, return_bias=True, return_layernorm_output=True)
        self.high = te.Linear(INNER, WIDTH)
        self.head = torch.nn.Linear(WIDTH, 8)
        self.unused = te.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.experts(x, [32, TOKENS - 32]))
        x, bias = self.biased(x)
        x, _ = self.normed(x + bias)
        x, bias, _ = self.mlp(x)
        with te.autocast(enabled=False):
            x = self.high(x + bias)
        heads = x.view(BATCH, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2)
        mixed = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return self.head(mixed.transpose(1, 2).reshape(TOKENS, WIDTH))


Case = namedtuple("Case", "make batch on_meta", defaults=(True,))


def frozen() -> torch.nn.Module:
    model = Layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(("layers.1", "head.bias")))
    return model


def has_grouped_gemm_on_meta() -> bool:
    """Return whether torch's grouped GEMM takes float32 on the meta device: torch 2.15 does, and 2.13 refuses it."""
    ends = torch.ones(2, dtype=torch.int32, device="meta")
    try:
        torch.nn.functional.grouped_mm(
            torch.ones(8, 16, device="meta"), torch.ones(2, 16, 16, device="meta"), offs=ends
        )
    except RuntimeError:
        return False
    return True


CASES: Mapping[str, Case] = {
    "GPT": Case(Layers, words),
    "with frozen parts": Case(frozen, words),
    "with checkpoints": Case(lambda: Layers(block=functools.partial(checkpoint, use_reentrant=False)), words),
    "with a teacher": Case(Taught, lambda: torch.ones(TOKENS, WIDTH)),
    "mixed": Case(Mixed, lambda: torch.ones(TOKENS, WIDTH)),
    "mixed, with a gradient for its input": Case(Mixed, lambda: (torch.ones(TOKENS, WIDTH, requires_grad=True),)),
    "Llama": Case(HUGGING_FACE["Llama"].make, HUGGING_FACE["Llama"].batch),
    "Mixtral": Case(HUGGING_FACE["Mixtral"].make, HUGGING_FACE["Mixtral"].batch, on_meta=has_grouped_gemm_on_meta()),
}


def step(model: torch.nn.Module, batch: Any, recipe: Any, folder: Path, *, strict: bool = True) -> Coverage:
    with (
        warnings.catch_warnings(),
        InspectSession(
            None, model=model, log_dir=folder, statistics_log="off", records="off", strict=strict
        ) as session,
    ):
        warnings.simplefilter("ignore")
        with nullcontext() if recipe is None else te.autocast(recipe=recipe):
            out = (
                model(**batch) if isinstance(batch, Mapping) else model(*batch if isinstance(batch, tuple) else [batch])
            )
        (out if isinstance(out, torch.Tensor) else out.loss).sum().backward()
        session.step()
        return session.coverage()


def plan(case: Case, recipe: Any, *, on_meta: bool) -> CheckedModel:
    with meta_device() if on_meta else nullcontext():
        model = case.make()
    return check_model(model, load_config({}), recipe=recipe, batch=case.batch())


def facts(coverage: Coverage) -> dict[tuple[str, str, bool], Any]:
    """Each product with all that is known of it; the sizes of attention's backward depend on the kernel."""
    return {
        (p.layer, p.gemm, p.backward): (
            p.family,
            (p.n, p.m, p.k) if p.gemm in GEMMS else None,
            p.macs,
            p.calls,
            dict(p.operands),
            p.not_run,
            p.reason,
            "" if p.reason is Reason.ATTENTION else p.reason_ref,  # a plan does not model the kernel of a GPU
        )
        for p in coverage
    }


@pytest.mark.parametrize(
    ("name", "on_meta"), [*((name, True) for name in CASES), *((name, False) for name in ("mixed", "GPT", "Mixtral"))]
)
def test_the_products_of_a_batch_are_those_of_a_step(name: str, on_meta: bool, tmp_path: Path) -> None:
    case = CASES[name]
    if on_meta and not case.on_meta:
        with pytest.raises(NotOnMetaError, match="forward failed with the batch"):
            plan(case, CURRENT(), on_meta=True)
        return
    checked = plan(case, CURRENT(), on_meta=on_meta)
    result = facts(checked.coverage)
    reached = {key: value for key, value in result.items() if not key[0].startswith(("unused", "teacher"))}
    ran = facts(step(case.make(), case.batch(), CURRENT(), tmp_path))
    assert reached == {key: value for key, value in ran.items() if key[0] != "teacher.0"}, "it is not observed"
    assert {product.runs for product in checked.coverage} <= {"planned", "never"}
    not_reached = {"mixed": ("unused",), "with a teacher": ("teacher.0", "teacher.1")}
    assert checked.not_reached == not_reached.get(name.partition(",")[0], ())


def test_tokens_of_each_layer_tell_which_shapes_are_refused() -> None:
    """A layer behind a pooling sees other tokens than those before it."""

    first, pooled = te.Linear(WIDTH, WIDTH), te.Linear(WIDTH, WIDTH)
    model = Function(lambda x: pooled(first(x).mean(0)), first=first, pooled=pooled)
    before = model.state_dict().keys()
    [finding] = check_model(model, load_config({}), recipe=CURRENT(), batch=torch.ones(LENGTH, 10, WIDTH)).findings
    assert (finding.kind, finding.layers) == ("shape", ("pooled",))
    assert "tokens is 10, but must be a multiple of 16 (next: 16)" in finding.text
    assert model.state_dict().keys() == before
    assert all(parameter.grad is None for parameter in model.parameters())


def test_nothing_of_the_model_or_of_transformer_engine_changes() -> None:
    model = torch.nn.Sequential(te.Linear(WIDTH, WIDTH), torch.nn.BatchNorm1d(WIDTH), torch.nn.Dropout())
    gradient = torch.ones(WIDTH, WIDTH)
    model[0].weight.grad = gradient
    before = {name: value.clone() for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    classes = te.Linear, te.LayerNormLinear, te.LayerNormMLP, te.GroupedLinear, te.DotProductAttention
    forwards = [kind.forward for kind in (*classes, te.LayerNorm)]
    state, numbers = te.quantization.FP8GlobalStateManager.quantization_state, torch.random.get_rng_state()
    check_model(model, load_config({}), recipe=recipes.DelayedScaling(), batch=torch.ones(32, WIDTH))
    assert all(torch.equal(model.state_dict()[name], value) for name, value in before.items())
    assert model[0].weight.grad is gradient
    assert bool((gradient == 1).all())
    assert forwards == [kind.forward for kind in (*classes, te.LayerNorm)]
    assert te.quantization.FP8GlobalStateManager.quantization_state is state
    assert torch.equal(torch.random.get_rng_state(), numbers)


def attention() -> torch.nn.Module:
    inner = te.MultiheadAttention(
        WIDTH, HEADS, kv_channels=32, attention_dropout=0.0, params_dtype=BF16, fuse_qkv_params=True
    )
    return Function(lambda x: inner(x, attn_mask_type="no_mask"), inner=inner)


ATTENTION: Mapping[str, tuple[tuple[int, int], Callable[[], Any]]] = {
    "delayed scaling": ((10, 0), lambda: recipes.DelayedScaling(fp8_dpa=True)),
    "current scaling": ((10, 0), lambda: recipes.Float8CurrentScaling(fp8_dpa=True)),
    "current scaling, fp8_mha": ((10, 0), lambda: recipes.Float8CurrentScaling(fp8_dpa=True, fp8_mha=True)),
    "MXFP8": ((10, 0), lambda: recipes.MXFP8BlockScaling(fp8_dpa=True)),
    "without fp8_dpa": ((10, 0), recipes.Float8CurrentScaling),
    "no recipe": ((9, 0), lambda: None),
}


@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize(("name", "on_meta"), [(name, number % 2 == 0) for number, name in enumerate(ATTENTION)])
def test_attention_is_planned_as_it_runs(
    name: str, on_meta: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    emulate_kernel(monkeypatch)
    capability, recipe = ATTENTION[name]
    case = Case(attention, lambda: torch.ones(128, BATCH, WIDTH, dtype=BF16, requires_grad=True))
    stand_for(capability)
    checked = plan(case, recipe(), on_meta=on_meta)
    assert facts(checked.coverage) == facts(step(case.make(), case.batch(), recipe(), tmp_path, strict=False))
    assert checked.findings == ()
    low = [product.is_low for product in checked.coverage if product.family == "attention"]
    assert low == [recipe() is not None and recipe().fp8_dpa] * 4


@pytest.mark.parametrize("mask", ["no_mask", "causal"])
def test_a_causal_mask_of_attention_is_known(mask: str, tmp_path: Path) -> None:
    length = 32
    case = Case(
        lambda: te.MultiheadAttention(WIDTH, HEADS, attention_dropout=0.0, params_dtype=BF16, attn_mask_type=mask),
        lambda: torch.ones(length, BATCH, WIDTH, dtype=BF16, requires_grad=True),
    )
    left = 1.0 if mask == "no_mask" else torch.ones(length, length).tril().mean().item()
    checked = plan(case, None, on_meta=True)
    for coverage in (checked.coverage, step(case.make(), case.batch(), None, tmp_path)):
        attention = [product for product in coverage if product.family == "attention"]
        assert len(attention) == 4
        for product in attention:
            assert product.mask_share == pytest.approx(left)
            assert product.macs == (2 if product.backward else 1) * BATCH * length * length * WIDTH, "in full"
    assert {p.why for p in checked.coverage if p.family == "attention"} == {"attention without FP8"}


def of_torch(*, causal: bool = False, mask: torch.Tensor | None = None) -> torch.nn.Module:
    qkv = torch.nn.Linear(16, 16)
    attend = torch.nn.functional.scaled_dot_product_attention
    return Function(lambda x: attend(*[qkv(x)] * 3, mask, 0.0, causal), qkv=qkv)


@pytest.mark.parametrize("on_meta", [True, False], ids=["meta", "CPU"])
@pytest.mark.parametrize(
    ("make", "left"),
    [
        (lambda: of_torch(causal=True), 9 / 16),
        (lambda: of_torch(), 1.0),
        (lambda: of_torch(mask=torch.zeros(8, 8)), None),
    ],
    ids=["causal", "none", "a tensor"],
)
def test_a_mask_of_torch_is_known(make: Callable[[], torch.nn.Module], left: float | None, on_meta: bool) -> None:
    checked = plan(Case(make, lambda: torch.ones(2, 3, 8, 16)), None, on_meta=on_meta)
    attention = [product for product in checked.coverage if product.family == "attention"]
    assert [(product.gemm, product.mask_share) for product in attention if not product.backward] == [
        ("qk", left), ("pv", left)
    ]  # fmt: skip
    assert {product.mask_share for product in attention} == {left}, "of the backward, too"


def wrong(batch: Any, model: torch.nn.Module | None = None) -> str:
    with pytest.raises(BatchError) as caught:
        check_model(model or te.Linear(WIDTH, WIDTH), load_config({}), recipe="none", batch=batch)
    return str(caught.value)


def test_batches_that_do_not_fit() -> None:
    assert "forward failed with the batch (float32[4, 65])" in wrong(torch.ones(4, WIDTH + 1))
    assert "Return the arguments of a training step" in wrong(torch.ones(4, WIDTH + 1))
    assert "missing a required argument: 'inp'" in wrong({"ids": torch.ones(4, WIDTH)})
    assert "Return a tuple instead of the list" in wrong([torch.ones(4, WIDTH)])
    assert "3, which is not a batch" in wrong(3)
    operations = torch.nn.Sequential(te.ops.Linear(WIDTH, WIDTH))
    assert "cannot size operations of te.ops (0)" in wrong(torch.ones(4, WIDTH), operations)
    with pytest.raises(BatchError, match="needs a single model"):
        check_model([te.Linear(WIDTH, WIDTH)], load_config({}), recipe="none", batch=torch.ones(4, WIDTH))


@pytest.mark.parametrize("part", [te.Linear, te.LayerNormMLP])
def test_a_batch_of_other_columns_is_refused(part: Callable[[int, int], torch.nn.Module]) -> None:
    with meta_device():
        model = torch.nn.Sequential(part(64, 64))
    with pytest.raises(BatchError, match=r"'0[^']*' takes an input with last dimension 64, not .*\[16, 65\]"):
        check_model(model, load_config(None), recipe="none", batch=torch.ones(16, 65))


def test_a_recipe_of_the_models_own_forward_is_planned() -> None:
    checked = check_model(Layers(CURRENT()), load_config({}), recipe="none", batch=words())
    assert "layers.0.layernorm_mlp.fc1" in {product.layer for product in checked.coverage if product.is_low}
    checked = check_model(Layers(CURRENT()), load_config({"kept": feature("DisableFP8Layer", ["fc1"])}), batch=words())
    reasons = {product.layer: product.reason for product in checked.coverage if product.macs and not product.is_low}
    assert reasons["layers.0.layernorm_mlp.fc1"] is Reason.SECTION
