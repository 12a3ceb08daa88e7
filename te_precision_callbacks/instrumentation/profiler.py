"""Runs torch.profiler for some steps, with ranges around all modules' forwards, and yields to the user's profiler.

A process has one profiler. A second profiler takes the events of the first, and exporting the first then crashes the
process (torch 2.13). The session therefore stops its profiler before another one starts. Read from torch 2.13:
``_prepare_trace`` and ``_start_trace`` of ``torch.autograd.profiler.profile``, which each profiler calls, and
``torch.autograd.profiler._is_profiler_enabled``.
"""

from __future__ import annotations

import ctypes
import functools
import gzip
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch.autograd.profiler import record_function
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.replaced import Replacements
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import NamedTorchModule
from te_precision_callbacks.speed.trace.range_names import layer_range

_INCOMPLETE = ".incomplete.json.gz"


def profiler_runs() -> bool:
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


class StepProfiler:
    """A torch profiler with operator shapes.

    Attributes:
        given_up: whether another profiler's start discarded it.
    """

    def __init__(self) -> None:
        self.runs = False
        self.given_up = False
        self._profile: Any = None
        self._seams = Replacements(keeps_later=True)

    def warm_up(self) -> bool:
        """Start collecting events that are dropped, since the first are slow; return False if another profiler runs."""
        if profiler_runs():
            return False
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile.prepare_trace()
        engine: Any = torch.autograd.profiler.profile
        for name in ("_prepare_trace", "_start_trace"):
            self._seams.replace(engine, name, self._wrap(getattr(engine, name)))
        return True

    def start(self) -> bool:
        """Start recording, even without :meth:`warm_up`; return False if another profiler runs or has started since."""
        if self._profile is None and (self.given_up or not self.warm_up()):
            return False
        self._profile.start_trace()
        self.runs = True
        return True

    def stop(self) -> Any:
        """Stop, and return the profile for :func:`export`, if any."""
        self._seams.restore()
        profile = self._profile
        self._profile = None
        runs = self.runs
        self.runs = False
        if profile is None:
            return None
        if not runs:  # a profiler that only warmed up ends as a short one
            profile.start_trace()
        profile.stop_trace()
        if runs:
            return profile
        return None

    def _wrap(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def start_or_yield(profiler: Any, *arguments: Any, **keywords: Any) -> Any:
            own = getattr(self._profile, "profiler", None)
            if own is not None and profiler is not own:
                self.given_up = True
                if not self.runs:  # the other profiler takes over the warm-up
                    self._profile = None
                _leak(self.stop())
            return upstream(profiler, *arguments, **keywords)

        return start_or_yield


def _leak(profile: Any) -> None:
    # Freeing a discarded profile would end the process (torch 2.13).
    for kept in (profile, getattr(getattr(profile, "profiler", None), "kineto_results", None)):
        if kept is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def export(profile: Any, path: Path) -> None:
    """Write a profile atomically.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_INCOMPLETE}")
    plain = temporary.with_suffix("")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profile.export_chrome_trace(str(plain))
        # torch's own compression, line by line, takes eight times as long.
        with open(plain, "rb") as lines, gzip.open(temporary, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(lines, packed, 1 << 20)
        os.replace(temporary, path)
    finally:
        plain.unlink(missing_ok=True)
        temporary.unlink(missing_ok=True)


class ModuleRanges:
    def __init__(self) -> None:
        self._handles: list[RemovableHandle] = []

    def put(self, modules: Iterable[NamedTorchModule]) -> None:
        self.remove()
        for name, module in modules:
            self._handles += [
                module.register_forward_pre_hook(functools.partial(_enter, layer_range(name)), prepend=True),
                module.register_forward_hook(_leave, always_call=True),
            ]

    def remove(self) -> None:
        while self._handles:
            self._handles.pop().remove()


class _OpenRanges(threading.local):
    def __init__(self) -> None:
        self.ranges: list[tuple[torch.nn.Module, record_function]] = []


_open = _OpenRanges()


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
