"""Buffers of quantized tensors, for all families of quantizers: of new tensors, and of tensors written again."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import Float8BlockwiseQTensorStorage
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import ReferenceBackendError
from tests.capability import extension_of
from tests.quantizers import quantizer

SHAPE = (2, 32, 64)
FP8 = te.Float8Tensor, Float8TensorStorage, ("data",), ("transpose",)
OF_BLOCKS = te.Float8BlockwiseQTensor, Float8BlockwiseQTensorStorage
ROWWISE, COLUMNWISE = ("rowwise_data", "rowwise_scale_inv"), ("columnwise_data", "columnwise_scale_inv")
NVFP4 = (*ROWWISE, "amax_rowwise"), (*COLUMNWISE, "amax_columnwise")
FAMILIES: dict[str, tuple[Any, ...]] = {
    # name: recipe, options, class of tensors, of storages, buffers of both directions
    "delayed": ("fp8_delayed_scaling", {"scale": 3.0}, *FP8),
    "current": ("fp8_current_scaling", {}, *FP8),
    "blocks 1d": ("fp8_block_scaling", {}, *OF_BLOCKS, ROWWISE, COLUMNWISE),
    "blocks 2d": ("fp8_block_scaling", {"weight": True}, *OF_BLOCKS, ROWWISE, COLUMNWISE),
    "mxfp8": ("mxfp8", {}, te.MXFP8Tensor, MXFP8TensorStorage, ROWWISE, COLUMNWISE),
    "nvfp4": ("nvfp4", {}, te.NVFP4Tensor, NVFP4TensorStorage, *NVFP4),
}


def made(name: str) -> Any:
    return quantizer(FAMILIES[name][0], **FAMILIES[name][1])


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    """Where columnwise per-tensor FP8 is a buffer of its own."""
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


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_usage(name: str, usage: str, internal: bool) -> None:
    x, its = torch.randn(SHAPE), made(name)
    its.internal = internal
    usages = {"rowwise": usage == "rowwise", "columnwise": usage == "columnwise"}
    its.set_usage(**usages)
    if usage == "columnwise" and FAMILIES[name][2] is te.Float8Tensor:
        with pytest.raises(NotImplementedError, match="Columnwise-only"):
            tex.quantize(x, its)
        return
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
    again = out.dequantize()
    assert again.shape == ()
    torch.testing.assert_close(again, torch.tensor(3.0), rtol=0.07, atol=0.0)


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
