"""FP8 attention on the reference backend: Transformer Engine's own FusedAttnFunc, against attention in float64.

The expected numbers are made here from the graph that cuDNN is given: the products in float64, and torch's own float8
casts (for MXFP8, numpy from the formats' specifications) wherever a tensor becomes FP8.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling, Recipe
from transformer_engine.pytorch import Float8CurrentScalingQuantizer, Float8Quantizer, MXFP8Quantizer
from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends
from transformer_engine.pytorch.attention.dot_product_attention import utils as dpa_utils
from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.cpp_extensions import fused_attn

from te_precision_callbacks.reference import extension as tex
from tests.capability import stand_for
from tests.reference import block_formats

pytestmark = pytest.mark.usefixtures("any_gpu")

BATCH, TOKENS, HEADS, SIZE = 2, 128, 4, 128
ATTN_SCALE = 1 / math.sqrt(SIZE)
MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LENGTHS = [100, 37]
LAYOUTS = ["bshd_bshd_bshd", "sbhd_sbhd_sbhd", "bs3hd", "sbh3d", "bshd_bs2hd", "sbhd_sbh2d"]
MASKS = ["no_mask", "causal", "padding", "padding_causal"]
FP8 = fused_attn.FusedAttnBackend.FP8
HIGH_PRECISION = fused_attn.FusedAttnBackend.F16_arbitrary_seqlen


# ------------------------------------------------------------------------------------------------ in float64


@dataclass
class Tensors:
    """Q, K, V and dO of a test, bfloat16, [batch, heads, tokens, size]."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor


@dataclass
class Factors:
    """What a kernel multiplies, float64: MXFP8 differs with the direction of its blocks."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    q_for_dk: torch.Tensor
    k_for_dq: torch.Tensor
    v_for_o: torch.Tensor
    do_for_dv: torch.Tensor
    do_for_sums: torch.Tensor


Rounding = Callable[[torch.Tensor], torch.Tensor]


def make(groups: int) -> Tensors:
    torch.manual_seed(0)
    heads = [HEADS, groups, groups, HEADS]
    q, k, v, do = (torch.randn(BATCH, count, TOKENS, SIZE).bfloat16() for count in heads)
    return Tensors(q, k, v, do / 8)


def scaled(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """The FP8 numbers of scaled values, by torch's cast: float64."""
    multiplied = values.float() * torch.tensor(scale, dtype=torch.float32)
    return multiplied.clamp(-MAX[dtype], MAX[dtype]).to(dtype).double()


