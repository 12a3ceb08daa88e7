"""torch.profiler ranges around the forwards of all modules while a profile is recorded."""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.speed.trace.range_names import layer_range


class ModuleRanges:
    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def put(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        self.remove()
        for name, module in modules:
            self._handles += [
                module.register_forward_pre_hook(functools.partial(_enter, layer_range(name)), prepend=True),
                module.register_forward_hook(_leave, always_call=True),
            ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class _Open(threading.local):
    """A thread's open ranges, each with its module."""

    def __init__(self) -> None:
        self.ranges: list[tuple[torch.nn.Module, record_function]] = []


_open = _Open()


@outside_of_dynamo
def _enter(name: str, module: torch.nn.Module, inputs: Any) -> None:
    around = record_function(name)
    around.__enter__()  # type: ignore[no-untyped-call]
    _open.ranges.append((module, around))


@outside_of_dynamo
def _leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
    ranges = _open.ranges
    if any(owner is module for owner, _ in ranges):  # an exception in another hook left inner ranges open
        while ranges:
            owner, around = ranges.pop()
            around.__exit__(None, None, None)
            if owner is module:
                return
