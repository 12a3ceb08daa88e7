"""Samples of weights: a few fixed elements per weight, without waiting for the device."""

from __future__ import annotations

import functools
import itertools
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


class WeightSample(NamedTuple):
    """Sampled elements of a weight.

    Attributes:
        values: float32 or the weight's own type, [rows, columns].
        relative: largest relative rounding error of the weight's format.
        absolute: float32, [rows, columns]: the rounding error of a quantized weight near 0, or inf for a saturated
            element. None for other weights.
    """

    values: torch.Tensor
    relative: float
    absolute: torch.Tensor | None = None

    def with_tensors(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.values, *tensors) if self.absolute is None else (self.values, *tensors, self.absolute)


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
    """Return a plain tensor's sampled elements, as a view if strides allow: [rows, columns].

    Args:
        thin: every how many sampled columns are returned.
    """
    layout = _layout_of_sample(tensor.shape, tensor.stride(), thin)
    if layout is None:
        return _sampled_elements(tensor, thin)
    return tensor.as_strided(*layout)


@functools.lru_cache(maxsize=4096)
def _layout_of_sample(
    shape: torch.Size, stride: tuple[int, ...], thin: int
) -> tuple[torch.Size, tuple[int, ...]] | None:
    """Return shape and stride of a sample, so that one operation makes the view; None if strides do not allow that."""
    tensor = torch.empty_strided(shape, stride, device="meta")
    elements = _sampled_elements(tensor, thin)
    if elements._base is tensor:
        return (elements.shape, elements.stride())
    return None


def _sampled_elements(tensor: torch.Tensor, thin: int) -> torch.Tensor:
    matrix = tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.reshape(1, -1)
    return matrix[_grid(*matrix.shape)][:, ::thin]


