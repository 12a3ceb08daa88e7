"""FP8 block scaling on the reference backend, bit for bit against numpy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference import target
from te_precision_callbacks.reference.errors import ReferenceBackendError
from tests.capability import extension_of
from tests.combinations import half
from tests.reference import block_formats as spec

FORMATS = {"E4M3": (tex.DType.kFloat8E4M3, spec.E4M3), "E5M2": (tex.DType.kFloat8E5M2, spec.E5M2)}
SHAPES = [(128, 128), (256, 384), (1, 16), (130, 257), (2, 3, 50, 72), (300,)]


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    with extension_of((9, 0)):
        yield


def _quantizer(fp8: str = "E4M3", dim: int = 1, **options: Any) -> Any:
    options = {"rowwise": True, "columnwise": True, "amax_epsilon": 0.0, "force_pow_2_scales": True} | options
    return Float8BlockQuantizer(FORMATS[fp8][0], block_scaling_dim=dim, **options)


def _expected(
    x: torch.Tensor, columnwise: bool, fp8: str = "E4M3", dim: int = 1, power_of_2: bool = True, epsilon: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales as they lie in memory."""
    values = spec.matrix(x)
    codes, scales = spec.fp8_block(
        values.T if columnwise else values,
        (128 if dim == 2 else 1, 128),
        FORMATS[fp8][1],
        power_of_2=power_of_2,
        epsilon=epsilon,
        largest=spec.LARGEST[x.dtype],
    )
    shape = (*x.shape[-1:], *x.shape[:-1]) if columnwise else x.shape
    padded = spec.pad(scales if dim == 2 else scales.T, 1, 4)
    return torch.from_numpy(codes).reshape(shape), torch.from_numpy(padded)


def _assert_is(out: Any, x: torch.Tensor, **options: Any) -> None:
    for columnwise, data, scales in (
        (False, out._rowwise_data, out._rowwise_scale_inv),
        (True, out._columnwise_data, out._columnwise_scale_inv),
    ):
        codes, expected = _expected(x, columnwise, **options)
        assert torch.equal(data, codes)
        assert torch.equal(scales, expected)


@pytest.mark.parametrize(
    ("kind", "dtype", "fp8", "dim", "power_of_2"), half(spec.KINDS, spec.DTYPES, FORMATS, (1, 2), (True, False))
)
def test_bytes_and_scales(kind: str, dtype: torch.dtype, fp8: str, dim: int, power_of_2: bool) -> None:
    for seed, shape in enumerate(SHAPES):
        x = spec.example(kind, shape, dtype, seed)
        out = tex.quantize(x, _quantizer(fp8, dim, force_pow_2_scales=power_of_2))
        assert out.shape == shape
        assert out._is_2D_scaled is (dim == 2)
        _assert_is(out, x, fp8=fp8, dim=dim, power_of_2=power_of_2)


@pytest.mark.parametrize("dtype", spec.DTYPES, ids=str)
def test_a_scale_beyond_float32_is_the_largest_number_of_the_inputs_type(dtype: torch.dtype) -> None:
    x = torch.full((1, 128), 2.0**-149 if dtype == torch.float32 else torch.finfo(dtype).smallest_normal / 4).to(dtype)
    if dtype == torch.bfloat16:
        x.fill_(2.0**-133)
    out = tex.quantize(x, _quantizer(force_pow_2_scales=False))
    scale = 1 / out._rowwise_scale_inv[0, 0].double().item()
    if dtype == torch.float16:
        assert scale == pytest.approx(448 / x[0, 0].item(), rel=1e-6), "float16 has no number that small"
    else:
        assert scale == pytest.approx(torch.finfo(dtype).max, rel=1e-6)
    _assert_is(out, x, power_of_2=False)


@pytest.mark.parametrize("dim", [1, 2])
def test_dequantize(dim: int) -> None:
    for shape in [(130, 257), (2, 3, 50, 72)]:
        x = spec.example("spread", shape, torch.float32)
        out = tex.quantize(x, _quantizer(dim=dim, force_pow_2_scales=False))
        values, block = spec.matrix(x), (128 if dim == 2 else 1, 128)
        codes, scales = spec.fp8_block(
            values, block, spec.E4M3, power_of_2=False, epsilon=0.0, largest=spec.LARGEST[x.dtype]
        )
        expected = torch.from_numpy(spec.E4M3.decode(codes) * spec.spread(scales, block, codes.shape)).view(shape)
        assert torch.equal(tex.dequantize(out, tex.DType.kFloat32), expected)
        # Transformer Engine's own computation.
        assert torch.equal(out.dequantize(), expected)


@pytest.mark.parametrize("dim", [1, 2])
def test_blackwell_has_powers_of_two_alone(dim: int) -> None:
    x = spec.example("random", (32, 144), torch.float32)
    target.choose((10, 0))
    with pytest.raises(ReferenceBackendError, match="power of two scaling factors"):
        tex.quantize(x, _quantizer(dim=dim, force_pow_2_scales=False))
    _assert_is(tex.quantize(x, _quantizer(dim=dim)), x, dim=dim)
