"""Quantizers of all families: the buffers of new tensors and of tensors written again, and FP8 with one scale, against
torch's own casts."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference import target
from te_precision_callbacks.reference.errors import ReferenceBackendError
from tests.capability import extension_of
from tests.quantizers import fp8_dtype, quantizer

SHAPE = (2, 32, 64)
FP8 = te.Float8Tensor, Float8TensorStorage, ("data",), ("transpose",)
BLOCK_SOURCES = te.Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
ROWWISE, COLUMNWISE = ("rowwise_data", "rowwise_scale_inv"), ("columnwise_data", "columnwise_scale_inv")
NVFP4 = (*ROWWISE, "amax_rowwise"), (*COLUMNWISE, "amax_columnwise")
FAMILIES: dict[str, tuple[Any, ...]] = {
    # name: recipe, options, class of tensors, of storages, buffers of both directions
    "delayed": ("fp8_delayed_scaling", {"scale": 3.0}, *FP8),
    "current": ("fp8_current_scaling", {}, *FP8),
    "blocks 1d": ("fp8_block_scaling", {}, *BLOCK_SOURCES, ROWWISE, COLUMNWISE),
    "blocks 2d": ("fp8_block_scaling", {"weight": True}, *BLOCK_SOURCES, ROWWISE, COLUMNWISE),
    "mxfp8": ("mxfp8", {}, te.MXFP8Tensor, MXFP8TensorStorage, ROWWISE, COLUMNWISE),
    "nvfp4": ("nvfp4", {}, te.NVFP4Tensor, NVFP4TensorStorage, *NVFP4),
}


def made(name: str) -> Any:
    return quantizer(FAMILIES[name][0], **FAMILIES[name][1])


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    """Architectures with a separate buffer for columnwise per-tensor FP8."""
    with extension_of((9, 0)):
        yield


def buffers(tensor: Any, name: str) -> list[torch.Tensor]:
    *_, rowwise, columnwise = FAMILIES[name]
    return [getattr(tensor, f"_{buffer}") for buffer in (*rowwise, *columnwise)]


def assert_is(tensor: Any, x: torch.Tensor, name: str, rowwise: bool, columnwise: bool) -> None:
    """Exactly the buffers of the usages, with the bytes of both at once."""
    both = buffers(tex.quantize(x, made(name)), name)
    half = len(both) // 2
    for place, (buffer, expected) in enumerate(zip(buffers(tensor, name), both, strict=True)):
        is_used = rowwise if place < half else columnwise
        assert torch.equal(buffer, expected) if is_used else buffer is None


@pytest.mark.parametrize("name", FAMILIES)
def test_one_usage(name: str) -> None:
    for usage in ["rowwise", "columnwise"]:
        for internal in [False, True]:
            x, its = torch.randn(SHAPE), made(name)
            its.internal = internal
            usages = {"rowwise": usage == "rowwise", "columnwise": usage == "columnwise"}
            its.set_usage(**usages)
            if usage == "columnwise" and FAMILIES[name][2] is te.Float8Tensor:
                with pytest.raises(NotImplementedError, match="Columnwise-only"):
                    tex.quantize(x, its)
                continue
            out = tex.quantize(x, its)
            assert type(out) is FAMILIES[name][3 if internal else 2]
            assert_is(out, x, name, **usages)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_that_is_written_again_keeps_its_buffers_and_follows_the_usages(name: str) -> None:
    x, other, its = torch.randn(SHAPE), torch.randn(SHAPE), made(name)
    out = tex.quantize(other, its)
    before = buffers(out, name)
    assert tex.quantize(x, its, out) is out
    assert_is(out, x, name, True, True)
    assert all(a is b for a, b in zip(before, buffers(out, name), strict=True))
    is_per_tensor = FAMILIES[name][2] is te.Float8Tensor
    for rowwise, columnwise in [(True, False), (True, True), *([] if is_per_tensor else [(False, True)])]:
        its.set_usage(rowwise=rowwise, columnwise=columnwise)
        tex.quantize(other, its, out)
        assert_is(out, other, name, rowwise, columnwise)
        if is_per_tensor:
            assert out._transpose_invalid is (out._transpose is None)


@pytest.mark.parametrize("name", ["delayed", "current", "blocks 1d", "blocks 2d"])
def test_a_number_is_written_again(name: str) -> None:
    its = made(name)
    out = tex.quantize(torch.tensor(1.0), its)
    tex.quantize(torch.tensor(3.0), its, out)
    torch.testing.assert_close(out.dequantize(), torch.tensor(3.0), rtol=0.07, atol=0.0)


def test_a_tensor_of_another_format_or_without_data_is_refused() -> None:
    x = torch.randn(SHAPE)
    out = tex.quantize(x, quantizer("mxfp8"))
    with pytest.raises(ReferenceBackendError, match="does not write to a MXFP8Tensor"):
        tex.quantize(x, te.NVFP4Quantizer(), out)
    out._rowwise_data = out._columnwise_data = None
    with pytest.raises(ReferenceBackendError, match="has no data"):
        tex.quantize(x, quantizer("mxfp8"), out)


def test_rows_with_scales_of_their_own_get_an_amax_each() -> None:
    first, second = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE).bfloat16()
    out = tex.quantize(first, te.NVFP4Quantizer(columnwise=False))
    with pytest.raises(ReferenceBackendError, match="rowwise usage"):
        tex.quantize(second, te.NVFP4Quantizer(row_scaled_nvfp4=True, rowwise=False), out)
    tex.quantize(second, te.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False), out)
    assert tuple(out._amax_rowwise.shape) == (64,)


# --- FP8 with one scale for a tensor ----------------------------------------------------------------------------------


FLOAT8 = {False: (torch.float8_e4m3fn, 448.0), True: (torch.float8_e5m2, 57344.0)}  # e5m2? -> torch's dtype, largest
_delayed, _current = partial(quantizer, "fp8_delayed_scaling"), partial(quantizer, "fp8_current_scaling")


def _codes(values: torch.Tensor, scale: float, e5m2: bool = False) -> torch.Tensor:
    float8, largest = FLOAT8[e5m2]
    return (values.float() * scale).clamp(-largest, largest).to(float8).view(torch.uint8)


def test_delayed_scaling() -> None:
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
        for scale in [1.0, 37.3, 1e-3]:
            for e5m2 in FLOAT8:
                torch.manual_seed(0)
                x = (torch.randn(4, 6, 32) * 100).to(dtype)
                its = _delayed(e5m2=e5m2, scale=scale)
                out = tex.quantize(x, its)
                codes = _codes(x, scale, e5m2)
                assert type(out) is te.Float8Tensor
                assert (out.dtype, out.shape, out._fp8_dtype) == (dtype, x.shape, fp8_dtype(e5m2))
                assert torch.equal(out._data, codes)
                assert torch.equal(out._transpose, codes.movedim(-1, 0))
                assert out._transpose.is_contiguous()
                assert not out._transpose_invalid
                assert out._scale_inv.item() == torch.tensor(1.0).div(its.scale).item()
                assert its.amax.item() == x.abs().max().item()


@pytest.mark.parametrize("e5m2", FLOAT8)
def test_current_scaling_like_transformer_engines_own_python(e5m2: bool) -> None:
    for power_of_two in (False, True):
        for seed in range(20):
            x = torch.randn(16, 32, generator=torch.Generator().manual_seed(seed)).bfloat16()
            other = CurrentScalingQuantizerRef(
                dtype=FLOAT8[e5m2][0], rowwise=True, columnwise=False, pow_2_scales=power_of_two, eps=0.0
            ).quantize(x)
            out = tex.quantize(x, _current(e5m2=e5m2, force_pow_2_scales=power_of_two))
            assert torch.equal(out._scale_inv.view(-1), other.scale.view(-1))
            assert torch.equal(out._data, other.data.view(torch.uint8))


def test_amax_of_delayed_scaling_only_grows() -> None:
    history = torch.zeros(3, 2)
    its = te.Float8Quantizer(torch.ones(1), history[0][1:2], fp8_dtype(False))
    for value, expected in [(3.0, 3.0), (5.0, 5.0), (4.0, 5.0)]:
        tex.quantize(torch.full((2, 16), value), its)
        assert history.tolist() == [[0.0, expected], [0.0, 0.0], [0.0, 0.0]]


def test_usages_on_blackwell() -> None:
    for make in [_delayed, _current]:
        target.choose((10, 0))
        for rowwise, columnwise in [(True, True), (False, True), (True, False)]:
            out = tex.quantize(torch.randn(3, 4, 16), make(rowwise=rowwise, columnwise=columnwise))
            assert out._data.shape == (3, 4, 16)
            assert out._transpose is None


@pytest.mark.parametrize("make", [_delayed, _current])
def test_the_noop_flag_leaves_all_as_it_is(make: Any) -> None:
    its = make()
    out = tex.quantize(torch.ones(4, 16), its)
    before = (out._data.clone(), out._transpose.clone(), out._scale_inv.clone())
    tex.quantize(torch.full((4, 16), 3.0), its, out, torch.ones(1))
    assert all(torch.equal(a, b) for a, b in zip(before, (out._data, out._transpose, out._scale_inv), strict=True))
    tex.quantize(torch.full((4, 16), 3.0), its, out, torch.zeros(1))
    assert out.dequantize().eq(3.0).all()


@pytest.mark.parametrize("e5m2", FLOAT8)
def test_dequantizing_multiplies_codes_by_the_scale(e5m2: bool) -> None:
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


def test_a_subclass_is_served_like_its_parent() -> None:
    x, mine = torch.randn(4, 16), type("Mine", (te.Float8CurrentScalingQuantizer,), {})
    assert torch.equal(mine(fp8_dtype(False), device="cpu")(x)._data, _current()(x)._data)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bgrad_quantize(dtype: torch.dtype) -> None:
    grad = torch.randn(5, 8, 32).to(dtype)
    bias_grad, quantized = tex.bgrad_quantize(grad, _current(e5m2=True))
    assert bias_grad.dtype == dtype
    torch.testing.assert_close(
        bias_grad.double(),
        grad.double().sum(dim=(0, 1)),
        rtol=2.0**-8 if dtype == torch.bfloat16 else 1e-6,
        atol=1e-5,
    )
    assert torch.equal(quantized._data, tex.quantize(grad, _current(e5m2=True))._data)
    assert torch.equal(tex.bgrad_quantize(grad, None)[1], grad)


def test_fp8_transpose() -> None:
    data = torch.arange(24, dtype=torch.uint8).view(2, 3, 4)
    out = tex.fp8_transpose(data, fp8_dtype(False), out=None)
    assert torch.equal(out, data.view(6, 4).t().reshape(4, 2, 3))
    given = torch.zeros(4, 6, dtype=torch.uint8)
    assert tex.fp8_transpose(data, fp8_dtype(False), out=given) is given
    assert torch.equal(given, data.view(6, 4).t())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_activations_quantize_what_they_would_return(dtype: torch.dtype) -> None:
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
