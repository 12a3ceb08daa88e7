"""The tensors of attention as batches of heads, whatever their order in memory.

A format is the order of the dimensions b (batch), s (tokens), h (heads) and d (head size), as in the names of
``NVTE_QKV_Format``. ``pytorch/csrc/extensions/attention.cpp`` (packed gradients) and ``mxfp8_quantize_fast_path`` of
``pytorch/attention/dot_product_attention/utils.py`` (the scales of MXFP8), TE 2.20.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from te_precision_callbacks.base.numerics import layouts
from te_precision_callbacks.base.numerics.heads import in_heads, to_heads
from te_precision_callbacks.base.numerics.layouts import Stored, is_quantized, scaling_mode, stored
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.enums import NVTE_QKV_Format, NVTE_QKV_Layout


@dataclass(frozen=True)
class Heads:
    """A tensor of attention.

    Attributes:
        numbers: float32, [batch, heads, tokens, head size].
        factor: float32, [1]: the inverse scale of per-tensor FP8, which multiplies sums of products; otherwise 1.
    """

    numbers: torch.Tensor
    factor: torch.Tensor


def format_of(layout: int) -> str:
    """The format that Q, K and V share in a layout; an empty text if they do not, or if K and V are paged."""
    formats = {"".join(filter(str.isalpha, part)).lower() for part in _parts(layout)}
    return formats.pop() if len(formats) == 1 else ""


def name_of(qkv_format: int) -> str:
    return NVTE_QKV_Format(qkv_format).name.removeprefix("NVTE_").lower()


def read(tensor: Any, form: str, *, along_tokens: bool = False) -> Heads:
    """A plain tensor, per-tensor FP8 or MXFP8 as heads.

    Args:
        tensor: 4 dimensions in the format ``form``, maybe a part of a packed buffer. The scales of MXFP8 are those of
            the data in the format bhsd, with batch, heads and tokens merged, in the order that a GEMM reads.
        form: the format.
        along_tokens: for MXFP8: whether to read the data whose blocks lie along the tokens (columnwise), not along the
            head (rowwise).

    Raises:
        ReferenceBackendError: data that the kernel would read are missing, or of a format that it does not have.
    """
    if not is_quantized(tensor):
        return Heads(to_heads(tensor.detach().float(), form), torch.ones(1, device=tensor.device))
    mode = scaling_mode(tensor)
    if mode == layouts.PER_TENSOR:
        part = _needed(stored(tensor, columnwise=False), tensor, "rowwise")
        numbers = to_heads(part.as_tensor(part.elements()), form)
        return Heads(numbers, part.scales.view(1))
    if mode == layouts.MXFP8:
        direction = "columnwise" if along_tokens else "rowwise"
        part = _needed(stored(in_heads(tensor, form), columnwise=along_tokens), tensor, direction)
        return Heads(part.dequantized(), part.scales.new_ones(1, dtype=torch.float32))
    raise ReferenceBackendError(f"FP8 attention takes per-tensor FP8 and MXFP8, not a {type(tensor).__name__}.")


def unwritten_gradients(
    layout: int, shapes: Sequence[Sequence[int]], dtype: torch.dtype, device: torch.device
) -> list[torch.Tensor]:
    """dQ, dK and dV, unwritten: views of one buffer where the layout packs them (bs3hd all three, bshd_bs2hd dK and
    dV).

    Transformer Engine's Python puts packed gradients together again by their addresses, without a copy.
    """
    gradients: list[torch.Tensor] = []
    for part in _parts(layout):
        shape = list(shapes[len(gradients)])
        packed = next(((place, int(mark)) for place, mark in enumerate(part) if mark.isdigit()), None)
        if packed is None:
            gradients.append(torch.empty(shape, dtype=dtype, device=device))
        else:
            place, count = packed
            buffer = torch.empty([*shape[:place], count, *shape[place:]], dtype=dtype, device=device)
            gradients += buffer.unbind(place)
    return gradients


def _parts(layout: int) -> list[str]:
    return NVTE_QKV_Layout(layout).name.removeprefix("NVTE_").split("_")


def _needed(part: Stored | None, tensor: Any, direction: str) -> Stored:
    if part is None:
        raise ReferenceBackendError(f"The {type(tensor).__name__} given to FP8 attention has no {direction} data.")
    return part
