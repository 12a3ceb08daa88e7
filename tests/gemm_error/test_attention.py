"""What sampled rows tell of attention, against a kernel that goes through the keys in blocks, like FlashAttention."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, MXFP8Quantizer

from te_precision_callbacks.base.numerics.formats import E4M3
from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.gemm_error.attention import judged, sample, sample_of
from te_precision_callbacks.gemm_error.attention_operands import (
    MOST_ROWS,
    Bounds,
    Call,
    HeadTensor,
    Mask,
    Spacing,
    sampled,
)
from te_precision_callbacks.gemm_error.judging import Judged

BF16 = torch.bfloat16
BATCH, HEADS, SIZE = 2, 4, 32
MEMORY = 64 << 20
S_SCALES: Mapping[str, float | None] = {"bf16": None, "fp8, first step": 1.0, "fp8": 448.0}
"""How S is rounded: to bfloat16, or to E4M3 by the first scale of delayed scaling, or the usual one."""


def flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    seen: torch.Tensor,
    s_scale: float | None,
    *,
    scale: float | None = None,
    bias: torch.Tensor | float = 0.0,
    block: int = 48,
) -> torch.Tensor:
    """Attention in float32 by blocks of keys, whose S is rounded with the largest score so far: [b, h, s, d]."""
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale) + bias
    scores = scores.masked_fill(~seen, -math.inf)
    largest = torch.full((*scores.shape[:3], 1), -1e30)
    total, out = torch.zeros_like(largest), torch.zeros(*scores.shape[:3], v.shape[-1])
    for first in range(0, scores.shape[3], block):
        part = scores[..., first : first + block]
        now = torch.maximum(largest, part.amax(-1, keepdim=True))
        weights, again = torch.exp(part - now), torch.exp(largest - now)
        rounded = weights.to(BF16).float() if s_scale is None else E4M3.round(weights * s_scale) / s_scale
        total, largest = total * again + weights.sum(-1, keepdim=True), now
        out = out * again + rounded @ v[..., first : first + block, :]
    return out / torch.where(total == 0, 1.0, total)


def drawn(kind: str, tokens: int, seed: int, heads: int = HEADS) -> list[torch.Tensor]:
    """Q, K and V, [b, h, s, d], in numbers of E4M3."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(BATCH, heads, tokens, SIZE, generator=generator) for _ in range(3))
    if kind == "peaked":
        q = q * 6
    elif kind == "values of one sign":
        v = v.abs() + 1
    elif kind == "an outlier key":
        k[:, :, 3] *= 8
    return [E4M3.round(each) for each in (q, k, v)]


PER_TENSOR = Float8CurrentScalingQuantizer(tex.DType.kFloat8E4M3, device="cpu")
ALONG_HEADS = MXFP8Quantizer(tex.DType.kFloat8E4M3, columnwise=False)
ALONG_TOKENS = MXFP8Quantizer(tex.DType.kFloat8E4M3, rowwise=False)


@pytest.mark.parametrize(
    ("quantizer", "form"),
    [*((PER_TENSOR, form) for form in ("bshd", "sbhd", "thd")), (ALONG_HEADS, "bhsd"), (ALONG_TOKENS, "bhsd")],
    ids=["bshd", "sbhd", "thd", "bhsd along heads", "bhsd along tokens"],
)
def test_a_head_with_its_scales_is_all_of_its_rows(quantizer: Any, form: str) -> None:
    tokens = 64
    extents = {"b": BATCH, "h": HEADS, "s": tokens, "d": SIZE, "t": tokens}
    high = torch.randn([extents[each] for each in form], generator=torch.Generator().manual_seed(0)).to(BF16)
    operand = HeadTensor(quantizer(high), form, along_tokens=quantizer is ALONG_TOKENS)
    for sequence, head in ((0, 1), (1, 2)):
        part = operand.head(sequence, head)
        assert isinstance(part, Stored)
        expected = operand.rows(sequence, head, torch.arange(tokens), torch.float32)
        assert torch.equal(part.dequantized(), expected)
        of_high = HeadTensor(high, form).head(sequence, head)
        assert isinstance(of_high, torch.Tensor)
        torch.testing.assert_close(expected, of_high.float(), rtol=0.07, atol=0.02)


def call_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s_scale: float | None, result: Spacing, **more: Any
) -> Call:
    probabilities = Spacing.of(BF16) if s_scale is None else Spacing.of(E4M3, torch.tensor(s_scale))
    call = Call(
        *(HeadTensor(each, "bhsd") for each in (q, k, v)),
        1 / math.sqrt(SIZE),
        (q.shape[2], k.shape[2]),
        BATCH,
        Mask(),
        None,
        None,
        probabilities,
        result,
    )
    return replace(call, **more)


def judge(call: Call, out: torch.Tensor, seed: int = 0) -> Judged:
    """Of a result [b, h, s, d], as bshd."""
    result = HeadTensor(out.transpose(1, 2), "bshd")
    return judged(call, sample(call, result, seed, MEMORY), result)


def healthy(kind: str, s: str, out: str, seed: int, tokens: int = 128) -> tuple[Call, torch.Tensor]:
    q, k, v = drawn(kind, tokens, seed)
    found = flash(q, k, v, torch.ones(tokens, tokens, dtype=torch.bool), S_SCALES[s])
    if out == "fp8":
        scale = torch.tensor(448.0) / found.abs().max()
        return call_of(q, k, v, S_SCALES[s], Spacing.of(E4M3, scale)), E4M3.round(found * scale) / scale
    return call_of(q, k, v, S_SCALES[s], Spacing.of(BF16)), found.to(BF16)


KINDS = ("Gaussian", "peaked", "values of one sign", "an outlier key")


