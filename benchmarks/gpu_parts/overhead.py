"""What a session adds to the time of a training step: all statistics of all tensors in every step, beside Transformer
Engine's own features with the same statistics; and the default config, in a collection step, in another step, and at
its start. On the fused path also without what is computed once more for it, and without the end of the step.

Ways to run alternate in blocks. A block is a few steps, timed together, after steps that warm up. The values are
medians of the blocks.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator

import torch
from measuring import progress, synchronize
from step import EndOfStep, Run, fused_config, with_ours, with_upstream, without

from gpu_parts.rows import Rows, Settings
from gpu_parts.training import PATHS, Training

_ROUNDS = 5
_SECONDS = 70.0  # after this time no further block begins
_ROOMY = 40 * 2**30
"""Bytes of free memory with which a GPU holds the large model, its optimizer and what the backward needs."""


@contextlib.contextmanager
def _ending(way: Run, steps: int) -> Iterator[EndOfStep]:
    """As ``way``, but only the first steps end: later ones count as micro-batches of one step."""
    with way() as end:
        ends = [end] * steps
        yield lambda: ends.pop()() if ends else None


def block(training: Training, way: Run, warm_up: int, steps: int, settings: Settings) -> float:
    """Milliseconds of a step; without a warm-up, starting and ending the session belong to it."""
    synchronize(settings.device)
    start = time.perf_counter()
    with way() as end:
        for _ in range(warm_up):
            training.step(end)
        if warm_up:
            synchronize(settings.device)
            start = time.perf_counter()
        for _ in range(steps):
            training.step(end)
        synchronize(settings.device)
        stop = time.perf_counter()
    return 1e3 * ((stop if warm_up else time.perf_counter()) - start) / steps


def measure(training: Training, ways: dict[str, tuple[Run, int, int]], settings: Settings) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in ways}
    block(training, without, 1, 1, settings)
    started = time.perf_counter()
    for number in range(_ROUNDS if settings.on_gpu else 1):
        for name, (way, warm_up, steps) in ways.items():
            if time.perf_counter() - started > _SECONDS:
                return times
            times[name].append(block(training, way, warm_up, steps, settings))
            progress(f"round {number + 1}, {name}: {times[name][-1]:.0f} ms a step")
    return times


def check(settings: Settings, rows: Rows) -> None:
    layers, hidden, sequence = (24, 2048, 1024) if settings.on_gpu else (1, 64, 32)
    if settings.on_gpu and torch.cuda.mem_get_info(settings.device)[0] < _ROOMY:
        layers = min(layers, 4)
    training = Training(settings, layers=layers, hidden=hidden, sequence=sequence, batch=2)
    ways: dict[str, tuple[Run, int, int]] = {"without": (without, 2, 5)}
    for path in PATHS:
        ours = functools.partial(with_ours, training.model, PATHS[path](fp8=True), path)
        ways[f"{path}, every step"] = ours, 2, 3
    fused = functools.partial(with_ours, training.model, fused_config(fp8=True), "fused")
    ways["fused, every step, without its end"] = functools.partial(_ending, fused, 2), 2, 3
    less = functools.partial(with_ours, training.model, fused_config(fp8=True, recomputed=False), "fused")
    ways["fused, every step, nothing computed again"] = less, 2, 3
    default = functools.partial(with_ours, training.model, None)
    ways["default config, first step with start and end"] = default, 0, 1
    ways["default config, a step that samples weights"] = default, 3, 2  # steps 3 and 4
    ways["default config, a collection step"] = default, 5, 1
    ways["default config, another step"] = default, 11, 5
    upstream = functools.partial(with_upstream, training.model, PATHS["debug"](fp8=True))
    ways["Transformer Engine's own, every step"] = upstream, 2, 1  # a step takes seconds
    times = measure(training, ways, settings)
    size = f"{layers} layers, hidden {hidden}, {2 * sequence} tokens"
    alone = statistics.median(times["without"])
    for name, values in times.items():
        note = "; ".join(filter(None, [f"{size}, {len(values)} blocks", settings.backend_note]))
        if not values:
            rows.left_out(f"{name}: a step", f"no time was left for it; {note}")
            continue
        rows.measured(f"{name}: a step", statistics.median(values), "ms", note)
        if name != "without":
            # Of the same rounds: a GPU becomes slower while it warms up.
            added = statistics.median(value - beside for value, beside in zip(values, times["without"], strict=False))
            rows.measured(f"{name}: added", added, "ms", note)
            rows.measured(f"{name}: added share", 100 * added / alone, "%", note)
    if settings.on_gpu:
        rows.measured("memory, at most", torch.cuda.max_memory_allocated() / 2**30, "GiB")
