"""Per-tensor FP8 quantization through Transformer Engine's own quantizers, against torch's own casts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformer_engine.pytorch.tensor.float8_tensor import (
    Float8CurrentScalingQuantizer,
    Float8Quantizer,
    Float8Tensor,
)
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from te_precision_callbacks.reference import extension as tex
from tests.capability import extension_of

E4M3, E5M2 = tex.DType.kFloat8E4M3, tex.DType.kFloat8E5M2
TORCH = {E4M3: torch.float8_e4m3fn, E5M2: torch.float8_e5m2}
LARGEST = {E4M3: 448.0, E5M2: 57344.0}
INF, NAN = float("inf"), float("nan")


@pytest.fixture
def hopper() -> Iterator[None]:
    with extension_of((9, 0)):
        yield


@pytest.fixture
def blackwell() -> Iterator[None]:
    with extension_of((10, 0)):
        yield


def _delayed(dtype: tex.DType = E4M3, scale: float = 1.0, **usages: bool) -> Any:
    return Float8Quantizer(torch.tensor([scale]), torch.zeros(1), dtype, **usages)


def _current(dtype: tex.DType = E4M3, **options: Any) -> Any:
    return Float8CurrentScalingQuantizer(dtype, device=torch.device("cpu"), **options)


def _codes(values: torch.Tensor, scale: float, dtype: tex.DType) -> torch.Tensor:
    """By torch's own cast, of what is in range."""
    scaled = (values.float() * scale).clamp(-LARGEST[dtype], LARGEST[dtype])
    return scaled.to(TORCH[dtype]).view(torch.uint8)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 37.3, 1e-3])
def test_delayed_scaling(fp8: tex.DType, dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 6, 32) * 100).to(dtype)
    quantizer = _delayed(fp8, scale)
    out = tex.quantize(x, quantizer)
    codes = _codes(x, quantizer.scale.item(), fp8)
    assert type(out) is Float8Tensor
    assert (out.dtype, out.shape, out._fp8_dtype) == (dtype, x.shape, fp8)
    assert torch.equal(out._data, codes)
    assert torch.equal(out._transpose, codes.movedim(-1, 0))
    assert out._transpose.is_contiguous()
    assert not out._transpose_invalid
    assert out._scale_inv.item() == torch.tensor(1.0).div(quantizer.scale).item()
    assert quantizer.amax.item() == x.abs().max().item()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_current_scaling_like_transformer_engines_own_python(fp8: tex.DType) -> None:
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    torch.manual_seed(0)
    for power_of_two in (False, True):
        for seed in range(20):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
            other = CurrentScalingQuantizerRef(
                dtype=TORCH[fp8], rowwise=True, columnwise=False, pow_2_scales=power_of_two, eps=0.0
            ).quantize(x)
            out = tex.quantize(x, _current(fp8, force_pow_2_scales=power_of_two))
            assert torch.equal(out._scale_inv.view(-1), other.scale.view(-1))
            assert torch.equal(out._data, other.data.view(torch.uint8))


