"""Softmax, padding and rotary position embedding of the reference extension, against float64, complex numbers and
Transformer Engine's own torch."""

from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import MissingFunctionError

ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
SCALE = 0.3


GENERATOR = torch.Generator().manual_seed(0)
MASK = (torch.rand(2, 1, 8, 16, generator=GENERATOR) > 0.5).index_fill(2, torch.tensor(2), True)  # all of some rows
CAUSAL = torch.ones(16, 16).triu(1).bool()
SOFTMAX: dict[str, tuple[str, tuple[int, ...], torch.Tensor | None, tuple[Any, ...]]] = {
    # name in the extension, shape, what is masked, arguments
    "plain": ("scaled_softmax", (2, 3, 8, 16), None, ()),
    "masked": ("scaled_masked_softmax", (2, 3, 8, 16), MASK, (MASK.to(torch.uint8),)),
    "masked alike": ("scaled_masked_softmax", (2, 3, 8, 16), MASK[:1], (MASK[:1].to(torch.uint8),)),
    "causal": ("scaled_upper_triang_masked_softmax", (6, 16, 16), CAUSAL, ()),
}


@pytest.mark.parametrize("dtype", ROUNDING)
@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax(name: str, dtype: torch.dtype) -> None:
    kind, shape, masked, arguments = SOFTMAX[name]
    torch.manual_seed(0)
    scores = torch.randn(shape).to(dtype)
    value = getattr(tex, f"{kind}_forward")(scores, *arguments, SCALE)
    exact = scores.double() * SCALE
    if masked is not None:
        exact = exact.masked_fill(masked.expand(shape), float("-inf"))
    expected = torch.softmax(exact, dim=-1).nan_to_num(0.0)
    assert value.dtype == dtype
    torch.testing.assert_close(value.double(), expected, rtol=ROUNDING[dtype], atol=1e-6)

    grad = torch.randn(value.shape).to(dtype)
    y, dy = value.double(), grad.double()
    expected = SCALE * y * (dy - (dy * y).sum(dim=-1, keepdim=True))
    result = getattr(tex, f"{kind}_backward")(grad, value, SCALE)
    torch.testing.assert_close(result.double(), expected, rtol=ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_context_parallelism_says_that_it_is_missing_and_what_to_use(kind: str) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        attention = te.DotProductAttention(2, 16, qkv_format="bshd")
        attention.set_context_parallel_group(torch.distributed.new_group([0, 1]), [0, 1], None, kind)
        inputs = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
        with pytest.raises(MissingFunctionError, match=r"Context parallelism .* tensor parallelism with sequence"):
            attention(inputs, inputs, inputs)
    finally:
        torch.distributed.destroy_process_group()


def test_tokens_to_padded_sequences_and_back() -> None:
    lengths = [3, 0, 5]
    cu_seqlens = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    tokens = torch.randn(8, 2, 4)
    padded = tex.convert_thd_to_bshd(tokens, cu_seqlens, 3, 6)
    assert padded.shape == (3, 6, 2, 4)
    for index, (part, length) in enumerate(zip(torch.split(tokens, lengths), lengths, strict=True)):
        assert torch.equal(padded[index, :length], part)
        assert not padded[index, length:].any()
    assert torch.equal(tex.convert_bshd_to_thd(padded, cu_seqlens, 8), tokens)
    assert not tex.convert_bshd_to_thd(padded, cu_seqlens, 10)[8:].any()


def test_padding_of_rows_and_back() -> None:
    rows, padded_rows = [3, 0, 5], [4, 0, 8]
    x = torch.randn(8, 6)
    padded = torch.full((12, 6), float("nan"))
    tex.fused_multi_row_padding(x, padded, rows, padded_rows)
    assert torch.equal(padded[:3], x[:3])
    assert torch.equal(padded[4:9], x[3:])
    assert not padded[3].any()
    assert not padded[9:].any()
    back = torch.empty(8, 6)
    tex.fused_multi_row_unpadding(padded, back, padded_rows, rows)
    assert torch.equal(back, x)


# --- rotary position embedding ---------------------------------------------------------------------------------------

ROTATED = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


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
        results.append((out.detach().double(), x.grad.double()))
    for ours, theirs in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=ROTATED[dtype], atol=ROTATED[dtype])
