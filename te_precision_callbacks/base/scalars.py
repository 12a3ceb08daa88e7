"""Scalars, copied to the host at the end of a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.devices import current_stream, follow
from te_precision_callbacks.base.failures import ObservationFailures


class ScalarBuffer:
    """Scalars that users' features and the session's checks logged since the last step, on any device."""

    def __init__(self, failures: ObservationFailures) -> None:
        self.entries: list[tuple[str, Any]] = []
        self._on_streams: dict[torch.cuda.Stream | None, list[torch.Tensor]] = {}
        self._failures = failures

    def add(self, name: str, value: Any) -> None:
        if isinstance(value, torch.Tensor) and value.numel() == 1:
            self.entries.append((name, value))
            self._on_streams.setdefault(current_stream(value.device), []).append(value)
            return
        try:
            self.entries.append((name, float(value)))
        except (TypeError, ValueError, RuntimeError):
            what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
            self._failures.report("taking", f"the scalar {name!r}", TypeError(f"it must be one number, not {what}"))

    def read(self) -> list[float]:
        """Return the values as float64, with one copy per device, after the work of its streams."""
        for stream, tensors in self._on_streams.items():
            follow(stream, tensors)
        return to_floats([value for _, value in self.entries])

    def clear(self) -> None:
        self.entries = []
        self._on_streams = {}


def is_scalar(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return value.numel() == 1 and not value.is_complex()
    return isinstance(value, (int, float)) or getattr(value, "shape", None) == ()


def is_on_host(value: object) -> bool:
    return not isinstance(value, torch.Tensor) or value.device.type == "cpu"


def to_floats(values: Sequence[Any]) -> list[float]:
    """Convert numbers and one-element tensors to float64, with one copy per device."""
    floats = [math.nan] * len(values)
    by_device: dict[torch.device, list[tuple[int, torch.Tensor]]] = {}
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            by_device.setdefault(value.device, []).append((index, value))
        else:
            floats[index] = float(value)
    for entries in by_device.values():
        stacked = torch.stack([tensor.detach().reshape(()).to(torch.float64) for _, tensor in entries])
        for (index, _), number in zip(entries, stacked.tolist(), strict=True):
            floats[index] = number
    return floats
