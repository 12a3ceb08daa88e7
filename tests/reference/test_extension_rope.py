"""Rotary position embedding of the reference extension, against complex numbers and Transformer Engine's own torch."""

from __future__ import annotations

import pytest
import torch
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

from te_precision_callbacks.reference import extension as tex

ROUNDING = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


def test_each_pair_is_multiplied_by_a_complex_number() -> None:
    torch.manual_seed(0)
    x, freqs = torch.randn(6, 2, 3, 8), RotaryPositionEmbedding(8, interleaved=True)(6)
    out = tex.fused_rope_forward(x, freqs, None, tex.NVTE_QKV_Format.NVTE_SBHD, True, None, 1, 0)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (4, 2)))
    turn = torch.polar(torch.ones(6, 1, 1, 4, dtype=torch.float64), freqs.double()[..., ::2])
    torch.testing.assert_close(out.double(), torch.view_as_real(pairs * turn).flatten(-2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [8, 16])
@pytest.mark.parametrize("layout", ["sbhd", "bshd", "thd"])
@pytest.mark.parametrize("started", [False, True])
def test_like_transformer_engines_own_torch(
    dtype: torch.dtype, interleaved: bool, rotated: int, layout: str, started: bool
) -> None:
    torch.manual_seed(0)
    freqs = RotaryPositionEmbedding(rotated, interleaved=interleaved)(64)
    shape = {"sbhd": (8, 2, 3, 16), "bshd": (2, 8, 3, 16), "thd": (20, 3, 16)}[layout]
    cu_seqlens = torch.tensor([0, 8, 20]) if layout == "thd" else None
    starts = torch.tensor([3, 7]) if started else None
    grad = torch.randn(shape)
    results = []
    for fused, kind in [(True, dtype), (False, torch.float64)]:
        torch.manual_seed(1)
        x = torch.randn(shape).to(dtype).to(kind).requires_grad_()
        out = apply_rotary_pos_emb(
            x, freqs, layout, start_positions=starts, interleaved=interleaved, fused=fused, cu_seqlens=cu_seqlens
        )  # fmt: skip
        out.backward(grad.to(dtype).to(kind))
        assert x.grad is not None
        results.append((out.detach().double(), x.grad.double()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROUNDING[dtype], atol=ROUNDING[dtype])


@pytest.mark.parametrize("layout", [tex.NVTE_QKV_Format.NVTE_SBHD, tex.NVTE_QKV_Format.NVTE_BSHD])
def test_query_key_and_value_in_one(layout: int) -> None:
    torch.manual_seed(0)
    # Two groups of three query heads.
    qkv, splits = torch.randn(4, 4, 2, 5 * 8), [24, 8, 8]
    freqs = RotaryPositionEmbedding(8)(4)
    query, key, value = tex.fused_qkv_rope_forward(qkv, freqs, freqs, None, splits, layout, False, 1, 0)
    parts = torch.split(qkv, splits, dim=-1)

    def rotated(tensor: torch.Tensor) -> torch.Tensor:
        return tex.fused_rope_forward(tensor, freqs, None, layout, False, None, 1, 0)

    assert torch.equal(query, rotated(parts[0].reshape(4, 4, 6, 8)))
    assert torch.equal(key, rotated(parts[1]))
    assert torch.equal(value, parts[2])
    # The rotation is orthogonal: its gradient takes it back.
    grad = tex.fused_qkv_rope_backward(query, key, value, freqs, freqs, splits, layout, False, 1, 0)
    torch.testing.assert_close(grad, qkv, rtol=1e-5, atol=1e-6)
