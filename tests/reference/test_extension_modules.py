"""Transformer Engine's modules on the reference extension, against the same layers in torch; and its FP8 attention."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, Format, MXFP8BlockScaling, Recipe
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding

from te_precision_callbacks.reference.errors import MissingFunctionError
from tests.capability import stand_for
from tests.combinations import pairs

RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "delayed E4M3": lambda: DelayedScaling(fp8_format=Format.E4M3, amax_compute_algo="most_recent"),
    "current": Float8CurrentScaling,
}
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "swiglu": lambda x: F.silu(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1],
}


@pytest.fixture(autouse=True)
def _same_numbers() -> None:
    torch.manual_seed(0)
    te.quantization.FP8GlobalStateManager.reset()


Function = Callable[[torch.Tensor], torch.Tensor]


def _assert_same(actual: Function, expected: Function, x: torch.Tensor, parameters: list[torch.Tensor]) -> None:
    results = []
    for function in (actual, expected):
        t = x.detach().clone().requires_grad_()
        out = function(t)
        grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).to(out.dtype)
        results.append([out.detach(), *torch.autograd.grad(out, [t, *parameters], grad)])
    for a, b in zip(*results, strict=True):
        # The gradient of a key's bias is 0, but for rounding.
        torch.testing.assert_close(a, b, rtol=1e-4, atol=max(1e-4 * float(b.abs().max()), 1e-7))


def _linear(module: Any, x: torch.Tensor) -> torch.Tensor:
    # The projection of attention has its weight in three parts.
    names = ("query_", "key_", "value_") if hasattr(module, "query_weight") else ("",)
    weight, bias = (torch.cat([getattr(module, name + kind) for name in names]) for kind in ("weight", "bias"))
    return F.linear(x, weight, bias)


def _norm(module: Any, x: torch.Tensor) -> torch.Tensor:
    if module.normalization == "RMSNorm":
        return F.rms_norm(x, x.shape[-1:], module.layer_norm_weight, module.eps)
    return F.layer_norm(x, x.shape[-1:], module.layer_norm_weight, module.layer_norm_bias, module.eps)


@pytest.mark.parametrize("normalization", [None, "LayerNorm", "RMSNorm"])
def test_a_linear_layer_equals_torch(normalization: str | None) -> None:
    x, norm = torch.randn(4, 16, 32), normalization and _norm
    module = te.LayerNormLinear(32, 48, normalization=normalization) if norm else te.Linear(32, 48)
    if norm:
        torch.nn.init.normal_(module.layer_norm_weight)
    _assert_same(module, lambda t: _linear(module, norm(module, t) if norm else t), x, list(module.parameters()))


def test_grouped_linear() -> None:
    splits = [16, 0, 48]
    module, x = te.GroupedLinear(3, 32, 48), torch.randn(64, 32)
    weights = [getattr(module, f"weight{index}") for index in range(3)]
    biases = [getattr(module, f"bias{index}") for index in range(3)]

    def expected(t: torch.Tensor) -> torch.Tensor:
        parts = zip(torch.split(t, splits), weights, biases, strict=True)
        return torch.cat([F.linear(part, weight, bias) for part, weight, bias in parts])

    _assert_same(lambda t: module(t, splits), expected, x, [*weights, *biases])


def _rotated(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding: [length, batch, heads, size] with angles [length, 1, 1, size]."""
    first, second = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-second, first], -1) * angles.sin()


