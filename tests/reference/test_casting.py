"""Buffers of quantized tensors, for all families of quantizers: of new tensors, and of tensors written again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

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

E4M3, CPU = tex.DType.kFloat8E4M3, torch.device("cpu")
SHAPE = (2, 32, 64)


class Family(NamedTuple):
    """A quantizer, the classes of its tensors, and the buffers of both directions."""

    make: Callable[[], Any]
    tensor: type
    storage: type
    rowwise: Sequence[str] = ("_rowwise_data", "_rowwise_scale_inv")
    columnwise: Sequence[str] = ("_columnwise_data", "_columnwise_scale_inv")


def _block(dim: int) -> Any:
    options = {"amax_epsilon": 0.0, "force_pow_2_scales": True, "block_scaling_dim": dim}
    return te.Float8BlockQuantizer(E4M3, rowwise=True, columnwise=True, **options)


PER_TENSOR = {
    "tensor": te.Float8Tensor,
    "storage": Float8TensorStorage,
    "rowwise": ["_data"],
    "columnwise": ["_transpose"],
}
OF_BLOCKS = {"tensor": te.Float8BlockwiseQTensor, "storage": Float8BlockwiseQTensorStorage}
FAMILIES = {
    "delayed": Family(lambda: te.Float8Quantizer(torch.tensor([3.0]), torch.zeros(1), E4M3), **PER_TENSOR),
    "current": Family(lambda: te.Float8CurrentScalingQuantizer(E4M3, device=CPU), **PER_TENSOR),
    "blocks 1d": Family(lambda: _block(1), **OF_BLOCKS),
    "blocks 2d": Family(lambda: _block(2), **OF_BLOCKS),
    "mxfp8": Family(lambda: te.MXFP8Quantizer(E4M3), te.MXFP8Tensor, MXFP8TensorStorage),
    "nvfp4": Family(
        te.NVFP4Quantizer,
        te.NVFP4Tensor,
        NVFP4TensorStorage,
        ("_rowwise_data", "_rowwise_scale_inv", "_amax_rowwise"),
        ("_columnwise_data", "_columnwise_scale_inv", "_amax_columnwise"),
    ),
}


@pytest.fixture(autouse=True)
def hopper() -> Iterator[None]:
    """Where columnwise per-tensor FP8 is a buffer of its own."""
    with extension_of((9, 0)):
        yield


def buffers(tensor: Any, names: Sequence[str]) -> list[torch.Tensor]:
    return [getattr(tensor, name) for name in names]


def assert_is(tensor: Any, x: torch.Tensor, family: Family, rowwise: bool, columnwise: bool) -> None:
    """Exactly the buffers of the usages, with the bytes of both at once."""
    both = tex.quantize(x, family.make())
    for usage, names in ((rowwise, family.rowwise), (columnwise, family.columnwise)):
        for buffer, expected in zip(buffers(tensor, names), buffers(both, names), strict=True):
            assert torch.equal(buffer, expected) if usage else buffer is None


@pytest.mark.parametrize("internal", [False, True], ids=["tensor", "storage"])
@pytest.mark.parametrize("usage", ["rowwise", "columnwise"])
@pytest.mark.parametrize("name", FAMILIES)
def test_one_usage(name: str, usage: str, internal: bool) -> None:
    family, x = FAMILIES[name], torch.randn(SHAPE)
    quantizer = family.make()
    quantizer.internal = internal
    usages = {"rowwise": usage == "rowwise", "columnwise": usage == "columnwise"}
    quantizer.set_usage(**usages)
    if usage == "columnwise" and family.tensor is te.Float8Tensor:
        with pytest.raises(NotImplementedError, match="Columnwise-only"):
            tex.quantize(x, quantizer)
        return
    out = tex.quantize(x, quantizer)
    assert type(out) is (family.storage if internal else family.tensor)
    assert_is(out, x, family, **usages)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_tensor_that_is_written_again_keeps_its_buffers_and_follows_the_usages(name: str) -> None:
    family = FAMILIES[name]
    x, other = torch.randn(SHAPE), torch.randn(SHAPE)
    quantizer = family.make()
    out = tex.quantize(other, quantizer)
    before = buffers(out, [*family.rowwise, *family.columnwise])
    assert tex.quantize(x, quantizer, out) is out
    assert_is(out, x, family, True, True)
    assert all(a is b for a, b in zip(before, buffers(out, [*family.rowwise, *family.columnwise]), strict=True))
    only_rowwise = [{"rowwise": True, "columnwise": False}]
    only_columnwise = [] if family.tensor is te.Float8Tensor else [{"rowwise": False, "columnwise": True}]
    for usages in (*only_rowwise, {"rowwise": True, "columnwise": True}, *only_columnwise):
        quantizer.set_usage(**usages)
        tex.quantize(other, quantizer, out)
        assert_is(out, other, family, **usages)
        if family.tensor is te.Float8Tensor:
            assert out._transpose_invalid is (out._transpose is None)


@pytest.mark.parametrize("name", ["delayed", "current", "blocks 1d", "blocks 2d"])
def test_a_number_is_written_again(name: str) -> None:
    quantizer = FAMILIES[name].make()
    out = tex.quantize(torch.tensor(1.0), quantizer)
    tex.quantize(torch.tensor(3.0), quantizer, out)
    again = out.dequantize()
    assert again.shape == ()
    torch.testing.assert_close(again, torch.tensor(3.0), rtol=0.07, atol=0.0)


def test_a_tensor_of_another_format_or_without_data_is_refused() -> None:
    x = torch.randn(SHAPE)
    out = tex.quantize(x, te.MXFP8Quantizer(E4M3))
    with pytest.raises(ReferenceBackendError, match="does not write to a MXFP8Tensor"):
        tex.quantize(x, te.NVFP4Quantizer(), out)
    out._rowwise_data = out._columnwise_data = None
    with pytest.raises(ReferenceBackendError, match="has no data"):
        tex.quantize(x, te.MXFP8Quantizer(E4M3), out)


def test_rows_with_scales_of_their_own_get_an_amax_each() -> None:
    first, second = torch.randn(SHAPE).bfloat16(), torch.randn(SHAPE).bfloat16()
    out = tex.quantize(first, te.NVFP4Quantizer(columnwise=False))
    with pytest.raises(ReferenceBackendError, match="rowwise usage"):
        tex.quantize(second, te.NVFP4Quantizer(row_scaled_nvfp4=True, rowwise=False), out)
    tex.quantize(second, te.NVFP4Quantizer(row_scaled_nvfp4=True, columnwise=False), out)
    assert tuple(out._amax_rowwise.shape) == (64,)
