"""What a bad disk costs a training step: one that hangs, is full, or is slow, beside a healthy one.

    python benchmarks/disk.py [--json] [--layers 2 --hidden 256 --sequence 128 --batch 2] [--seconds 120]

The model of examples/byte_lm.py trains in FP8 with statistics of all tensors in every step, which go to the
statistics log and the records. One process and one model run blocks of four steps after one that warms up: with a
healthy disk, with a bad one, and so on. A bad disk is emulated where this project's threads write: ``os.write`` and
``os.fsync`` wait for ever (hangs), raise ENOSPC (full), or wait 50 ms (slow). The threads write every 20 ms instead of
every 2 s, and 500 numbers may wait instead of millions, so that a block of steps meets the full queue.
  step_ms     the median step.
  healthy_ms  the median of the steps beside the healthy disk in the blocks right before.
  slowest_ms, slowest_healthy_ms  the slowest step of both.
  stop_ms     the median time of stop(), where each file that waits for the disk that hangs is given up 0.2 s after the
              last sign of life, instead of 10 s.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import yaml
from measuring import progress, report, spent
from step import Training, config, of_training

COLUMNS = ("case", "step_ms", "healthy_ms", "slowest_ms", "slowest_healthy_ms", "stop_ms")

_BLOCK = 4
"""Timed steps of a block, after one that warms up."""


@contextlib.contextmanager
def disk(kind: str) -> Iterator[None]:
    """Writes of this project's threads meet such a disk until the block ends, when it gets well."""
    healthy = threading.Event()

    def behind(call: Callable[..., Any]) -> Callable[..., Any]:
        def met(*arguments: Any) -> Any:
            if threading.current_thread().name.startswith("te-precision") and not healthy.is_set():
                if kind == "full":
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                if kind != "healthy":
                    healthy.wait(0.05 if kind == "slow" else None)
            return call(*arguments)

        return met

    with mock.patch.object(os, "write", behind(os.write)), mock.patch.object(os, "fsync", behind(os.fsync)):
        try:
            yield
        finally:
            healthy.set()


def block(training: Training, path: Path, kind: str) -> tuple[list[float], float]:
    """The milliseconds of some steps in a session, and of its stop."""
    from te_precision_callbacks.session import InspectSession

    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder, disk(kind):
        session = InspectSession(path, model=training.model, log_dir=folder).start()
        training.step(session.step)
        times = [spent(lambda: training.step(session.step), training.device).wall for _ in range(_BLOCK)]
        start = time.perf_counter()
        session.stop()
        return times, 1e3 * (time.perf_counter() - start)


def run_all(training: Training, options: argparse.Namespace, folder: Path) -> list[dict[str, Any]]:
    """A case for each disk."""
    from te_precision_callbacks.runs import sink
    from te_precision_callbacks.sinks import statistics_log, writer_thread

    path = folder / "statistics.yaml"
    path.write_text(yaml.safe_dump(config(fp8=True)))
    kinds = ("healthy", "hangs", "full", "slow")
    found: dict[str, list[tuple[list[float], list[float], float]]] = {kind: [] for kind in kinds}
    with contextlib.ExitStack() as stack:
        for module, name, value in (
            (writer_thread, "FLUSH_SECONDS", 0.02),
            (writer_thread, "LONGEST_STILL", 0.2),
            (statistics_log, "MOST_WAITING", 500),
            (sink, "MOST_WAITING", 500),
        ):
            stack.enter_context(mock.patch.object(module, name, value))
        end = time.monotonic() + options.seconds
        for number in itertools.count(1):
            if number > options.least and time.monotonic() > end:
                break
            for kind in kinds:
                beside, _ = block(training, path, "healthy")
                found[kind].append((beside, *block(training, path, kind)))
            medians = ", ".join(f"{kind} {_median(found[kind], 1):.1f} ms" for kind in kinds)
            progress(f"round {number}: {medians}")
    return [
        {
            "case": kind,
            "step_ms": _median(blocks, 1),
            "healthy_ms": _median(blocks, 0),
            "slowest_ms": max(itertools.chain(*(times for _, times, _ in blocks))),
            "slowest_healthy_ms": max(itertools.chain(*(times for times, _, _ in blocks))),
            "stop_ms": statistics.median(stop for *_, stop in blocks),
            "steps": sum(len(times) for _, times, _ in blocks),
        }
        for kind, blocks in found.items()
    ]


def _median(blocks: list[tuple[list[float], list[float], float]], place: int) -> float:
    return statistics.median(itertools.chain(*(times[place] for times in blocks)))  # type: ignore[arg-type]


def main(given: list[str] | None = None) -> None:
    torch.manual_seed(0)
    cases, as_json = of_training(given, __doc__, run_all, layers=2, seconds=120)
    report(cases, COLUMNS, "Each bad disk's steps beside those of the healthy disk right before.", as_json=as_json)


if __name__ == "__main__":
    main()