@pytest.mark.parametrize(
    ("activation", "groups", "normalization", "rotary"),
    pairs(["gelu", "swiglu"], [4, 2], ["LayerNorm", "RMSNorm"], [False, True]),
)
def test_transformer_layer(activation: str, groups: int, normalization: str, rotary: bool) -> None:
    module = te.TransformerLayer(
        32, 64, 4, num_gqa_groups=groups, normalization=normalization, activation=activation, hidden_dropout=0.0,
        attention_dropout=0.0, self_attn_mask_type="causal",
    )  # fmt: skip
    attention, mlp = module.self_attention, module.layernorm_mlp
    qkv, x = attention.layernorm_qkv, torch.randn(16, 2, 32)
    angles = RotaryPositionEmbedding(8)(16) if rotary else None

    def expected(t: torch.Tensor) -> torch.Tensor:
        length, batch, hidden = t.shape
        projected = _linear(qkv, _norm(qkv, t))
        q, k, v = (part.view(length, batch, -1, 8) for part in projected.split([32, 8 * groups, 8 * groups], dim=-1))
        if angles is not None:
            q, k = _rotated(q, angles), _rotated(k, angles)
        q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
        k, v = (part.repeat_interleave(4 // groups, dim=1) for part in (k, v))
        context = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        t = t + _linear(attention.proj, context.permute(2, 0, 1, 3).reshape(length, batch, hidden))
        inner = ACTIVATIONS[activation](F.linear(_norm(mlp, t), mlp.fc1_weight, mlp.fc1_bias))
        return t + F.linear(inner, mlp.fc2_weight, mlp.fc2_bias)

    _assert_same(lambda t: module(t, rotary_pos_emb=angles), expected, x, list(module.parameters()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_grouped_linear_in_fp8_is_each_linear_in_fp8(recipe: str) -> None:
    splits, grouped, x = [16, 32], te.GroupedLinear(2, 32, 48), torch.randn(48, 32, requires_grad=True)
    single = [te.Linear(32, 48) for _ in splits]
    for index, module in enumerate(single):
        module.weight.data.copy_(getattr(grouped, f"weight{index}").data)
        module.bias.data.copy_(getattr(grouped, f"bias{index}").data)
    with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
        together = grouped(x, splits)
        apart = torch.cat([m(part) for m, part in zip(single, torch.split(x, splits), strict=True)])
    assert torch.equal(together, apart)
    grad = torch.randn_like(together)
    assert torch.equal(*(torch.autograd.grad(out, x, grad)[0] for out in (together, apart)))


@pytest.mark.parametrize("recipe", ["delayed", "current"])
def test_weights_are_cached_between_microbatches(recipe: str) -> None:
    module, x, chosen = te.Linear(32, 48), torch.randn(16, 32), RECIPES[recipe]()

    def forward(first: bool | None) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=chosen):
            return module(x, is_first_microbatch=first).detach()

    # The scales of delayed scaling settle.
    for _ in range(3):
        first = forward(True)
    with torch.no_grad():
        module.weight.mul_(2.0)
    assert torch.equal(forward(False), first)
    assert not torch.equal(forward(True), first)


@pytest.mark.parametrize("recipe", [None, "delayed", "current"])
def test_recomputing_a_layer_changes_nothing(recipe: str | None) -> None:
    original = te.TransformerLayer(64, 128, 4, hidden_dropout=0.0, attention_dropout=0.0)
    x, results = torch.randn(16, 2, 64), []
    for checkpointed in (False, True):
        module = copy.deepcopy(original)
        te.quantization.FP8GlobalStateManager.reset()
        t = x.clone().requires_grad_()
        with te.autocast(enabled=recipe is not None, recipe=RECIPES[recipe]() if recipe else None):
            out = te.checkpoint(module, t, use_reentrant=True) if checkpointed else module(t)
        out.square().sum().backward()
        results.append([out.detach(), t.grad, *(parameter.grad for parameter in module.parameters())])
    for plain, recomputed in zip(*results, strict=True):
        assert torch.equal(plain, recomputed)


# --- FP8 attention: Transformer Engine's own emulation, in its unfused attention --------------------------------------


BATCH, TOKENS, HEADS, SIZE = 2, 128, 4, 128

ATTENTION_RECIPES: dict[str, tuple[tuple[int, int], Callable[..., Recipe]]] = {
    "delayed": ((9, 0), lambda **options: DelayedScaling(fp8_dpa=True, **options)),
    "delayed on Blackwell": ((10, 0), lambda **options: DelayedScaling(fp8_dpa=True, **options)),
    "current": ((10, 0), lambda **options: Float8CurrentScaling(fp8_dpa=True, **options)),
    "mxfp8": ((10, 0), lambda **options: MXFP8BlockScaling(fp8_dpa=True, **options)),
}


def attention(recipe: Recipe | None, monkeypatch: pytest.MonkeyPatch, **environment: str) -> list[torch.Tensor]:
    """O, dQ, dK and dV of DotProductAttention after two steps."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setitem(_attention_backends, "attention_params", None)
    torch.manual_seed(0)
    layer = te.DotProductAttention(HEADS, SIZE, num_gqa_groups=2, qkv_format="sbhd", attn_mask_type="causal")
    shapes = [(TOKENS, BATCH, count, SIZE) for count in (HEADS, 2, 2)]
    inputs = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    gradient = torch.randn(TOKENS, BATCH, HEADS * SIZE).bfloat16()
    for _ in range(2):
        for tensor in inputs:
            tensor.grad = None
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            output = layer(*inputs)
        output.backward(gradient)
    assert _attention_backends["use_unfused_attention"]
    assert not _attention_backends["use_fused_attention"]
    return [output, *(tensor.grad for tensor in inputs)]


@pytest.mark.few
@pytest.mark.usefixtures("any_gpu")
@pytest.mark.parametrize("name", ATTENTION_RECIPES)
def test_the_error_is_that_of_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither zero, nor more than a few roundings to FP8, which have a relative error of up to 2**-4 each."""
    capability, recipe = ATTENTION_RECIPES[name]
    stand_for(capability)
    exact = attention(None, monkeypatch)
    for item, expected in zip(attention(recipe(), monkeypatch), exact, strict=True):
        distance = ((item.float() - expected.float()).norm() / expected.float().norm()).item()
        assert 0.005 < distance < 0.15


@pytest.mark.usefixtures("any_gpu")
def test_a_user_can_switch_the_emulation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_for((10, 0))
    with pytest.raises(MissingFunctionError, match="no fused attention, and Transformer Engine's unfused attention"):
        attention(Float8CurrentScaling(fp8_dpa=True), monkeypatch, NVTE_UnfusedDPA_Emulate_FP8="0")


@pytest.mark.usefixtures("any_gpu")
def test_high_precision_is_unfused_attention_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(map(torch.equal, *(attention(None, monkeypatch, NVTE_FUSED_ATTN=allowed) for allowed in ("0", "1"))))
