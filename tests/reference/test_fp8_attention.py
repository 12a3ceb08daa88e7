"""FP8 attention on the reference backend: Transformer Engine's own emulation of it, in its unfused attention."""

from collections.abc import Callable

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

from te_precision_callbacks.reference.errors import MissingFunctionError
from tests.capability import stand_for

pytestmark = pytest.mark.usefixtures("any_gpu")

BATCH, TOKENS, HEADS, SIZE = 2, 128, 4, 128

RECIPES: dict[str, tuple[tuple[int, int], Callable[..., Recipe]]] = {
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
    gradients = [tensor.grad for tensor in inputs if tensor.grad is not None]
    return [output, *gradients]


@pytest.mark.parametrize("name", RECIPES)
def test_the_error_is_that_of_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither none, nor more than that of a few roundings to FP8, which have a relative error of up to 2**-4 each."""
    capability, recipe = RECIPES[name]
    stand_for(capability)
    exact = attention(None, monkeypatch)
    emulated = attention(recipe(), monkeypatch)
    assert len(exact) == len(emulated) == 4
    for item, expected in zip(emulated, exact, strict=True):
        distance = ((item.float() - expected.float()).norm() / expected.float().norm()).item()
        assert 0.005 < distance < 0.15


def test_a_user_can_switch_the_emulation_off(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_for((10, 0))
    with pytest.raises(MissingFunctionError, match="no fused attention, and Transformer Engine's unfused attention"):
        attention(Float8CurrentScaling(fp8_dpa=True), monkeypatch, NVTE_UnfusedDPA_Emulate_FP8="0")


def test_high_precision_is_unfused_attention_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = attention(None, monkeypatch, NVTE_FUSED_ATTN="1")
    forbidden = attention(None, monkeypatch, NVTE_FUSED_ATTN="0")
    assert all(torch.equal(a, b) for a, b in zip(allowed, forbidden, strict=True))
