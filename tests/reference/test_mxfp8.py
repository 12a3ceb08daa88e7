"""MXFP8 on the reference backend, bit for bit against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformer_engine.pytorch.tensor.mxfp8_tensor import MXFP8Quantizer

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import ReferenceBackendError
from tests.combinations import half
from tests.reference import block_formats as spec

FORMATS = {"E4M3": (tex.DType.kFloat8E4M3, spec.E4M3), "E5M2": (tex.DType.kFloat8E5M2, spec.E5M2)}
KIND = {torch.float32: tex.DType.kFloat32, torch.bfloat16: tex.DType.kBFloat16, torch.float16: tex.DType.kFloat16}
SHAPES = [(32, 32), (64, 96), (160, 32), (2, 3, 32, 64), (128, 256)]


def _quantizer(fp8: str = "E4M3", **options: Any) -> Any:
    options = {"rowwise": True, "columnwise": True} | options
    swizzle = options.pop("optimize_for_gemm", False)
    quantizer = MXFP8Quantizer(FORMATS[fp8][0], **options)
    quantizer.optimize_for_gemm = swizzle
    return quantizer


def _expected(x: torch.Tensor, fp8: str, columnwise: bool, two_d: bool = False) -> tuple[Any, Any]:
    """Codes, in the tensor's shape, and scales as they lie in memory."""
    values, fmt = spec.matrix(x), FORMATS[fp8][1]
    codes, scales = spec.mxfp8(values, (32, 32) if two_d else (32, 1) if columnwise else (1, 32), fmt)
    if two_d:
        scales = scales.repeat(32, axis=1 if columnwise else 0)
    padded = spec.pad(scales, 4, 128) if columnwise else spec.pad(scales, 128, 4)
    return torch.from_numpy(codes).view(x.shape), torch.from_numpy(padded)


def _assert_is(out: Any, x: torch.Tensor, fp8: str = "E4M3", two_d: bool = False) -> None:
    """Both directions, not swizzled."""
    for columnwise, data, scales in (
        (False, out._rowwise_data, out._rowwise_scale_inv),
        (True, out._columnwise_data, out._columnwise_scale_inv),
    ):
        codes, expected = _expected(x, fp8, columnwise, two_d)
        assert torch.equal(data, codes)
        assert torch.equal(scales, expected)


@pytest.mark.parametrize(("kind", "dtype", "fp8", "two_d"), half(spec.KINDS, spec.DTYPES, FORMATS, (False, True)))
def test_bytes_and_scales(kind: str, dtype: torch.dtype, fp8: str, two_d: bool) -> None:
    for seed, shape in enumerate(SHAPES):
        x = spec.example(kind, shape, dtype, seed)
        out = tex.quantize(x, _quantizer(fp8, with_2d_quantization=two_d))
        assert out.shape == shape
        assert not out._with_gemm_swizzled_scales
        _assert_is(out, x, fp8, two_d)


@pytest.mark.parametrize("fp8", FORMATS)
def test_scales_at_the_edges_of_their_range(fp8: str) -> None:
    largest = float(FORMATS[fp8][1].max)
    amaxes = [largest, np.nextafter(np.float32(largest), np.float32(np.inf)), largest * 2.0**-120, 2.0**-149]
    amaxes += [float(np.float32(largest * 2.0**-127)), 3.4028235e38, float("inf"), 0.0]
    x = torch.zeros(32, 32 * len(amaxes))
    x[:, ::32] = torch.tensor(amaxes)
    out = tex.quantize(x, _quantizer(fp8))
    _assert_is(out, x, fp8)
    assert out._rowwise_scale_inv[0, :2].tolist() == [127, 128]
    assert out._rowwise_scale_inv[0, 6:8].tolist() == [254, 0]


@pytest.mark.parametrize("dtype", spec.DTYPES, ids=str)
def test_swizzled_scales(dtype: torch.dtype) -> None:
    for shape in [(32, 32), (160, 96), (128, 640), (384, 128)]:
        x = spec.example("spread", shape, dtype)
        out = tex.quantize(x, _quantizer(optimize_for_gemm=True))
        compact = tex.quantize(x, _quantizer())
        assert out._with_gemm_swizzled_scales
        assert torch.equal(out._rowwise_data, compact._rowwise_data)
        assert torch.equal(out._columnwise_data, compact._columnwise_data)
        rowwise, columnwise = (_expected(x, "E4M3", direction)[1].numpy() for direction in (False, True))
        assert torch.equal(out._rowwise_scale_inv, torch.from_numpy(spec.swizzled(rowwise)))
        swizzled = spec.swizzled(columnwise.T).reshape(columnwise.shape)
        assert torch.equal(out._columnwise_scale_inv, torch.from_numpy(swizzled))
        # The same, afterwards.
        tex.swizzle_scales_for_gemm_(compact)
        assert compact._with_gemm_swizzled_scales
        assert torch.equal(out._rowwise_scale_inv, compact._rowwise_scale_inv)
        assert torch.equal(out._columnwise_scale_inv, compact._columnwise_scale_inv)
        before = compact._rowwise_scale_inv.clone()
        tex.swizzle_scales_for_gemm_(compact)
        assert torch.equal(compact._rowwise_scale_inv, before)


