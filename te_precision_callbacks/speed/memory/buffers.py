"""The bytes of quantized tensors by part: codes of each direction, and scales.

    planned_bytes(quantizer, (4096, 4096), rowwise=True, columnwise=True)     # what the quantizer will allocate
    buffers(tensor)                                                           # the tensors that one consists of

Read from Transformer Engine 2.20.2: ``Quantizer.inner_tensor_specs`` (``pytorch/quantized_tensor.py`` and
``pytorch/tensor/*_tensor.py``), which describes the buffers; per-tensor FP8 as ``Float8CurrentScalingQuantizer`` has
it, which Float8Quantizer of delayed scaling does not describe: GPUs whose FP8 GEMMs take any layout
(``is_non_tn_fp8_gemm_supported``: compute capability 10.x, 11.x and 13 up) read the rowwise codes in both directions,
and all others need a transpose of them for columnwise use.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import (
    HYBRID_QUANTIZER,
    IDENTITY_QUANTIZER,
    ONE_SCALE,
    class_names,
    recipe_of,
)

_ROWWISE = ("_data", "_rowwise_data", "rowwise_data")
_COLUMNWISE = ("_transpose", "_columnwise_data", "columnwise_data")
_SCALES = ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")
_OF_GROUPED = ("scale_inv", "columnwise_scale_inv", "amax", "columnwise_amax")
"""Attributes of the storages in ``pytorch/tensor/storage``, the last ones of a GroupedTensorStorage."""


class UnknownMemoryError(PrecisionDebugError, TypeError):
    """A layer whose bytes are not known, such as one with a quantizer of a user's own recipe."""


class CodeBytes(NamedTuple):
    """The bytes of a quantized tensor.

    Attributes:
        rowwise: its rowwise codes, which on some GPUs serve both directions.
        columnwise: its columnwise codes.
        scales: scales and amaxes of both directions.
        high: what is kept in high precision.
    """

    rowwise: int = 0
    columnwise: int = 0
    scales: int = 0
    high: int = 0

    def plus(self, other: CodeBytes) -> CodeBytes:
        """The sum of two."""
        return CodeBytes(*(a + b for a, b in zip(self, other, strict=True)))


def planned_bytes(
    quantizer: Any, shape: tuple[int, int], *, rowwise: bool, columnwise: bool, itemsize: int = 2
) -> CodeBytes:
    """What a tensor has that a quantizer makes, once the directions that are not needed are dropped.

    Args:
        quantizer: one of Transformer Engine's; its usage is set to the directions.
        shape: rows and columns of the tensor.
        rowwise, columnwise: the directions that are kept.
        itemsize: bytes of a number in high precision.

    Raises:
        UnknownMemoryError: it does not describe its buffers.
    """
    names = class_names(quantizer)
    if not rowwise and not columnwise:
        return CodeBytes()
    if HYBRID_QUANTIZER in names:
        sides = [(quantizer.rowwise_quantizer, rowwise, False), (quantizer.columnwise_quantizer, False, columnwise)]
        found = CodeBytes()
        for part, in_rows, in_columns in sides:
            if part is not None:
                found = found.plus(
                    planned_bytes(part, shape, rowwise=in_rows, columnwise=in_columns, itemsize=itemsize)
                )
        return found
    if IDENTITY_QUANTIZER in names:
        return CodeBytes(high=math.prod(shape) * itemsize)
    if recipe_of(quantizer) in ONE_SCALE:
        in_both = takes_any_layout()
        codes = math.prod(shape)
        return CodeBytes(codes * (rowwise or in_both), codes * (columnwise and not in_both), torch.float32.itemsize)
    quantizer.set_usage(rowwise=rowwise, columnwise=columnwise)
    try:
        specs = quantizer.inner_tensor_specs(shape)
    except (NotImplementedError, AttributeError) as error:
        raise UnknownMemoryError(
            f"{type(quantizer).__name__}: it is not known which buffers this quantizer of a recipe of your own makes."
        ) from error
    return _summed((name, math.prod(size) * dtype.itemsize) for name, (size, dtype) in specs.items())


def takes_any_layout() -> bool:
    """Whether per-tensor FP8 keeps one copy of codes for both directions on this GPU."""
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    return bool(is_non_tn_fp8_gemm_supported())


def is_quantized(tensor: Any) -> bool:
    """Whether this is one of Transformer Engine's quantized tensors, or a storage of several."""
    return tensor is not None and any(
        name in ("QuantizedTensorStorage", "GroupedTensorStorage") for name in class_names(tensor)
    )


def buffers(tensor: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a quantized tensor keeps, with the attributes that hold them."""
    for name in (*_ROWWISE, *_COLUMNWISE, *_SCALES, *_OF_GROUPED):
        held = getattr(tensor, name, None)
        if isinstance(held, torch.Tensor):
            yield name, held


def part_of(buffer: str) -> str:
    """The part that a buffer is, by its attribute: ``rowwise``, ``columnwise`` or ``scales``."""
    if buffer in _ROWWISE:
        return "rowwise"
    return "columnwise" if buffer in _COLUMNWISE else "scales"


def _summed(sizes: Iterable[tuple[str, int]]) -> CodeBytes:
    found = {"rowwise": 0, "columnwise": 0, "scales": 0}
    for name, size in sizes:
        found[part_of(name)] += size
    return CodeBytes(**found)