@pytest.mark.parametrize("out", ["bf16", "fp8"])
@pytest.mark.parametrize("s", S_SCALES)
def test_no_false_alarm(s: str, out: str) -> None:
    for kind in KINDS:
        for seed in range(4):
            judgement = judge(*healthy(kind, s, out, seed, tokens=64), seed)
            assert judgement.counts == 1
            assert judgement.ratio < 1, (kind, seed)
            assert abs(judgement.gain_dot / judgement.expected_square - 1) < 0.02


def swap(out: torch.Tensor) -> None:
    out[0, 1, [3, 90]] = out[0, 1, [90, 3]]


def transpose(out: torch.Tensor) -> None:
    out[1, 2, 32:64] = out[1, 2, 32:64].t().clone()


FAULTS: Mapping[str, tuple[Callable[[torch.Tensor], Any], set[int], set[int] | None]] = {
    "a row uninitialised": (lambda out: out[0, 1, 5].fill_(0.01), {5}, {*range(32, 64)}),
    "two rows swapped": (swap, {3, 90}, {*range(32, 64)}),
    "a tile zeroed": (lambda out: out[1, 3, 16:32, 8:16].zero_(), {*range(144, 160)}, {*range(104, 112)}),
    "a tile transposed": (transpose, {*range(160, 192)}, {*range(64, 96)}),
    "nan in a row": (lambda out: out[1, 0, 7, 3].fill_(math.nan), {135}, {3}),
    "all times 2^-1": (lambda out: out.mul_(0.5), {*range(256)}, None),
}
"""Fault in [b, h, s, d] -> what does it, and the rows and columns, [tokens, heads times size], that are wrong."""


@pytest.mark.parametrize(("s", "result"), [("bf16", "bf16"), ("fp8", "bf16"), ("fp8", "fp8")])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_sampled_rows_is_found_and_localized(fault: str, s: str, result: str) -> None:
    """All 128 rows of the 8 heads would be 1,024; here all are sampled."""
    make, rows, columns = FAULTS[fault]
    call, out = healthy("Gaussian", s, result, 1)
    make(out)
    whole = HeadTensor(out.transpose(1, 2), "bshd")
    places = [place._replace(rows=torch.arange(128)) for place in sampled(call, 0, MEMORY)]
    judgement = judged(call, [sample_of(call, place, whole, MEMORY) for place in places], whole)
    assert judgement.ratio > 1.5
    wrong_rows, wrong_columns = (set(torch.nonzero(each > 1).view(-1).tolist()) for each in judgement[4:6])
    assert wrong_rows <= rows
    assert len(wrong_rows) > 0.9 * len(rows), "an element that happens to be about right is not wrong"
    if columns is not None:
        assert wrong_columns <= columns
        assert len(wrong_columns) > 0.5 * len(columns)
    if fault == "all times 2^-1":
        assert judgement.gain_dot / judgement.expected_square == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("share", [0.001, 0.003])
@pytest.mark.parametrize("s", ["bf16", "fp8"])
def test_wrong_elements_are_found(s: str, share: float) -> None:
    """As in cudnn-frontend issue 981, in any rows. With 16,384 sampled elements of 32,768 many are seen."""
    call, healthy_out = healthy("Gaussian", s, "bf16", 1)
    for seed in range(10):
        out = healthy_out.clone()
        flat, generator = out.view(-1), torch.Generator().manual_seed(seed)
        places = torch.randperm(flat.numel(), generator=generator)[: int(share * flat.numel())]
        flat[places] = flat[places.roll(1)]
        assert judge(call, out, seed).ratio > 1.5


def test_the_stated_probability_of_missing_a_fault_in_few_rows() -> None:
    """(1 - f)^rows, in 300 draws. Whether a wrong row is seen does not depend on what is in it."""
    tokens, heads, draws = 512, 16, 300
    q, k, v = (torch.zeros(BATCH, heads, tokens, SIZE) for _ in range(3))
    call = call_of(q, k, v, None, Spacing.of(BF16))
    missed = 0
    for seed in range(draws):
        wrong = torch.rand(BATCH, heads, tokens, generator=torch.Generator().manual_seed(seed)) < 0.003
        places = sampled(call, seed, MEMORY)
        assert sum(len(place.rows) for place in places) == MOST_ROWS
        missed += not any(bool(wrong[place.sequence, place.head, place.rows].any()) for place in places)
    expected = (1 - 0.003) ** MOST_ROWS
    assert missed / draws == pytest.approx(expected, abs=5 * math.sqrt(expected * (1 - expected) / draws))


def test_no_row_is_sampled_twice() -> None:
    """Also of a sequence that is shorter than the number of rows."""
    q, k, v = (torch.zeros(BATCH, HEADS, 256, SIZE) for _ in range(3))
    lengths = Bounds(torch.tensor([0, 256, 276]))
    places = sampled(call_of(q, k, v, None, Spacing.of(BF16), queries=lengths, keys=lengths), 3, MEMORY)
    assert len({(place.sequence, place.head) for place in places}) == BATCH * HEADS
    for place in places:
        length = 20 if place.sequence else 256
        inside = place.rows[place.rows < length].tolist()
        assert len(inside) == len(set(inside)) == min(length, 64)


def test_memory_bounds_the_rows() -> None:
    call, out = healthy("Gaussian", "bf16", "bf16", 0)
    whole = HeadTensor(out.transpose(1, 2), "bshd")
    assert not sample(call, whole, 0, 100)
    some = sample(call, whole, 0, 10 * 4 * 128 * 5)
    assert {len(one.run) for one in some} == {5}
    assert judged(call, some, whole).ratio < 1