def test_an_old_tensor_follows_the_order_of_scales() -> None:
    x, other = (spec.example("random", (32, 64), torch.float32, seed) for seed in (0, 1))
    quantizer = _quantizer()
    out = tex.quantize(other, quantizer)
    quantizer.optimize_for_gemm = True
    tex.quantize(x, quantizer, out)
    assert out._with_gemm_swizzled_scales
    expected = tex.quantize(x, quantizer)
    assert torch.equal(out._columnwise_scale_inv, expected._columnwise_scale_inv)
    assert torch.equal(out._rowwise_scale_inv, expected._rowwise_scale_inv)
    quantizer.optimize_for_gemm = False
    tex.quantize(other, quantizer, out)
    _assert_is(out, other)


@pytest.mark.parametrize("shape", [(31, 32), (32, 48), (2, 8, 32), (32,), ()])
def test_shapes_that_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ReferenceBackendError, match=r"divisible by 32 \(got shape="):
        tex.quantize(torch.ones(shape), _quantizer())


@pytest.mark.parametrize("swizzled", [False, True], ids=["compact", "swizzled"])
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("fp8", FORMATS)
def test_dequantize(fp8: str, columnwise: bool, swizzled: bool) -> None:
    for shape in [(32, 32), (2, 80, 96), (128, 256)]:
        x = spec.example("spread", shape, torch.bfloat16)
        usage = {"rowwise": not columnwise, "columnwise": columnwise}
        out = tex.quantize(x, _quantizer(fp8, optimize_for_gemm=swizzled, **usage))
        fmt, block = FORMATS[fp8][1], (32, 1) if columnwise else (1, 32)
        codes, scales = spec.mxfp8(spec.matrix(x), block, fmt)
        expected = fmt.decode(codes) * spec.spread(spec.power_of_two(scales), block, codes.shape).astype(np.float32)
        for dtype, kind in KIND.items():
            assert torch.equal(tex.dequantize(out, kind), torch.from_numpy(expected).to(dtype).view(shape))
        # Transformer Engine's own way to it, which moves data that are not on "cuda" there.
        assert torch.equal(out.dequantize(dtype=torch.float32), torch.from_numpy(expected).view(shape))


def test_master_weights_in_shards() -> None:
    weight = spec.example("spread", (64, 96), torch.bfloat16)
    whole = tex.quantize(weight, _quantizer())
    empty = tex.create_empty_quantized_tensor(_quantizer(), (64, 96), torch.bfloat16, torch.device("cpu"))
    cuts = [(0, 1000), (1000, 1001), (1001, 64 * 96)]
    amaxes = [
        torch.zeros(scales.shape, dtype=torch.bfloat16)
        for scales in (whole._rowwise_scale_inv, whole._columnwise_scale_inv)
    ]
    for start, end in cuts:
        mine = [torch.full_like(amax, 9.0) for amax in amaxes]
        tex.mxfp8_scaling_compute_partial_amax(weight.view(-1)[start:end], *mine, 64, 96, start)
        for amax, of_shard in zip(amaxes, mine, strict=True):
            torch.maximum(amax, of_shard, out=amax)  # the reduction over ranks
    scales = [empty._rowwise_scale_inv, empty._columnwise_scale_inv]
    tex.multi_tensor_compute_scale_inv_e8m0(2048, None, [amaxes, scales])
    for start, end in cuts:
        parts = [data.view(-1)[start:end] for data in (empty._rowwise_data, empty._columnwise_data)]
        tex.mxfp8_scaling_partial_cast(weight.view(-1)[start:end], *parts, *scales, 64, 96, start)
    for name in ("_rowwise_data", "_columnwise_data", "_rowwise_scale_inv", "_columnwise_scale_inv"):
        assert torch.equal(getattr(empty, name), getattr(whole, name)), name
