"""Runs torch.profiler for some steps, and yields to the user's profiler.

A process has one profiler. A second one takes the first one's events, and exporting the first then ends the process
(torch 2.13). The session therefore stops its profiler before another one starts. Read from torch 2.13:
``_prepare_trace`` and ``_start_trace`` of ``torch.autograd.profiler.profile``, which each profiler calls, and
``torch.autograd.profiler._is_profiler_enabled``.
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
    return bool(torch._C._autograd._profiler_enabled() or torch.autograd.profiler._is_profiler_enabled)


class StepProfiler:
    """A torch profiler with the shapes of operators.

    Attributes:
        given_up: whether another profiler's start discarded it.
    """

    def __init__(self) -> None:
        self.runs = False
        self.given_up = False
        self._profile: Any = None
        self._seams = Replaced(yields=True)

    def warm_up(self) -> bool:
        """Start collecting events to drop, since the first are slow; return False if the user's profiler runs."""
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
        """Start recording, even without :meth:`warm_up`; return False if another profiler runs or has started since."""
        if self._profile is None and (self.given_up or not self.warm_up()):
            return False
        self._profile.start_trace()
        self.runs = True
        return True

    def stop(self) -> Any:
        """Stop, and return the profile for :func:`export`, if any."""
        self._seams.put_back()
        profile, self._profile = self._profile, None
        runs, self.runs = self.runs, False
        if profile is None:
            return None
        if not runs:  # a profiler that only warmed up ends as a short one
            profile.start_trace()
        profile.stop_trace()
        return profile if runs else None

    def _around(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def begins(profiler: Any, *arguments: Any, **keywords: Any) -> Any:
            own = getattr(self._profile, "profiler", None)
            if own is not None and profiler is not own:
                self.given_up = True
                if not self.runs:  # the other profiler takes over the warm-up
                    self._profile = None
                _keep_for_ever(self.stop())
            return upstream(profiler, *arguments, **keywords)

        return begins


def _keep_for_ever(profile: Any) -> None:
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
    beside = path.with_name(f".{path.name}.{os.getpid()}{_INCOMPLETE}")
    plain = beside.with_suffix("")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            profile.export_chrome_trace(str(plain))
        # torch's own compression, line by line, takes eight times as long.
        with open(plain, "rb") as lines, gzip.open(beside, "wb", compresslevel=6) as packed:
            shutil.copyfileobj(lines, packed, 1 << 20)
        os.replace(beside, path)
    finally:
        plain.unlink(missing_ok=True)
        beside.unlink(missing_ok=True)
