"""Attention tensors as heads, for any order in memory.

A format is the order of the dimensions b (batch), s (tokens), h (heads) and d (head size), as in the names of
``NVTE_QKV_Format``. The scales of MXFP8 belong to data in the format bhsd, with batch, heads and tokens merged
(``mxfp8_quantize_fast_path`` of ``pytorch/attention/dot_product_attention/utils.py``, TE 2.20).
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

HEADS = "bhsd"


def to_heads(tensor: torch.Tensor, form: str) -> torch.Tensor:
    """View a tensor of the format ``form`` as [batch, heads, tokens, head size]."""
    return tensor.permute([form.index(dimension) for dimension in HEADS])


def from_heads(tensor: torch.Tensor, form: str) -> torch.Tensor:
    return tensor.permute([HEADS.index(dimension) for dimension in form])


def in_heads(tensor: Any, form: str) -> Any:
    rowwise, columnwise = (
        None if data is None else to_heads(data, form) for data in (tensor._rowwise_data, tensor._columnwise_data)
    )
    return SimpleNamespace(
        _rowwise_data=rowwise,
        _rowwise_scale_inv=tensor._rowwise_scale_inv,
        _columnwise_data=columnwise,
        _columnwise_scale_inv=tensor._columnwise_scale_inv,
        _fp8_dtype=tensor._fp8_dtype,
        _with_gemm_swizzled_scales=tensor._with_gemm_swizzled_scales,
    )
