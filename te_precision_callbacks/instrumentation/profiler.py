"""Runs torch.profiler for a while, and yields to a profiler of the user's own.

A process has one profiler at a time. If a second one starts, torch hands it the events of the first, and an export of
the first then ends the process (torch 2.13). So while the session's profiler runs, the start of another one is noticed,
and the session's is given up before. Read from torch 2.13: ``torch.autograd.profiler.profile._prepare_trace`` and
``_start_trace``, which each profiler of torch calls, and ``torch.autograd.profiler._is_profiler_enabled``.
"""

from __future__ import annotations

import ctypes
import functools
import gzip
import os
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.base.replaced import Replaced

_INCOMPLETE = ".incomplete.json.gz"


def profiler_runs() -> bool:
    """Whether any profiler of torch collects events now."""
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


class StepProfiler:
    """A profiler of torch for some iterations, with the shapes of operators.

    Attributes:
        runs: whether it collects events.
        given_up: whether another profiler has started meanwhile: nothing was kept.
    """

    def __init__(self) -> None:
        self.runs = False
        self.given_up = False
        self._profile: Any = None
        self._seams = Replaced(yields=True)

    def warm_up(self) -> bool:
        """Begin to collect events that are not kept: the first ones of a profiler are slower.

        Returns:
            False if a profiler of the user's own runs: nothing was begun.
        """
        if profiler_runs():
            return False
        activities = [torch.profiler.ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profile = torch.profiler.profile(activities=activities, record_shapes=True)
        self._profile.prepare_trace()
        engine: Any = torch.autograd.profiler.profile
        for name in ("_prepare_trace", "_start_trace"):
            self._seams.replace(engine, name, self._around(getattr(engine, name)))
        return True

    def start(self) -> bool:
        """Begin to keep events, of :meth:`warm_up` or without it.

        Returns:
            As :meth:`warm_up`; also False if another profiler has started since.
        """
        if self._profile is None and (self.given_up or not self.warm_up()):
            return False
        self._profile.start_trace()
        self.runs = True
        return True

    def stop(self) -> Any:
        """Collect no more.

        Returns:
            The profile, for :func:`export`; None if there is none.
        """
        self._seams.put_back()
        profile, self._profile = self._profile, None
        runs, self.runs = self.runs, False
        if profile is None:
            return None
        if not runs:  # a profiler that has only warmed up ends as a short one
            profile.start_trace()
        profile.stop_trace()
        return profile if runs else None

    def _around(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def begins(profiler: Any, *arguments: Any, **keywords: Any) -> Any:
            own = getattr(self._profile, "profiler", None)
            if own is not None and profiler is not own:
                self.given_up = True
                if not self.runs:  # what has only been warmed up is the other one's from now on
                    self._profile = None
                _keep_for_ever(self.stop())
            return upstream(profiler, *arguments, **keywords)

        return begins


def _keep_for_ever(profile: Any) -> None:
    """Keep a profile that was given up, also at the end of the process: to free it ends the process (torch 2.13)."""
    for kept in (profile, getattr(getattr(profile, "profiler", None), "kineto_results", None)):
        if kept is not None:
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))


def export(profile: Any, path: Path) -> None:
    """Write a profile, whole or not at all.

    Raises:
        OSError: it cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}{_INCOMPLETE}")
    plain = beside.with_suffix("")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profile.export_chrome_trace(str(plain))
        # torch itself would pack line by line, which takes eight times as long.
        with open(plain, "rb") as lines, gzip.open(beside, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(lines, packed, 1 << 20)
        os.replace(beside, path)
    finally:
        plain.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)
