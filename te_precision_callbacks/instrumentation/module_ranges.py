"""torch.profiler ranges around the forwards of all modules while a profile is recorded."""

from __future__ import annotations

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
            hook = _Hook(name)
            self._handles += [
                module.register_forward_pre_hook(hook.enter, prepend=True),
                module.register_forward_hook(hook.leave, always_call=True),
            ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class _Open(threading.local):
    def __init__(self) -> None:
        self.ranges: list[tuple[_Hook, record_function]] = []


class _Hook:
    """Hooks of one module; no-ops in a copy of it."""

    _open = _Open()

    def __init__(self, name: str) -> None:
        self._name = layer_range(name) if name else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ("",)

    @outside_of_dynamo
    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        if not self._name:
            return
        around = record_function(self._name)
        around.__enter__()  # type: ignore[no-untyped-call]
        self._open.ranges.append((self, around))

    @outside_of_dynamo
    def leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        ranges = self._open.ranges
        if any(hook is self for hook, _ in ranges):  # an exception in another hook left inner ranges open
            while ranges:
                hook, around = ranges.pop()
                around.__exit__(None, None, None)
                if hook is self:
                    return
