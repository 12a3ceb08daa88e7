"""Waits of the host that statistics add to a training step, on the fused path and on the debug path.

A step without a session comes first. Forward and backward must not wait for computations of a session: a wait is this
project's if its own code is on the stack, see ``waits.py``. The end of the step, ``session.step()``, waits once, for
the copy of all values.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from measuring import as_in_a_long_run
from step import Run, with_ours, without

from gpu_parts.rows import Rows, Settings, in_one_line
from gpu_parts.training import Training, statistics_of_all
from gpu_parts.waits import HostWaits
from te_precision_callbacks.base.vocabulary import Observe

PATHS: tuple[Observe, ...] = ("fused", "debug")

_WARM_UP = 3


class Counted(NamedTuple):
    """A step, taken apart.

    Attributes:
        before: waits in forward and backward.
        end: waits in the optimizer's step and what comes after.
    """

    before: HostWaits
    end: HostWaits


def counted(training: Training, way: Run, settings: Settings) -> Counted:
    """Count in the steps after the first ones, which set things up."""
    with way() as end:
        for _ in range(_WARM_UP):
            training.step(end)
        before, after = HostWaits(settings.device), HostWaits(settings.device)
        with before:
            training.forward_and_backward()
        with after:
            training.finish(end)
        return Counted(before, after)


def check(settings: Settings, rows: Rows) -> None:
    layers, hidden, sequence = (1, 64, 32) if not settings.on_gpu else (4, 1024, 512)
    training = Training(settings, layers=layers, hidden=hidden, sequence=sequence, batch=2)
    ways: dict[str, Run] = {"without": without}
    for path in PATHS:
        ways[path] = functools.partial(with_ours, training.model, statistics_of_all(path, fp8=False), path)
    with as_in_a_long_run():
        results = {name: counted(training, way, settings) for name, way in ways.items()}
    alone = results["without"]
    note = f"{layers} layers, hidden {hidden}; {settings.backend_note}".removesuffix("; ")
    for name, step in results.items():
        waits = f"{name}: host waits in forward and backward"
        if name == "fused":  # the layers' own path
            rows.equal(waits, step.before.total, alone.before.total, note=note)
        else:
            rows.measured(waits, step.before.total, note=note)
        rows.measured(f"{name}: host waits in the end of the step", step.end.total, note=note)
        if name == "without":
            continue
        rows.equal(f"{name}: host waits of ours in forward and backward", step.before.ours, 0, note=step.before.where)
        if settings.on_gpu:
            rows.equal(f"{name}: host waits of ours in the end of the step", step.end.ours, 1, note=step.end.where)
        else:
            rows.measured(f"{name}: host waits of ours in the end of the step", step.end.ours, note=step.end.where)
    if not settings.on_gpu:
        rows.left_out("forward and backward where waits are errors", "needs a GPU")
    elif alone.before.total:
        rows.left_out("forward and backward where waits are errors", f"the step alone waits {alone.before.total} times")
    else:
        _without_waits(training, ways["fused"], rows)


def _without_waits(training: Training, way: Run, rows: Rows) -> None:
    """Run forward and backward on the fused path while torch raises an error for each wait."""
    failure = ""
    with way() as end:
        for _ in range(_WARM_UP):
            training.step(end)
        torch.cuda.set_sync_debug_mode("error")
        try:
            training.forward_and_backward()
        except RuntimeError as error:
            failure = in_one_line(error)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    check = "fused: forward and backward where waits are errors"
    rows.equal(check, "failed" if failure else "ran", "ran", note=failure)
