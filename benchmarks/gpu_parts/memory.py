"""The GPU memory that statistics add to the peak of a training step, on both paths.

On a CPU torch does not count memory: there the steps run, and nothing is told.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager

import torch

from gpu_parts.rows import Rows, Settings, run_part
from gpu_parts.training import EndOfStep, Training, statistics_of_all, watched, without
from te_precision_callbacks.base.vocabulary import Observe

PATHS: tuple[Observe, ...] = ("fused", "debug")
_STEPS = 3
_FUSED_MAY_ADD = 64 * 2**20
"""Bytes: partial results of a pass, the slots, and one result of a norm or activation function, computed once more."""

Way = Callable[[], AbstractContextManager[EndOfStep]]


def _peak(training: Training, way: Way, settings: Settings) -> int:
    """The most bytes that were allocated in steps after the first ones."""
    with way() as end:
        training.step(end)
        if settings.on_gpu:
            torch.cuda.synchronize(settings.device)
            torch.cuda.reset_peak_memory_stats(settings.device)
        for _ in range(_STEPS):
            training.step(end)
        return torch.cuda.max_memory_allocated(settings.device) if settings.on_gpu else 0


def check(settings: Settings, rows: Rows) -> None:
    layers, hidden, sequence = (1, 64, 32) if settings.small else (4, 2048, 1024)
    training = Training(settings, layers=layers, hidden=hidden, sequence=sequence, batch=2)
    note = f"{layers} layers, hidden {hidden}, {2 * sequence} tokens; {settings.backend_note}".removesuffix("; ")
    ways: dict[str, Way] = {
        f"{path}, {what}": functools.partial(watched, training.model, statistics_of_all(path, fp8=fp8), path)
        for path in PATHS
        for what, fp8 in (("of tensors", False), ("of tensors and FP8", True))
    }
    if not settings.on_gpu:
        ways = dict(list(ways.items())[:1])
    with rows.of("a step without"):
        alone = _peak(training, without, settings)
    for name, way in ways.items():
        with rows.of(name):
            added = _peak(training, way, settings) - alone
            if not settings.on_gpu:
                rows.measured(f"{name}: steps", _STEPS, note="memory is counted on a GPU alone")
            elif name == "fused, of tensors":
                rows.at_most(f"{name}: added to the peak", added, _FUSED_MAY_ADD, "bytes", note)
            else:
                rows.measured(f"{name}: added to the peak", added, "bytes", note)
    if settings.on_gpu:
        rows.measured("the peak without", alone, "bytes", note)


if __name__ == "__main__":
    run_part("memory", check)
