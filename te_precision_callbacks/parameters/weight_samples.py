"""Samples of weights: a few fixed elements per weight, without waiting for the device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import NVFP4, PLAIN
from te_precision_callbacks.te.tensors import any_codes, is_quantized, read_stored, scaling_mode

ROWS = 32
ELEMENTS = 1024
"""Minimum number of sampled rows and elements of a larger weight; at most twice as many are sampled."""

PLAIN_ROUNDING = 2.0**-7
"""Relative error of a bfloat16 or float16 weight truncated from its master weight."""


Measure = Callable[..., torch.Tensor]
_Launched = tuple[Callable[[], list[Any]], list[tuple[object, str]]]


class WeightSample(NamedTuple):
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
    own = local_part(weight)
    return any_codes(own) if is_quantized(own) else own


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


def sample(weight: torch.Tensor, span: range | None = None) -> WeightSample | None:
    """Return the sampled elements of a weight, dequantized; None if its layout does not allow that.

    Args:
        span: limits the sample to these positions in the flattened weight.
    """
    own: Any = local_part(weight)
    if not is_quantized(own):
        values = sampled_view(own if span is None else own.reshape(-1)[span.start : span.stop]).float()
        return WeightSample(values, 1.001 * PLAIN_ROUNDING * values.abs())
    part = read_stored(own, columnwise=False)
    if part is None or part.transposed:
        return None
    device = part.codes.device
    length = part.matrix_shape[1]
    if span is None:
        steps = zip(part.matrix_shape, _steps(*part.matrix_shape), strict=True)
        rows, columns = [torch.arange(0, size, step, device=device) for size, step in steps]
        rows = rows[:, None]
    else:
        places = torch.arange(span.start, span.stop, _steps(1, len(span))[1], device=device)[None]
        rows = places // length
        columns = places % length
    if scaling_mode(own) == NVFP4:
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
    return WeightSample(elements * factors, torch.where(saturated, torch.inf, allowed))


class BatchedMeasurements:
    """Measurements of many small tensors, launched together by device and kind, and read in a later step."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Measure, list[tuple[tuple[torch.Tensor, ...], object, str]]]] = {}
        self._launched: list[_Launched] = []
        self._pending: list[_Launched] = []

    def add(self, measure: Measure, tensors: tuple[torch.Tensor, ...], row: object, column: str) -> None:
        """Add a measurement.

        Args:
            measure: takes stacks of the tensors; returns [rows], or [rows, numbers] for lists of numbers.
            row, column: the object, and the name of its attribute that gets the result.
        """
        kinds = [(tensor.device, tensor.dtype, tensor.shape) for tensor in tensors]
        self._waiting.setdefault((measure, *kinds), (measure, []))[1].append((tensors, row, column))

    def launch(self) -> None:
        """Measure, and start copying the results to the host."""
        waiting = self._waiting
        self._waiting = {}
        for measure, members in waiting.values():
            stacks = [torch.stack(column) for column in zip(*(tensors for tensors, _, _ in members), strict=True)]
            self._launched.append((to_host(measure(*stacks)), [(row, column) for _, row, column in members]))

    def read(self) -> bool:
        """Set the columns that were launched before the last call, which then need not be waited for; return whether
        there are any."""
        ready = self._pending
        self._pending = self._launched
        self._launched = []
        for copy, targets in ready:
            for (row, column), result in zip(targets, copy(), strict=True):
                setattr(row, column, result)
        return bool(ready)


def stack_equal(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Stack tensors of equal device, dtype and shape: yield their indices and the stack, [tensors, ...]."""
    places: dict[Hashable, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype, tensor.shape), []).append(place)
    for group in places.values():
        yield group, torch.stack([tensors[place] for place in group])


def copy_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copy tensors, with an operation for each device, dtype and shape."""
    copies = list(tensors)
    for places, stack in stack_equal(tensors):
        for place, copy in zip(places, stack.unbind(), strict=True):
            copies[place] = copy
    return copies


def to_host(values: torch.Tensor) -> Callable[[], list[Any]]:
    """Start copying values to the host; return a function that waits for the copy and returns them."""
    event = None
    if values.device.type == "cuda":
        device = values.device
        values = torch.empty_like(values, device="cpu", pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.current_stream(device).record_event()

    def read() -> list[Any]:
        if event is not None and not event.query():
            event.synchronize()
        return values.tolist()

    return read
