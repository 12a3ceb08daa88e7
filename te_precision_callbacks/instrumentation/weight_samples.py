"""Samples of weights: a few fixed elements of each. Nothing waits for the device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import NVFP4, is_quantized, scaling_mode, stored

ROWS, ELEMENTS = 32, 1024
"""The minimum rows and elements sampled of a larger weight; the maximum is twice as many."""

PLAIN_ROUNDING = 2.0**-7
"""The relative error of a weight in bfloat16 or float16 truncated from its master weight."""


class WeightSample(NamedTuple):
    """Sampled elements of a weight.

    Attributes:
        values: float32 or the weight's own type, [elements].
        relative: the largest relative rounding error of the weight's format.
        absolute: the rounding error near 0; float32, [elements] or a number.
    """

    values: torch.Tensor
    relative: float
    absolute: torch.Tensor | float = 0.0


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor."""
    part: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return part.detach()


def raw(weight: torch.Tensor) -> torch.Tensor:
    """Return the elements of a weight, or the codes of a quantized weight."""
    own: Any = local(weight)
    if is_quantized(own):
        names = ("_data", "_rowwise_data", "_transpose", "_columnwise_data")
        own = next(codes for name in names if (codes := getattr(own, name, None)) is not None)
    return own  # type: ignore[no-any-return]


def pick(tensor: torch.Tensor) -> torch.Tensor:
    """Copy the sampled elements of a plain tensor: [elements]."""
    matrix = tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    return matrix[_grid(*matrix.shape)].reshape(-1).clone()


def _grid(rows: int, columns: int) -> tuple[slice, slice]:
    each_row = max(1, rows // ROWS)
    each_column = max(1, columns * len(range(0, rows, each_row)) // ELEMENTS)
    return slice(None, None, each_row), slice(None, None, each_column)


def sample(weight: torch.Tensor) -> WeightSample | None:
    """Return the sampled elements of a weight, dequantized; None if its layout does not allow that."""
    own: Any = local(weight)
    if not is_quantized(own):
        return WeightSample(pick(own), PLAIN_ROUNDING)
    part = stored(own, columnwise=False)
    if part is None or part.transposed:
        return None
    rows, columns = _grid(*part.matrix_shape)
    height, width = part.block
    if scaling_mode(own) == NVFP4:
        elements = part.elements(rows)[:, columns]
    else:
        elements = part.element_format.decode(part.codes[rows, columns].contiguous())
    factors = part.factors()
    if factors.numel() > 1:
        places = [
            torch.arange(size, device=factors.device)[chosen] // block
            for size, chosen, block in zip(part.matrix_shape, (rows, columns), (height, width), strict=True)
        ]
        factors = factors[places[0][:, None], places[1]]
    form = part.element_format
    least = factors * (form.min_normal * 2.0 ** (-form.mantissa_bits - 1))
    saturated = elements.abs() >= form.max  # what was above the range may be any number
    least = torch.where(saturated, torch.inf, least)
    values = (elements * factors).reshape(-1)
    return WeightSample(values, 2.0 ** (-form.mantissa_bits - 1), least.expand_as(elements).reshape(-1))


def means(rows: Sequence[torch.Tensor]) -> Callable[[], list[float]]:
    """Start copying the mean of each tensor to the host, with one copy from each device.

    Returns:
        A function that returns the means. It waits for the copies, which have ended if it is called a step later.
    """
    places: dict[torch.device, list[int]] = {}
    for place, row in enumerate(rows):
        places.setdefault(row.device, []).append(place)
    copies: list[tuple[list[int], torch.Tensor, torch.cuda.Event | None]] = []
    for device, on in places.items():
        copy, event = segments([rows[place] for place in on], "mean", torch.float32), None
        if device.type == "cuda":
            copy = torch.empty(len(on), pin_memory=True).copy_(copy, non_blocking=True)
            event = torch.cuda.current_stream(device).record_event()
        copies.append((on, copy, event))

    def read() -> list[float]:
        values = [0.0] * len(rows)
        for on, copy, event in copies:
            if event is not None and not event.query():  # type: ignore[no-untyped-call]
                event.synchronize()
            for place, value in zip(on, copy.tolist(), strict=True):
                values[place] = value
        return values

    return read


def segments(rows: Sequence[torch.Tensor], reduce: str, dtype: torch.dtype) -> torch.Tensor:
    """Reduce each tensor to a number: [tensors]. All tensors are on one device."""
    lengths = torch.tensor([row.numel() for row in rows]).to(rows[0].device, non_blocking=True)
    flat = torch.cat([row.reshape(-1).to(dtype) for row in rows])
    return torch.segment_reduce(flat, reduce, lengths=lengths, unsafe=True)