def cast(values: torch.Tensor, scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What the FP8 numbers of scaled values stand for: float64."""
    return scaled(values, scale, dtype) / torch.tensor(scale, dtype=torch.float32).double()


def visible(mask: str) -> torch.Tensor:
    queries, keys = torch.arange(TOKENS).view(1, 1, -1, 1), torch.arange(TOKENS).view(1, 1, 1, -1)
    lengths = torch.tensor(LENGTHS).view(-1, 1, 1, 1)
    seen = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool)
    if "causal" in mask:
        seen = seen & (keys <= queries)
    if "padding" in mask:
        seen = seen & (keys < lengths) & (queries < lengths)
    return seen


def scores(q: torch.Tensor, k: torch.Tensor, mask: str) -> torch.Tensor:
    found = torch.einsum("bhqd,bhkd->bhqk", q, repeated(k)) * ATTN_SCALE
    return found.masked_fill(~visible(mask), float("-inf"))


def repeated(keys: torch.Tensor) -> torch.Tensor:
    return keys.repeat_interleave(HEADS // keys.shape[1], dim=1)


def summed(gradient: torch.Tensor, groups: int) -> torch.Tensor:
    return torch.stack([part.sum(dim=1) for part in gradient.chunk(groups, dim=1)], dim=1)


def forward(f: Factors, mask: str, round_s: Rounding) -> tuple[torch.Tensor, torch.Tensor]:
    """O, and the logarithm of the sum of the exponentials."""
    x = scores(f.q, f.k, mask)
    exponentials = (x - x.amax(dim=-1, keepdim=True).nan_to_num(neginf=0.0)).exp()
    sums = exponentials.sum(dim=-1, keepdim=True)
    o = round_s(exponentials) @ repeated(f.v_for_o) / sums.clamp(min=1e-300)
    return o, torch.logsumexp(x, dim=-1, keepdim=True)


def backward(
    f: Factors, o: torch.Tensor, mask: str, round_s: Rounding, round_dp: Rounding
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """dQ, dK, dV, and the amax of dP."""
    groups = f.k.shape[1]
    s = torch.softmax(scores(f.q, f.k, mask), dim=-1).nan_to_num(0.0)
    dv = summed(round_s(s).mT @ f.do_for_dv, groups)
    dp = s * (f.do @ repeated(f.v).mT - (f.do_for_sums * o).sum(dim=-1, keepdim=True)) * ATTN_SCALE
    rounded = round_dp(dp)
    return rounded @ repeated(f.k_for_dq), summed(rounded.mT @ f.q_for_dk, groups), dv, dp.abs().max().item()


def assert_rounded(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Nearly all the same: where float32 and float64 lie on two sides of a tie, one code or its consequence differs."""
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape
    assert (actual == expected).double().mean() > 0.97
    assert (actual - expected).norm() < 5e-3 * expected.norm()


# ------------------------------------------------------------------------------------------------ the kernel


def in_layout(t: Tensors, layout: str) -> list[torch.Tensor]:
    """Q, K and V in a layout: parts of one buffer where it says so."""
    tensors = [placed(tensor, layout) for tensor in (t.q, t.k, t.v)]
    found: list[torch.Tensor] = []
    for part in layout.split("_"):
        place = next((place for place, mark in enumerate(part) if mark.isdigit()), None)
        if place is None:
            found.append(tensors[len(found)])
        else:
            together = tensors[len(found) : len(found) + int(part[place])]
            found += torch.stack(together, dim=place).unbind(place)
    return found


def placed(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """From [batch, heads, tokens, size] to the format of a layout."""
    return tensor.permute(*("bhsd".index(mark) for mark in form(layout))).contiguous()


def form(layout: str) -> str:
    return "".join(filter(str.isalpha, layout.split("_")[0]))


def heads(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """Back from a layout to [batch, heads, tokens, size]."""
    return tensor.permute(*(form(layout).index(mark) for mark in "bhsd"))


def delayed(scale: float, dtype: DType, **options: Any) -> Float8Quantizer:
    quantizer = Float8Quantizer(torch.tensor([scale]), torch.zeros(1), dtype, **options)
    quantizer.set_usage(rowwise=True, columnwise=False)
    return quantizer


def cu_seqlens(mask: str) -> torch.Tensor:
    lengths = LENGTHS if "padding" in mask else [TOKENS] * BATCH
    return torch.tensor([0, *lengths]).cumsum(0).int()


def attend(qkv: Any, layout: str, mask: str, s_quantizer: Any, o_quantizer: Any, **options: Any) -> Any:
    return fused_attn.fused_attn_fwd(
        True,
        TOKENS,
        TOKENS,
        cu_seqlens(mask),
        cu_seqlens(mask),
        *qkv,
        torch.bfloat16,
        FP8,
        s_quantizer=s_quantizer,
        o_quantizer=o_quantizer,
        qkv_layout=layout,
        o_format=form(layout),
        attn_mask_type=mask,
        window_size=(-1, 0) if "causal" in mask else (-1, -1),
        **options,
    )


def attend_backward(
    qkv: Any, o: Any, do: Any, aux: Any, layout: str, mask: str, quantizers: Any = (None,) * 3, backend: Any = FP8
) -> Any:
    s_quantizer, dp_quantizer, dqkv_quantizer = quantizers
    return fused_attn.fused_attn_bwd(
        TOKENS,
        TOKENS,
        cu_seqlens(mask),
        cu_seqlens(mask),
        *qkv,
        o,
        do,
        torch.bfloat16,
        aux,
        backend,
        s_quantizer=s_quantizer,
        dp_quantizer=dp_quantizer,
        dqkv_quantizer=dqkv_quantizer,
        qkv_layout=layout,
        o_format=form(layout),
        do_format=form(layout),
        dqkv_layout=layout,
        attn_mask_type=mask,
        window_size=(-1, 0) if "causal" in mask else (-1, -1),
    )


def same_in_all(t: Tensors, qkv_scale: float, do_scale: float) -> Factors:
    """Per-tensor FP8, whose numbers do not depend on a direction."""
    q, k, v = (cast(tensor, qkv_scale, torch.float8_e4m3fn) for tensor in (t.q, t.k, t.v))
    do = cast(t.do, do_scale, torch.float8_e5m2)
    return Factors(q, k, v, do, q, k, v, do, do)


@pytest.mark.parametrize(
    ("layout", "groups"), [*((layout, HEADS) for layout in LAYOUTS), (LAYOUTS[0], 2), (LAYOUTS[1], 1)]
)
@pytest.mark.parametrize("mask", MASKS)
def test_delayed_scaling(layout: str, groups: int, mask: str) -> None:
    """Q, K, V, O, dO, dQ, dK and dV in FP8 by scales of before, S and dP rounded, and every amax written."""
    t = make(groups)
    scales = {"qkv": 90.0, "s": 320.0, "o": 150.0, "do": 12000.0, "dp": 9e5, "dqkv": 20000.0}
    s, o = delayed(scales["s"], DType.kFloat8E4M3), delayed(scales["o"], DType.kFloat8E4M3)
    dp, dqkv = delayed(scales["dp"], DType.kFloat8E5M2), delayed(scales["dqkv"], DType.kFloat8E5M2)
    quantized = dpa_utils.combine_and_quantize(layout, *in_layout(t, layout), delayed(scales["qkv"], DType.kFloat8E4M3))
    output, aux = attend(quantized[:3], layout, mask, s, o)
    do = delayed(scales["do"], DType.kFloat8E5M2)(placed(t.do, layout))
    gradients = attend_backward(quantized[:3], output, do, aux, layout, mask, (s, dp, dqkv))

    f = same_in_all(t, scales["qkv"], scales["do"])

    def round_s(values: torch.Tensor) -> torch.Tensor:
        return cast(values, scales["s"], torch.float8_e4m3fn)

    expected, stats = forward(f, mask, round_s)
    numbers = heads(output._data.view(torch.float8_e4m3fn), layout)
    assert_rounded(numbers, scaled(expected, scales["o"], torch.float8_e4m3fn))
    assert output._scale_inv.item() == np.float32(1) / np.float32(scales["o"])
    assert aux[0].shape == (BATCH, HEADS, TOKENS, 1)
    assert aux[0].dtype == torch.float32
    torch.testing.assert_close(aux[0].double(), stats, rtol=1e-5, atol=1e-5)
    assert aux[1].tolist() == [0, 0]
    assert s.amax.item() == 1.0
    assert o.amax.item() == pytest.approx(expected.abs().max().item(), rel=1e-3)

    *values, amax = backward(
        f,
        numbers.double() / scales["o"],
        mask,
        round_s,
        lambda values: cast(values, scales["dp"], torch.float8_e5m2),
    )
    for found, value in zip(gradients[:3], values, strict=True):
        assert found._fp8_dtype == DType.kFloat8E5M2
        numbers = heads(found._data.view(torch.float8_e5m2), layout)
        assert_rounded(numbers, scaled(value, scales["dqkv"], torch.float8_e5m2))
    assert gradients[3:] == [None, None]
    assert dp.amax.item() == pytest.approx(amax, rel=1e-4)
    assert dqkv.amax.item() == pytest.approx(max(value.abs().max().item() for value in values), rel=1e-3)


@pytest.mark.parametrize(("layout", "groups"), [("bshd_bshd_bshd", 2), ("sbh3d", HEADS)])
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("o_in_fp8", [False, True])
def test_current_scaling(layout: str, groups: int, mask: str, o_in_fp8: bool) -> None:
    """O and the gradients plain, one scale for Q, K and V, and S and dP by delayed scaling, as TE sets them up."""
    t = make(groups)

    def current(dtype: DType) -> Float8CurrentScalingQuantizer:
        quantizer = Float8CurrentScalingQuantizer(dtype, torch.device("cpu"))
        quantizer.set_usage(rowwise=True, columnwise=False)
        return quantizer

    s, dp = delayed(448.0, DType.kFloat8E4M3), delayed(5e5, DType.kFloat8E5M2)
    quantized = dpa_utils.combine_and_quantize(layout, *in_layout(t, layout), current(DType.kFloat8E4M3))
    output, aux = attend(quantized[:3], layout, mask, s, current(DType.kFloat8E4M3))
    do = current(DType.kFloat8E5M2)(placed(t.do, layout))
    o = current(DType.kFloat8E4M3)(output) if o_in_fp8 else output
    gradients = attend_backward(quantized[:3], o, do, aux, layout, mask, (s, dp, current(DType.kFloat8E5M2)))

    largest = max(tensor.abs().max().item() for tensor in (t.q, t.k, t.v))
    f = same_in_all(t, np.float32(448) / np.float32(largest), np.float32(57344) / np.float32(t.do.abs().max().item()))

    def round_s(values: torch.Tensor) -> torch.Tensor:
        return cast(values, 448.0, torch.float8_e4m3fn)

    expected, _ = forward(f, mask, round_s)
    assert output.dtype == torch.bfloat16
    assert_rounded(heads(output, layout), expected.bfloat16())
    o = heads(output, layout).double()
    if o_in_fp8:
        o = cast(o, np.float32(448) / np.float32(o.abs().max().item()), torch.float8_e4m3fn)
    *values, amax = backward(f, o, mask, round_s, lambda values: cast(values, 5e5, torch.float8_e5m2))
    for found, value in zip(gradients[:3], values, strict=True):
        assert found.dtype == torch.bfloat16
        assert_rounded(heads(found, layout), value.bfloat16())
    assert dp.amax.item() == pytest.approx(amax, rel=1e-4)
    packed = [gradient.untyped_storage().data_ptr() for gradient in gradients[:3]]
    assert len(set(packed)) == (1 if "3" in layout else 3)


def mxfp8(values: torch.Tensor, *, along_tokens: bool = False) -> torch.Tensor:
    """The numbers of MXFP8 with blocks along the size of a head, or along the tokens: float64."""
    block = (32, 1) if along_tokens else (1, 32)
    codes, scales = block_formats.mxfp8(block_formats.matrix(values), block, block_formats.E4M3)
    factors = block_formats.spread(block_formats.power_of_two(scales), block, codes.shape)
    return torch.from_numpy(block_formats.E4M3.decode(codes) * factors).view(values.shape)


@pytest.mark.parametrize(("layout", "groups"), [("bshd_bshd_bshd", 2), ("sbhd_sbhd_sbhd", HEADS), ("sbh3d", HEADS)])
@pytest.mark.parametrize("mask", MASKS)
def test_mxfp8(layout: str, groups: int, mask: str) -> None:
    """Each product reads the blocks that lie along its sum; O and the gradients are plain; nothing has a scale.

    Some channels of the heads, and some tokens of dO, are far smaller than their neighbours: they vanish in blocks that
    they share with these, and stay in blocks of the other direction.
    """
    stand_for((10, 0))
    t = make(groups)
    for tensor in (t.q, t.k, t.v, t.do):
        tensor[..., 3::4] *= 2.0**-20
    t.do[:, :, 7::8] *= 2.0**-20

    def quantizer() -> MXFP8Quantizer:
        made = MXFP8Quantizer(DType.kFloat8E4M3)
        made.optimize_for_gemm = True
        return made

    *quantized, inner, _ = dpa_utils.combine_and_quantize(
        layout, *in_layout(t, layout), quantizer(), used_in_backward=True
    )
    plain_do = placed(t.do, layout)
    (do,), _ = dpa_utils.mxfp8_quantize_fast_path([(plain_do, quantizer())], form(layout))
    tokens = cu_seqlens(mask)
    window = (-1, 0) if "causal" in mask else (-1, -1)
    both = {"attn_mask_type": mask, "window_size": window, "qkv_layout": inner, "qkv_scale_inv_format": "bhsd"}
    output, aux = fused_attn.fused_attn_fwd(
        True, TOKENS, TOKENS, tokens, tokens, *quantized, torch.bfloat16, FP8, o_format=form(layout), **both
    )
    gradients = fused_attn.fused_attn_bwd(
        TOKENS, TOKENS, tokens, tokens, *quantized, output, do, torch.bfloat16, [*aux, plain_do], FP8,
        o_format=form(layout), do_format=form(layout), dqkv_layout=layout, do_scale_inv_format="bhsd", **both,
    )  # fmt: skip

    f = Factors(
        *(mxfp8(tensor) for tensor in (t.q, t.k, t.v, t.do)),
        *(mxfp8(tensor, along_tokens=True) for tensor in (t.q, t.k, t.v, t.do)),
        do_for_sums=t.do.double(),
    )
    expected, _ = forward(f, mask, lambda values: cast(values, 1.0, torch.float8_e4m3fn))
    assert_rounded(heads(output, layout), expected.bfloat16())
    *values, _ = backward(f, heads(output, layout).double(), mask, lambda values: values, lambda values: values)
    for found, value in zip(gradients[:3], values, strict=True):
        assert_rounded(heads(found, layout), value.bfloat16())


def test_a_backward_in_high_precision() -> None:
    """What NVTE_FP8_DPA_BWD=0 asks for: S and dP are rounded to the type of Q."""
    t = make(2)
    layout, mask = "bshd_bshd_bshd", "causal"
    f = Factors(*(tensor.double() for tensor in (t.q, t.k, t.v, t.do, t.q, t.k, t.v, t.do, t.do)))
    o, stats = forward(f, mask, lambda values: values)
    aux = [stats.float(), torch.zeros(2, dtype=torch.int64)]
    gradients = attend_backward(
        in_layout(t, layout),
        placed(o.bfloat16(), layout),
        placed(t.do, layout),
        aux,
        layout,
        mask,
        backend=HIGH_PRECISION,
    )
    *values, _ = backward(f, o.bfloat16().double(), mask, *[lambda values: values.bfloat16().double()] * 2)
    for found, value in zip(gradients[:3], values, strict=True):
        assert_rounded(heads(found, layout), value.bfloat16())


# ------------------------------------------------------------------------------------------------ its selection


def params(**changes: Any) -> Any:
    """The configuration of FP8 attention in training, with changes."""
    given = {
        "qkv_dtype": DType.kFloat8E4M3,
        "o_dtype": DType.kFloat8E4M3,
        "do_dtype": DType.kFloat8E5M2,
        "dqkv_dtype": DType.kFloat8E5M2,
        "qkv_layout": tex.NVTE_QKV_Layout.NVTE_BSHD_BSHD_BSHD,
        "num_attn_heads": 4,
        "num_gqa_groups": 2,
        "head_dim_qk": 128,
        "head_dim_v": 128,
    }
    return dpa_utils.FusedAttentionParams(**given | changes)


REFUSED = [
    ({"qkv_dtype": DType.kBFloat16}, "in high precision"),
    ({"scaling_mode": tex.NVTEScalingMode.NVTE_BLOCK_SCALING_1D}, "with the scaling BLOCK_SCALING_1D"),
    ({"qkv_layout": tex.NVTE_QKV_Layout.NVTE_THD_THD_THD}, "for the layout THD_THD_THD"),
    ({"qkv_layout": tex.NVTE_QKV_Layout.NVTE_SBHD_BSHD_BSHD}, "for the layout SBHD_BSHD_BSHD"),
    ({"qkv_layout": tex.NVTE_QKV_Layout.NVTE_Paged_KV_BSHD_BSHD_BSHD}, "for the layout Paged_KV_BSHD_BSHD_BSHD"),
    ({"bias_type": tex.NVTE_Bias_Type.NVTE_POST_SCALE_BIAS}, "with the bias POST_SCALE_BIAS"),
    ({"attn_mask_type": tex.NVTE_Mask_Type.NVTE_CAUSAL_BOTTOM_RIGHT_MASK}, "with the mask CAUSAL_BOTTOM_RIGHT_MASK"),
    ({"softmax_type": tex.NVTE_Softmax_Type.NVTE_LEARNABLE_SOFTMAX}, "with the softmax LEARNABLE_SOFTMAX"),
    ({"window_size_left": 16, "window_size_right": 0}, r"with the sliding window (16, 0)"),
    ({"window_size_right": 0}, r"with the sliding window (-1, 0)"),
    ({"dropout": 0.1}, "with dropout (p=0.1)"),
    ({"return_max_logit": True}, "that returns the largest logit"),
    ({"cuda_graph": True}, "in a CUDA graph"),
    ({"num_gqa_groups": 3}, "of 4 query heads over 3 heads of keys"),
    ({"head_dim_qk": 64, "head_dim_v": 64}, "in training with heads of 64 and 64: cuDNN has 128 alone on a GPU of"),
    ({"is_training": False, "head_dim_qk": 264}, "with heads of 264 and 128: cuDNN has multiples of 16 up to 256"),
    ({"o_dtype": DType.kBFloat16}, "with results in high precision: cuDNN has them in FP8 alone on a GPU of"),
]


@pytest.mark.parametrize(("changes", "reason"), REFUSED, ids=lambda value: value if isinstance(value, str) else "")
def test_what_is_not_there_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    backend, text = tex.get_fused_attn_backend(params(**changes))
    assert backend is tex.NVTE_Fused_Attn_Backend.NVTE_No_Backend
    assert text.startswith(f"The reference backend has no fused attention {reason}")


RECIPES: dict[str, tuple[tuple[int, int], Callable[..., Recipe]]] = {
    "delayed": ((9, 0), lambda **options: DelayedScaling(fp8_dpa=True, **options)),
    "delayed on Blackwell": ((10, 0), lambda **options: DelayedScaling(fp8_dpa=True, **options)),
    "current": ((10, 0), lambda **options: Float8CurrentScaling(fp8_dpa=True, **options)),
    "mxfp8": ((10, 0), lambda **options: MXFP8BlockScaling(fp8_dpa=True, **options)),
}


def attention(
    recipe: Recipe | None, monkeypatch: pytest.MonkeyPatch, **environment: str
) -> tuple[list[torch.Tensor], str]:
    """O, dQ, dK and dV of DotProductAttention after two steps, and the class that computed them."""
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
    chosen = next(name for name in ("fused", "unfused") if _attention_backends[f"use_{name}_attention"])
    return [output, *(tensor.grad for tensor in inputs)], chosen


def distances(found: list[torch.Tensor], exact: list[torch.Tensor]) -> list[float]:
    return [((a.float() - b.float()).norm() / b.float().norm()).item() for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("name", RECIPES)
def test_transformer_engine_selects_it_and_the_error_is_that_of_fp8(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far from high precision as Transformer Engine's own emulation of FP8 attention, which rounds Q, K, V, S, dO
    and dP, and in delayed scaling O and the gradients in addition."""
    capability, recipe = RECIPES[name]
    stand_for(capability)
    exact, chosen = attention(None, monkeypatch)
    assert chosen == "unfused"
    emulated, chosen = attention(recipe(), monkeypatch, NVTE_FUSED_ATTN="0", NVTE_UnfusedDPA_Emulate_FP8="1")
    assert chosen == "unfused"
    found, chosen = attention(recipe(), monkeypatch, NVTE_FUSED_ATTN="1", NVTE_UnfusedDPA_Emulate_FP8="1")
    assert chosen == "fused"
    for distance, explained in zip(distances(found, exact), distances(emulated, exact), strict=True):
        assert 0.5 * explained < distance < 2 * explained + 0.02


def test_high_precision_stays_unfused_attention_bit_for_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, chosen = attention(None, monkeypatch, NVTE_FUSED_ATTN="1")
    assert chosen == "unfused"
    forbidden, _ = attention(None, monkeypatch, NVTE_FUSED_ATTN="0")
    assert all(torch.equal(a, b) for a, b in zip(allowed, forbidden, strict=True))


# ------------------------------------------------------------------------------------------------ in training


def test_what_each_gpu_has() -> None:
    def has(**changes: Any) -> bool:
        return tex.get_fused_attn_backend(params(**changes)) == (tex.NVTE_Fused_Attn_Backend.NVTE_FP8, "")

    plain = {"o_dtype": DType.kBFloat16, "dqkv_dtype": DType.kBFloat16}
    stand_for((9, 0))
    assert has()
    assert has(attn_mask_type=tex.NVTE_Mask_Type.NVTE_CAUSAL_MASK, window_size_right=0)
    assert has(is_training=False, head_dim_qk=256, head_dim_v=64, dropout=0.1)
    stand_for((10, 0))
    assert has(**plain)
    assert has(**plain, head_dim_qk=64, head_dim_v=64)
    assert has(**plain, head_dim_qk=192, scaling_mode=tex.NVTEScalingMode.NVTE_MXFP8_1D_SCALING)
    assert not has(head_dim_qk=256, head_dim_v=256)
    assert not has(head_dim_qk=40)