def _grid(rows: int, columns: int) -> tuple[slice, slice]:
    row_step = max(1, rows // ROWS)
    column_step = max(1, columns * len(range(0, rows, row_step)) // ELEMENTS)
    return slice(None, None, row_step), slice(None, None, column_step)


def sample(weight: torch.Tensor, span: range | None = None) -> WeightSample | None:
    """Return the sampled elements of a weight, dequantized; None if its layout does not allow that.

    Args:
        span: limits the sample to these positions in the flattened weight.
    """
    own: Any = local_part(weight)
    if not is_quantized(own):
        return WeightSample(
            sampled_view(own if span is None else own.reshape(-1)[span.start : span.stop]), PLAIN_ROUNDING
        )
    part = read_stored(own, columnwise=False)
    if part is None or part.transposed:
        return None
    device = part.codes.device
    length = part.matrix_shape[1]
    if span is None:
        rows, columns = (
            torch.arange(size, device=device)[chosen]
            for size, chosen in zip(part.matrix_shape, _grid(*part.matrix_shape), strict=True)
        )
        rows = rows[:, None]
    else:
        places = torch.arange(span.start, span.stop, device=device)[None, _grid(1, len(span))[1]]
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
    least = factors * (form.min_normal * 2.0 ** (-form.mantissa_bits - 1))
    saturated = elements.abs() >= form.max  # the element may have been any value above the range
    absolute = torch.where(saturated, torch.inf, least)
    return WeightSample(elements * factors, 2.0 ** (-form.mantissa_bits - 1), absolute)


class BatchedMeasurements:
    """Measurements of many small tensors, launched together by device and kind, and read in a later step."""

    def __init__(self) -> None:
        self._waiting: dict[Hashable, tuple[Measure, list[tuple[tuple[torch.Tensor, ...], object, str]]]] = {}
        self._launched: list[tuple[torch.Tensor, list[tuple[object, str]]]] = []

    def add(self, key: Hashable, measure: Measure, tensors: tuple[torch.Tensor, ...], row: object, column: str) -> None:
        """Add a measurement.

        Args:
            key: equal for equal measurements, which are stacked.
            measure: takes stacks of the tensors; returns [rows], or [rows, numbers] for a tuple of numbers.
            row, column: the object, and the name of its attribute that gets the result.
        """
        kinds = [(tensor.device, tensor.dtype, tensor.shape) for tensor in tensors]
        self._waiting.setdefault((key, *kinds), (measure, []))[1].append((tensors, row, column))

    def launch(self) -> None:
        waiting = self._waiting
        self._waiting = {}
        for measure, members in waiting.values():
            stacks = [torch.stack(column) for column in zip(*(tensors for tensors, _, _ in members), strict=True)]
            self._launched.append((measure(*stacks).float(), [(row, column) for _, row, column in members]))

    def start_copy(self) -> Callable[[], None] | None:
        """Start copying the results to the host.

        Returns:
            A function that waits for the copies and sets the columns of the rows, or None without results. Called a
            step later, it does not have to wait.
        """
        if not self._launched:
            return None
        by_device: dict[torch.device, list[tuple[torch.Tensor, list[tuple[object, str]]]]] = {}
        for numbers, targets in self._launched:
            by_device.setdefault(numbers.device, []).append((numbers, targets))
        self._launched = []
        copies = [
            (to_host(torch.cat([numbers.flatten() for numbers, _ in of_device])), of_device)
            for of_device in by_device.values()
        ]

        def read() -> None:
            for copy, of_device in copies:
                values = iter(copy())
                for numbers, targets in of_device:
                    for row, column in targets:
                        if numbers.dim() == 1:
                            setattr(row, column, next(values))
                        else:
                            setattr(row, column, tuple(itertools.islice(values, numbers.shape[1])))

        return read


def exceeds_rounding(
    relative: float, values: torch.Tensor, master: torch.Tensor, absolute: torch.Tensor | None = None
) -> torch.Tensor:
    """Return a bool tensor, true where a sample differs from its master weight by more than the format's rounding."""
    values = values.float()
    allowed = 1.001 * relative * values.abs()
    return (values - master).abs() > (allowed if absolute is None else allowed + absolute)


def stack_equal(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Stack tensors of equal device, dtype and shape: yield their indices and the stack, [tensors, ...]."""
    places: dict[Hashable, list[int]] = {}
    for place, tensor in enumerate(tensors):
        places.setdefault((tensor.device, tensor.dtype, tensor.shape), []).append(place)
    for group in places.values():
        yield group, torch.stack([tensors[place] for place in group])


def largest_of_each(tensors: Sequence[torch.Tensor]) -> Iterator[tuple[list[int], torch.Tensor]]:
    """Yield the indices of dense tensors with elements, and their largest absolute values, which are inf or nan if an
    element is; those of other devices and dtypes apart. The loop calls no function for a tensor."""
    places: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(tensors):
        kind = tensor.device, tensor.dtype
        if kind in places:
            places[kind] += (place,)
        else:
            places[kind] = [place]
    for (device, dtype), group in places.items():
        group = [place for place in group if tensors[place].layout is torch.strided and tensors[place].nbytes]
        if group and dtype.is_floating_point:
            dense = [tensors[place] for place in group]
            if device.type != "cpu":
                yield group, torch.stack(torch._foreach_norm(dense, float("inf")))
            else:  # the norm takes ten times as long there
                extremes = torch.stack([*itertools.chain.from_iterable(map(torch.aminmax, dense))])
                yield group, extremes.abs_().view(-1, 2).amax(1)


def copy_all(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    result = list(tensors)
    for places, stack in stack_equal(tensors):
        for place, copy in zip(places, stack, strict=True):
            result[place] = copy
    return result


def to_host(values: torch.Tensor) -> Callable[[], list[float]]:
    """Start copying float32 values to the host; return a function that waits for the copy and returns them."""
    event = None
    if values.device.type == "cuda":
        device = values.device
        values = torch.empty(len(values), pin_memory=True).copy_(values, non_blocking=True)
        event = torch.cuda.current_stream(device).record_event()

    def read() -> list[float]:
        if event is not None and not event.query():
            event.synchronize()
        return values.tolist()

    return read
