"""Per-tensor FP8 quantization through Transformer Engine's own quantizers, against torch's own casts."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from te_precision_callbacks.reference import extension as tex
from tests.capability import extension_of
from tests.quantizers import fp8_dtype, quantizer

FLOAT8 = {False: (torch.float8_e4m3fn, 448.0), True: (torch.float8_e5m2, 57344.0)}  # e5m2? -> torch's dtype, largest
_delayed, _current = partial(quantizer, "fp8_delayed_scaling"), partial(quantizer, "fp8_current_scaling")


@pytest.fixture
def hopper() -> Iterator[None]:
    with extension_of((9, 0)):
        yield


@pytest.fixture
def blackwell() -> Iterator[None]:
    with extension_of((10, 0)):
        yield


def _codes(values: torch.Tensor, scale: float, e5m2: bool = False) -> torch.Tensor:
    float8, largest = FLOAT8[e5m2]
    return (values.float() * scale).clamp(-largest, largest).to(float8).view(torch.uint8)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("e5m2", FLOAT8)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1.0, 37.3, 1e-3])
def test_delayed_scaling(e5m2: bool, dtype: torch.dtype, scale: float) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 6, 32) * 100).to(dtype)
    its = _delayed(e5m2=e5m2, scale=scale)
    out = tex.quantize(x, its)
    codes = _codes(x, its.scale.item(), e5m2)
    assert type(out) is te.Float8Tensor
    assert (out.dtype, out.shape, out._fp8_dtype) == (dtype, x.shape, fp8_dtype(e5m2))
    assert torch.equal(out._data, codes)
    assert torch.equal(out._transpose, codes.movedim(-1, 0))
    assert out._transpose.is_contiguous()
    assert not out._transpose_invalid
    assert out._scale_inv.item() == torch.tensor(1.0).div(its.scale).item()
    assert its.amax.item() == x.abs().max().item()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("e5m2", FLOAT8)
def test_current_scaling_like_transformer_engines_own_python(e5m2: bool) -> None:
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    torch.manual_seed(0)
    for power_of_two in (False, True):
        for seed in range(20):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
            other = CurrentScalingQuantizerRef(
                dtype=FLOAT8[e5m2][0], rowwise=True, columnwise=False, pow_2_scales=power_of_two, eps=0.0
            ).quantize(x)
            out = tex.quantize(x, _current(e5m2=e5m2, force_pow_2_scales=power_of_two))
            assert torch.equal(out._scale_inv.view(-1), other.scale.view(-1))
            assert torch.equal(out._data, other.data.view(torch.uint8))


@pytest.mark.usefixtures("hopper")
def test_amax_of_delayed_scaling_only_grows() -> None:
    history = torch.zeros(3, 2)
    its = te.Float8Quantizer(torch.ones(1), history[0][1:2], fp8_dtype(False))
    for value, expected in [(3.0, 3.0), (5.0, 5.0), (4.0, 5.0)]:
        tex.quantize(torch.full((2, 16), value), its)
        assert history.tolist() == [[0.0, expected], [0.0, 0.0], [0.0, 0.0]]


@pytest.mark.usefixtures("blackwell")
@pytest.mark.parametrize("make", [_delayed, _current])
def test_usages_on_blackwell(make: Any) -> None:
    for rowwise, columnwise in [(True, True), (False, True), (True, False)]:
        out = tex.quantize(torch.randn(3, 4, 16), make(rowwise=rowwise, columnwise=columnwise))
        assert out._data.shape == (3, 4, 16)
        assert out._transpose is None


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("make", [_delayed, _current])
def test_the_noop_flag_leaves_all_as_it_is(make: Any) -> None:
    its = make()
    out = tex.quantize(torch.ones(4, 16), its)
    before = (out._data.clone(), out._transpose.clone(), out._scale_inv.clone())
    tex.quantize(torch.full((4, 16), 3.0), its, out, torch.ones(1))
    assert all(torch.equal(a, b) for a, b in zip(before, (out._data, out._transpose, out._scale_inv), strict=True))
    tex.quantize(torch.full((4, 16), 3.0), its, out, torch.zeros(1))
    assert out.dequantize().eq(3.0).all()


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("e5m2", FLOAT8)
def test_dequantize(e5m2: bool) -> None:
    x = torch.randn(4, 32)
    out = tex.quantize(x, _current(e5m2=e5m2))
    expected = out._data.view(FLOAT8[e5m2][0]).float() * out._scale_inv
    assert torch.equal(tex.dequantize(out, tex.DType.kFloat32), expected)
    assert torch.equal(tex.dequantize(out, tex.DType.kBFloat16), expected.bfloat16())
    # Transformer Engine's own path for data on a CPU.
    assert torch.equal(out.dequantize(), expected)
    columnwise_only = Float8TensorStorage(
        data=None, data_transpose=out._transpose, fp8_scale_inv=out._scale_inv, fp8_dtype=fp8_dtype(e5m2)
    )
    assert torch.equal(tex.dequantize(columnwise_only, tex.DType.kFloat32), expected)


@pytest.mark.usefixtures("hopper")
def test_a_subclass_is_served_like_its_parent() -> None:
    class Mine(te.Float8CurrentScalingQuantizer):  # type: ignore[misc]
        pass

    x = torch.randn(4, 16)
    mine = Mine(fp8_dtype(False), device=torch.device("cpu"))
    assert torch.equal(tex.quantize(x, mine)._data, tex.quantize(x, _current())._data)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bgrad_quantize(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    grad = torch.randn(5, 8, 32).to(dtype)
    bias_grad, quantized = tex.bgrad_quantize(grad, _current(e5m2=True))
    assert bias_grad.dtype == dtype
    expected = grad.double().sum(dim=(0, 1))
    torch.testing.assert_close(
        bias_grad.double(), expected, rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-5
    )
    assert torch.equal(quantized._data, tex.quantize(grad, _current(e5m2=True))._data)
    bias_grad, same = tex.bgrad_quantize(grad, None)
    assert torch.equal(same, grad)


def test_fp8_transpose() -> None:
    data = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    out = tex.fp8_transpose(data, fp8_dtype(False), out=None)
    assert torch.equal(out, data.view(6, 4).t().reshape(4, 2, 3))
    given = torch.zeros(4, 6, dtype=torch.uint8)
    assert tex.fp8_transpose(data, fp8_dtype(False), out=given) is given
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
    norm, swiglu = _delayed(scale=10.0), _delayed(scale=10.0)
    for its, quantized, exact in (
        (
            norm,
            tex.rmsnorm_fwd(x, weight, 1e-5, None, norm, kind, 0, False)[0],
            tex.rmsnorm_fwd(x.float(), weight.float(), 1e-5, None, None, tex.DType.kFloat32, 0, False)[0],
        ),
        (swiglu, tex.swiglu(x, swiglu), tex.swiglu(x.float(), None)),
    ):
        assert (quantized.shape, quantized.dtype) == (exact.shape, dtype)
        assert torch.equal(quantized._data, tex.quantize(exact, _delayed(scale=10.0))._data)
        assert its.amax.item() == exact.abs().max().item()
    # Current scaling takes the amax of the float32 result, and quantizes the rounded one.
    quantized = tex.swiglu(x, _current())
    scale = torch.tensor(448.0).div(exact.abs().max())
    assert quantized._scale_inv.item() == torch.tensor(1.0).div(scale).item()
    assert torch.equal(quantized._data, _codes(tex.swiglu(x, None), scale.item()))
