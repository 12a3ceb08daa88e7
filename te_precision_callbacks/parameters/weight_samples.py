"""Samples of weights: a few fixed elements per weight, without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.numerics.layouts import NVFP4, PLAIN
from te_precision_callbacks.te.tensors import any_codes, is_quantized, read_stored, scaling_mode

ROWS = 32
ELEMENTS = 1024
"""Minimum number of sampled rows and elements of a larger weight; at most twice as many are sampled."""

PLAIN_ROUNDING = 2.0**-7
"""Relative error of a bfloat16 or float16 weight truncated from its master weight."""


class WeightMeasurement(NamedTuple):
    """A measurement of small tensors.

    Attributes:
        measure: takes stacks of the tensors; returns [rows], or [rows, numbers] for lists of numbers.
        row, column: the object, and the name of its attribute that gets the result.
    """

    measure: Callable[..., torch.Tensor]
    tensors: tuple[torch.Tensor, ...]
    row: object
    column: str


_Launched = tuple[Callable[[], list[Any]], list[WeightMeasurement]]


class DequantizedSample(NamedTuple):
    """Sampled elements of a weight: float32, [rows, columns].

    Attributes:
        allowed: the largest difference from a master weight by rounding; inf for a saturated element.
    """

    values: torch.Tensor
    allowed: torch.Tensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is torch.Tensor and not tensor.requires_grad:  # the usual gradient, without a call of torch
        return tensor
    part: torch.Tensor = tensor if type(tensor) is torch.nn.Parameter else getattr(tensor, "_local_tensor", tensor)
    return part.detach()


def is_narrow(weight: torch.Tensor) -> bool:
    """Return whether a weight has 16 bits or fewer: in bfloat16, float16 or quantized."""
    if weight.dtype in (torch.bfloat16, torch.float16):
        return True
    # The check of the class is cheaper for most weights.
    return type(weight) not in PLAIN and is_quantized(local_part(weight))


def raw_codes(weight: torch.Tensor) -> torch.Tensor:
    local = local_part(weight)
    return any_codes(local) if is_quantized(local) else local


def sampled_view(tensor: torch.Tensor, thin: int = 1) -> torch.Tensor:
    """Return a plain tensor's sampled elements, as a view if it is contiguous: [rows, columns].

    Args:
        thin: every how many sampled columns are returned.
    """
    return tensor.contiguous().as_strided(*_layout_of_sample(tensor.shape, thin))


@functools.lru_cache(maxsize=4096)
def _layout_of_sample(shape: torch.Size, thin: int) -> tuple[list[int], list[int]]:
    """Return shape and strides of a sample, so that one operation makes the view."""
    rows = shape[0] if len(shape) > 1 else 1
    columns = shape.numel() // rows
    row_step, column_step = _steps(rows, columns)
    column_step *= thin
    return [len(range(0, rows, row_step)), len(range(0, columns, column_step))], [row_step * columns, column_step]


def _steps(rows: int, columns: int) -> tuple[int, int]:
    row_step = max(1, rows // ROWS)
    return row_step, max(1, columns * len(range(0, rows, row_step)) // ELEMENTS)


def dequantized_sample(weight: torch.Tensor, span: range | None = None) -> DequantizedSample | None:
    """Return the sampled elements of a weight, dequantized; None if its layout does not allow that.

    Args:
        span: limits the sample to these positions in the flattened weight.
    """
    local: Any = local_part(weight)
    if not is_quantized(local):
        values = sampled_view(local if span is None else local.reshape(-1)[span.start : span.stop]).float()
        return DequantizedSample(values, 1.001 * PLAIN_ROUNDING * values.abs())
    part = read_stored(local, columnwise=False)
    if part is None or part.transposed:
        return None
    device = part.codes.device
    length = part.matrix_shape[1]
    if span is None:
        steps = zip(part.matrix_shape, _steps(*part.matrix_shape), strict=True)
        rows, columns = [torch.arange(0, size, step, device=device) for size, step in steps]
        rows = rows[:, None]
    else:
        positions = torch.arange(span.start, span.stop, _steps(1, len(span))[1], device=device)[None]
        rows = positions // length
        columns = positions % length
    if scaling_mode(local) == NVFP4:
        codes = (part.codes[rows, columns // 2] >> (columns % 2 * 4).to(torch.uint8)) & 0xF
    else:
        codes = part.codes[rows, columns]
    form = part.element_format
    factors = part.factors()
    elements = form.decode(codes)
    if factors.numel() > 1:
        factors = factors[rows // part.block[0], columns // part.block[1]]
    saturated = elements.abs() >= form.max  # the element may have been any value above the range
    half_unit = 2.0 ** (-form.mantissa_bits - 1)
    allowed = 1.001 * half_unit * (elements * factors).abs() + factors * form.min_normal * half_unit
    return DequantizedSample(elements * factors, torch.where(saturated, torch.inf, allowed))


class BatchedMeasurements:
    """Measurements of many small tensors, launched together by device and kind, and read in a later step.

    Attributes:
        waiting: the measurements for the next launch.
    """

    def __init__(self) -> None:
        self.waiting: list[WeightMeasurement] = []
        self._launched: list[_Launched] = []
        self._pending: list[_Launched] = []

    def launch(self) -> None:
        """Measure, and start copying the results to the host."""
        kinds = group_by_key(((waiting.measure, *map(_kind, waiting.tensors)), waiting) for waiting in self.waiting)
        self.waiting.clear()
        for members in kinds.values():
            stacks = map(torch.stack, zip(*[member.tensors for member in members], strict=True))
            self._launched.append((to_host(members[0].measure(*stacks)), members))

    def read(self) -> bool:
        """Set the columns that were launched before the last call, which then need not be waited for; return whether
        there are any."""
        ready = self._pending
        self._pending = self._launched
        self._launched = []
        for copy, members in ready:
            for member, result in zip(members, copy(), strict=True):
                setattr(member.row, member.column, result)
        return bool(ready)


def _kind(tensor: torch.Tensor) -> tuple[torch.device, torch.dtype, torch.Size]:
    return tensor.device, tensor.dtype, tensor.shape


def stack_equal(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Stack tensors of equal device, dtype and shape: yield their indices and the stack, [tensors, ...]."""
    kinds = group_by_key((_kind(tensor), index) for index, tensor in enumerate(tensors))
    for indices in kinds.values():
        yield indices, torch.stack([tensors[index] for index in indices])


def to_host(values: torch.Tensor) -> Callable[[], list[Any]]:
    """Start copying values to the host; return a function that waits for the copy and returns them."""
    event = None
    if values.device.type == "cuda":
        device = values.device
        values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.current_stream(device).record_event()

    def read() -> list[Any]:
        if event is not None:
            event.synchronize()
        return values.tolist()

    return read
