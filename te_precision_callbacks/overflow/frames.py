"""Frames: tensors of a model's forwards and backwards, with their extremes.

extremes = measure(tensor)                                          # nothing waits for the device
read([extremes])                                                    # one copy to the host per device
extremes.low, extremes.high
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.devices import current_stream, follow, is_capturing
from te_precision_callbacks.te.tensors import has_scale

_DEEPEST = 8

_WITHOUT_TENSORS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device})


@dataclasses.dataclass(slots=True, eq=False)
class Extremes:
    """The extremes of a tensor.

    Attributes:
        on_device: low, high and perhaps least, of the tensor's dtype; empty after :func:`read`.
        low, high: the smallest and the largest element, both nan if there is a nan; 0 before :func:`read`.
        least: the smallest magnitude, if it was measured.
        unknown: why there are none, in one word for the report; empty if there are.
    """

    on_device: tuple[torch.Tensor, ...] = ()
    stream: torch.cuda.Stream | None = None
    unknown: str = ""
    low: float = 0.0
    high: float = 0.0
    least: float = 0.0

    @property
    def kind(self) -> str:
        """``nans`` or ``infs``; empty if all elements are finite."""
        if math.isnan(self.high):
            return "nans"
        return "infs" if math.isinf(self.low) or math.isinf(self.high) else ""

    def format(self, number: float) -> str:
        return self.unknown or f"{number:.2e}"


class WatchedModule(NamedTuple):
    """The names of a watched module, without a reference to it; the calls of the root count batches."""

    path: str
    class_name: str
    is_root: bool


NO_MODULE = WatchedModule("", "", is_root=False)


class Frame(NamedTuple):
    """A line of a report.

    Attributes:
        sign: ``>`` for an input of a module's forward or backward, ``<`` for an output, ``=`` for a parameter or label.
        module: :data:`NO_MODULE` for a label.
        inputs: the inputs of the call, if this is its output or a parameter.
    """

    kind: Literal["forward", "gradient", "label"]
    sign: str
    module: WatchedModule
    role: str
    batch: int
    extremes: Extremes
    inputs: Sequence[Frame] = ()


def measure(tensor: torch.Tensor, *, abs_min: bool) -> Extremes:
    """Measure the extremes of any tensor on its device.

    ``aminmax`` keeps inf, and a nan makes both extremes nan.
    """
    try:
        values = _readable(tensor)
        if not values.numel():
            return Extremes(unknown="empty")
        if values.is_meta:
            return Extremes(unknown="meta")
        if is_capturing():
            return Extremes(unknown="captured")
        numbers = torch.aminmax(values)
        numbers[0].data_ptr()  # raises for a tensor of a transform (vmap), which ends with it
        least = ((values if values.dtype is torch.bool else values.abs()).amin(),) if abs_min else ()
    except (RuntimeError, TypeError):  # a tensor class or a transform without this operation
        return Extremes(unknown="unknown")
    return Extremes((*numbers, *least), current_stream(values.device))


def _readable(tensor: torch.Tensor) -> torch.Tensor:
    """Return the elements as a plain tensor of a dtype that ``aminmax`` has; of a DTensor, this rank's part."""
    tensor = tensor.detach()
    if hasattr(tensor, "to_local"):
        tensor = tensor.to_local()
    if tensor.layout is not torch.strided:
        tensor = tensor._values() if tensor.layout is torch.sparse_coo else tensor.values()
    if tensor.is_quantized or has_scale(tensor):
        tensor = tensor.dequantize()
    if tensor.is_complex():
        return tensor.abs()
    is_float8 = tensor.is_floating_point() and tensor.itemsize == 1
    is_unsigned = not tensor.is_signed() and tensor.itemsize > 1
    return tensor.float() if is_float8 or is_unsigned else tensor


def read(measured: Iterable[Extremes]) -> None:
    """Copy extremes to the host, all in one copy per device."""
    pending = [extremes for extremes in set(measured) if extremes.on_device]
    for device, on_one_device in group_by_key((extremes.on_device[0].device, extremes) for extremes in pending).items():
        groups = group_by_key((extremes.on_device[0].dtype, extremes) for extremes in on_one_device).values()
        for stream in {extremes.stream for extremes in on_one_device}:
            follow(stream, ())  # the numbers live until the host has them
        wide = torch.float32 if device.type == "mps" else torch.float64
        with torch.no_grad():
            numbers = [[number for extremes in group for number in extremes.on_device] for group in groups]
            vector = torch.cat([torch.stack(same_dtype).to(wide) for same_dtype in numbers])
            rows = to_host(vector.view(len(on_one_device), -1))
        for extremes, row in zip(itertools.chain.from_iterable(groups), rows, strict=True):
            extremes.low, extremes.high, extremes.least = (*row, 0.0)[:3]
            extremes.on_device = ()


def to_host(rows: torch.Tensor) -> list[list[float]]:
    copied: list[list[float]] = rows.tolist()
    return copied


def tensors_in(value: Any, role: str, depth: int = 0) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield each tensor with its role: the role of ``value``, and the index, key or field in brackets.

    The maximum depth is 8; objects of other classes, such as key-value caches, are not searched.
    """
    if isinstance(value, torch.Tensor):
        yield role, value
    elif type(value) not in _WITHOUT_TENSORS and depth < _DEEPEST:
        try:
            items = [*_items(value)]
        except Exception:  # user code, such as a mapping with computed items
            return
        for key, item in items:
            yield from tensors_in(item, f"{role}[{key}]", depth + 1)


def _items(value: Any) -> Iterable[tuple[Any, Any]]:
    if isinstance(value, (tuple, list)):
        return enumerate(value)
    if isinstance(value, Mapping):  # including ModelOutput of transformers
        return value.items()
    if dataclasses.is_dataclass(value):
        return [(field.name, getattr(value, field.name, None)) for field in dataclasses.fields(value)]
    return ()
