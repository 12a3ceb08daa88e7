"""Waits of the host that statistics add to a training step, on the fused path and on the debug path.

A step without a session comes first. Forward and backward must not wait for computations of a session: a wait is this
project's if its own code is on the stack, see ``waits.py``. The end of the step, ``session.step()``, waits once, for
the copy of all values.
"""

from __future__ import annotations

import functools

import torch
from step import Run, with_ours, without

from gpu_parts.rows import Rows, Settings
from gpu_parts.training import PATHS, Training
from gpu_parts.waits import HostWaits, host_waits

_WARM_UP = 3


def counted(training: Training, way: Run, settings: Settings) -> tuple[HostWaits, HostWaits]:
    """Count in forward and backward, and in the rest of a step after the first ones, which set things up."""
    with way() as end:
        for _ in range(_WARM_UP):
            training.step(end)
        with host_waits(settings.device) as before:
            training.forward_and_backward()
        with host_waits(settings.device) as after:
            training.finish(end)
        return before, after


def check(settings: Settings, rows: Rows) -> None:
    layers, hidden, sequence = (4, 1024, 512) if settings.on_gpu else (1, 64, 32)
    training = Training(settings, layers=layers, hidden=hidden, sequence=sequence, batch=2)
    ways: dict[str, Run] = {"without": without}
    for path in PATHS:
        ways[path] = functools.partial(with_ours, training.model, PATHS[path](fp8=False), path)
    results = {name: counted(training, way, settings) for name, way in ways.items()}
    alone, _ = results["without"]
    note = f"{layers} layers, hidden {hidden}; {settings.backend_note}".removesuffix("; ")
    for name, (before, after) in results.items():
        waits = f"{name}: host waits in forward and backward"
        if name == "fused":  # the layers' own path
            rows.equal(waits, before.total, alone.total, note=note)
        else:
            rows.measured(waits, before.total, note=note)
        rows.measured(f"{name}: host waits in the end of the step", after.total, note=note)
        if name == "without":
            continue
        rows.equal(f"{name}: host waits of ours in forward and backward", before.ours, 0, note=before.where)
        of_end = f"{name}: host waits of ours in the end of the step"
        rows.equal_on_gpu(of_end, after.ours, 1, settings, note=after.where)
    as_errors = "fused: forward and backward where waits are errors"
    if not settings.on_gpu:
        rows.left_out(as_errors, "needs a GPU")
    elif alone.total:
        rows.left_out(as_errors, f"the step alone waits {alone.total} times")
    else:
        with rows.of(as_errors), ways["fused"]() as end:
            for _ in range(_WARM_UP):
                training.step(end)
            torch.cuda.set_sync_debug_mode("error")
            try:
                training.forward_and_backward()
            finally:
                torch.cuda.set_sync_debug_mode("default")
            rows.equal(as_errors, "ran", "ran")
