"""Ranges of torch.profiler around the forwards of all modules of a model, for as long as a profile is due."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.speed.trace.range_names import LayerRange


class ModuleRanges:
    """Puts a range with the name of the module around each forward, and takes the hooks away again."""

    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def put(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        """Put ranges around the forwards of modules, by name; instead of those that were put before."""
        self.remove()
        for name, module in modules:
            hook = _Hook(name)
            self._handles += [
                module.register_forward_pre_hook(hook.enter, prepend=True),
                module.register_forward_hook(hook.leave, always_call=True),
            ]

    def remove(self) -> None:
        """Take the ranges away."""
        while self._handles:
            self._handles.pop().remove()


class _Open(threading.local):
    """The ranges of a thread that have not ended."""

    def __init__(self) -> None:
        self.ranges: list[tuple[_Hook, record_function]] = []


class _Hook:
    """The hooks of one module; a copy of the module has the hooks of a copy, which do nothing."""

    _open = _Open()

    def __init__(self, name: str) -> None:
        self._name = LayerRange(name).name if name else ""

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, ("",)

    @outside_of_dynamo
    def enter(self, module: torch.nn.Module, inputs: Any) -> None:
        """Before a forward."""
        if not self._name:
            return
        around = record_function(self._name)
        around.__enter__()  # type: ignore[no-untyped-call]
        self._open.ranges.append((self, around))

    @outside_of_dynamo
    def leave(self, module: torch.nn.Module, inputs: Any, output: Any) -> None:
        """After a forward, also after one that has failed."""
        ranges = self._open.ranges
        if any(hook is self for hook, _ in ranges):  # those above it were left by an exception of another hook
            while ranges:
                hook, around = ranges.pop()
                around.__exit__(None, None, None)
                if hook is self:
                    return