@pytest.mark.usefixtures("hopper")
def test_amax_of_delayed_scaling_only_grows() -> None:
    history = torch.zeros(3, 2)
    quantizer = Float8Quantizer(torch.ones(1), history[0][1:2], E4M3)
    for value, expected in [(3.0, 3.0), (5.0, 5.0), (4.0, 5.0)]:
        tex.quantize(torch.full((2, 16), value), quantizer)
        assert history.tolist() == [[0.0, expected], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("make", [_delayed, _current])
def test_usages_on_blackwell(make: Any) -> None:
    for rowwise, columnwise in [(True, True), (False, True), (True, False)]:
        out = tex.quantize(torch.randn(3, 4, 16), make(E4M3, rowwise=rowwise, columnwise=columnwise))
        assert out._data.shape == (3, 4, 16)
        assert out._transpose is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("make", [_delayed, _current])
def test_the_noop_flag_leaves_all_as_it_is(make: Any) -> None:
    quantizer = make(E4M3)
    out = tex.quantize(torch.ones(4, 16), quantizer)
    before = (out._data.clone(), out._transpose.clone(), out._scale_inv.clone())
    tex.quantize(torch.full((4, 16), 3.0), quantizer, out, torch.ones(1))
    assert all(torch.equal(a, b) for a, b in zip(before, (out._data, out._transpose, out._scale_inv), strict=True))
    tex.quantize(torch.full((4, 16), 3.0), quantizer, out, torch.zeros(1))
    assert out.dequantize().eq(3.0).all()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("fp8", [E4M3, E5M2])
def test_dequantize(fp8: tex.DType) -> None:
    x = torch.randn(4, 32)
    out = tex.quantize(x, _current(fp8))
    expected = out._data.view(TORCH[fp8]).float() * out._scale_inv
    assert torch.equal(tex.dequantize(out, tex.DType.kFloat32), expected)
    assert torch.equal(tex.dequantize(out, tex.DType.kBFloat16), expected.bfloat16())
    # Transformer Engine's own path for data on a CPU.
    assert torch.equal(out.dequantize(), expected)
    columnwise_only = Float8TensorStorage(
        data=None, data_transpose=out._transpose, fp8_scale_inv=out._scale_inv, fp8_dtype=fp8
    )
    assert torch.equal(tex.dequantize(columnwise_only, tex.DType.kFloat32), expected)


@pytest.mark.usefixtures("hopper")
def test_a_subclass_is_served_like_its_parent() -> None:
    class Mine(Float8CurrentScalingQuantizer):  # type: ignore[misc]
        pass

    x = torch.randn(4, 16)
    mine = Mine(E4M3, device=torch.device("cpu"))
    assert torch.equal(tex.quantize(x, mine)._data, tex.quantize(x, _current())._data)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bgrad_quantize(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad = torch.randn(5, 8, 32).to(dtype)
    bias_grad, quantized = tex.bgrad_quantize(grad, _current(E5M2))
    assert bias_grad.dtype == dtype
    expected = grad.double().sum(dim=(0, 1))
    torch.testing.assert_close(
        bias_grad.double(), expected, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-5
    )
    assert torch.equal(quantized._data, tex.quantize(grad, _current(E5M2))._data)
    bias_grad, same = tex.bgrad_quantize(grad, None)
    assert torch.equal(same, grad)


def test_fp8_transpose() -> None:
    data = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    out = tex.fp8_transpose(data, E4M3, out=None)
    assert torch.equal(out, data.view(6, 4).t().reshape(4, 2, 3))
    given = torch.zeros(4, 6, dtype=torch.uint8)
    assert tex.fp8_transpose(data, E4M3, out=given) is given
    assert torch.equal(given, data.view(6, 4).t())


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_activations_quantize_what_they_would_return(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(8, 64).to(dtype), torch.randn(64).to(dtype)
    kind = tex.DType.kFloat32 if dtype == torch.float32 else tex.DType.kBFloat16
    plain = tex.rmsnorm_fwd(x, weight, 1e-5, None, None, kind, 0, False)[0]
    quantized = tex.rmsnorm_fwd(x, weight, 1e-5, None, _current(), kind, 0, False)[0]
    assert torch.equal(quantized._data, tex.quantize(plain, _current())._data)
    # Delayed scaling sees the result before it is rounded.
    exact = tex.rmsnorm_fwd(x.float(), weight.float(), 1e-5, None, None, tex.DType.kFloat32, 0, False)[0]
    quantizer = _delayed(scale=10.0)
    quantized = tex.rmsnorm_fwd(x, weight, 1e-5, None, quantizer, kind, 0, False)[0]
    assert torch.equal(quantized._data, tex.quantize(exact, _delayed(scale=10.0))._data)
    assert quantizer.amax.item() == exact.abs().max().item()

    exact = tex.swiglu(x.float(), None)
    quantizer = _delayed(scale=10.0)
    quantized = tex.swiglu(x, quantizer)
    assert (quantized.shape, quantized.dtype) == ((8, 32), dtype)
    assert torch.equal(quantized._data, tex.quantize(exact, _delayed(scale=10.0))._data)
    assert quantizer.amax.item() == exact.abs().max().item()
    # Current scaling takes the amax of the float32 result, and quantizes the rounded one.
    quantized = tex.swiglu(x, _current())
    scale = torch.tensor(448.0).div(exact.abs().max())
    assert quantized._scale_inv.item() == torch.tensor(1.0).div(scale).item()
    assert torch.equal(quantized._data, _codes(tex.swiglu(x, None), scale.item(), E4M3))
