"""Converts the extension's element types, or Transformer Engine's own of the same values, to torch's, and to the
formats."""

from __future__ import annotations

from typing import SupportsInt

import torch

from te_precision_callbacks.base.numerics.formats import E4M3, E5M2, FloatFormat
from te_precision_callbacks.reference.extension.enums import DType

_TORCH: dict[int, torch.dtype] = {
    DType.kByte: torch.uint8,
    DType.kInt32: torch.int32,
    DType.kFloat32: torch.float32,
    DType.kFloat16: torch.float16,
    DType.kBFloat16: torch.bfloat16,
    DType.kFloat8E4M3: torch.float8_e4m3fn,
    DType.kFloat8E5M2: torch.float8_e5m2,
}
_FP8: dict[int, FloatFormat] = {DType.kFloat8E4M3: E4M3, DType.kFloat8E5M2: E5M2}


def torch_dtype(dtype: SupportsInt) -> torch.dtype:
    """torch's element type for the extension's."""
    return _TORCH[int(dtype)]


def fp8_format(dtype: SupportsInt) -> FloatFormat:
    """The FP8 format for the extension's element type."""
    return _FP8[int(dtype)]
