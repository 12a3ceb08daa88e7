"""Shared parts of the benchmarks: paired timing on a machine of varying speed, Transformer Engine's original functions,
and the output.

    ways = {"ours": in_session, "theirs": in_other}
    results = in_turn(ways, plainly(step), device, share=0.02, seconds=300)
    results["ours"].ratio()  # 1.034 (1.027 to 1.041)

A way is timed once, and the base once, in random order. Such pairs of all ways take turns, in random order too. A
machine that becomes slower for a second changes one pair, or both parts of one. The ratio of a way to the base is the
median of the ratios of its pairs, with a 95 % confidence interval (percentile bootstrap, Efron 1979).

Two clocks run: wall time, and the processor time of all threads of the process, which other work on the machine changes
less.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import os
import platform
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import numpy as np
import torch

TENSOR_STATISTICS = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
"""All that Transformer Engine's LogTensorStats takes as a plain name."""

FP8_STATISTICS = ("underflows%", "scale_inv_min", "scale_inv_max", "mse")
"""All that its LogFp8TensorStats has under any FP8 recipe; ``overflows%`` comes in under delayed scaling."""

Clock = Literal["wall", "processor"]
Case = dict[str, Any]

LEAST_PAIRS = 8
"""With fewer, the interval of a median has less than its stated probability."""

_COMPILED_UPSTREAM = (
    "_compute_dynamic_range_top",
    "_compute_dynamic_range_bottom",
    "compute_variance",
    "compute_std",
)
"""What Transformer Engine 2.20 decorates with torch.compile in ``debug/features/utils/stats_computation.py``."""


# --- intervals and pairs ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """A median with its 95 % confidence interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{_text(self.value)} ({_text(self.low)} to {_text(self.high)})"

    def scaled(self, factor: float, shift: float = 0.0) -> Interval:
        """``factor * (self + shift)``, of a factor above zero."""
        return Interval(*(factor * (number + shift) for number in (self.value, self.low, self.high)))


def _text(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"
    return "" if value is None else str(value)


def interval(samples: Sequence[float], seed: int = 0) -> Interval:
    """The median of samples with its interval; there is at least one sample."""
    values = np.asarray(samples, dtype=np.float64)
    drawn = np.random.default_rng(seed).choice(values, (2000, len(values)))
    low, high = np.percentile(np.median(drawn, axis=1), (2.5, 97.5))
    return Interval(float(np.median(values)), float(low), float(high))


@dataclass(frozen=True)
class Spent:
    """Milliseconds of a call, including the operations it started on the device."""

    wall: float
    processor: float


def spent(function: Callable[[], object], device: torch.device) -> Spent:
    synchronize(device)
    processor, wall = time.process_time(), time.perf_counter()
    function()
    synchronize(device)
    return Spent(1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Way = Callable[[], AbstractContextManager[Callable[[], object]]]
"""A context around a call. It yields the call; entering and leaving is not timed."""


def plainly(function: Callable[[], object]) -> Way:
    return lambda: contextlib.nullcontext(function)


@dataclass
class Pairs:
    """The pairs of a way.

    Attributes:
        ways, bases: times of the way, and of the base in the same pair.
    """

    ways: list[Spent] = field(default_factory=list)
    bases: list[Spent] = field(default_factory=list)

    def ratio(self, clock: Clock = "wall") -> Interval:
        both = zip(self.ways, self.bases, strict=True)
        return interval([getattr(way, clock) / getattr(base, clock) for way, base in both])

    def added(self) -> Interval:
        """The way less the base, in milliseconds."""
        return interval([way.wall - base.wall for way, base in zip(self.ways, self.bases, strict=True)])

    def base(self) -> Interval:
        return interval([base.wall for base in self.bases])

    def way(self) -> Interval:
        return interval([way.wall for way in self.ways])


def in_turn(
    ways: Mapping[str, Way],
    base: Way,
    device: torch.device,
    *,
    share: float,
    seconds: float,
    least: int = LEAST_PAIRS,
    seed: int = 0,
) -> dict[str, Pairs]:
    """Time ways and a base in pairs until each way is resolved, or the time is over.

    Args:
        ways: name -> way.
        base: baseline of all ways.
        device: device to wait for.
        share: a way is resolved when the interval of its ratio is at most this share of it to either side.
        seconds: time limit of rounds, once each way has its least pairs.
        least: pairs of each way.
        seed: of the order.
    """
    order, results = random.Random(seed), {name: Pairs() for name in ways}
    open_ways, end, number = list(ways), time.monotonic() + seconds, 0
    while open_ways and (number < least or time.monotonic() < end):
        number += 1
        order.shuffle(open_ways)
        for name in open_ways:
            both = [(results[name].ways, ways[name]), (results[name].bases, base)]
            order.shuffle(both)
            for times, way in both:
                with way() as function:
                    function()  # warms up
                    times.append(spent(function, device))
        if number >= least:
            ratios = {name: results[name].ratio() for name in open_ways}
            open_ways = [name for name, ratio in ratios.items() if ratio.high - ratio.low > 2 * share * ratio.value]
        progress(f"round {number}: {len(open_ways)} of {len(ways)} are not resolved")
    return results


# --- what is measured -------------------------------------------------------------------------------------------------


def llama(layers: int, hidden: int, sequence: int, vocabulary: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=max(1, hidden // 64),
        max_position_embeddings=sequence,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


@contextlib.contextmanager
def upstream_functions() -> Iterator[None]:
    """Transformer Engine's statistics without ``torch.compile``, which was slower in 11 of 12 measured cases, and 1 %
    faster in the other.

    The reference backend has its ``torch.norm`` sum in float64, which is slower. This is undone here, so that nothing
    of this project slows Transformer Engine's side down.
    """
    from transformer_engine.debug.features.utils import stats_computation

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("te_precision_callbacks.reference.cuda_on_cpu.exact_norm", torch.norm))
        for name in _COMPILED_UPSTREAM:
            function = getattr(stats_computation, name)
            plain = getattr(function, "_torchdynamo_orig_callable", function)
            stack.enter_context(mock.patch.object(stats_computation, name, plain))
        yield


# --- output -----------------------------------------------------------------------------------------------------------


def machine(device: torch.device) -> str:
    vectors = torch.backends.cpu.get_cpu_capability()
    described = f"{processor()}, {vectors}, {cores()} cores, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        described = f"{torch.cuda.get_device_name(device)}; {described}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformer-engine"))
    return f"{described}; {versions}"


def processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def cores() -> int:
    """Return the number of processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def commit() -> str | None:
    """Return the commit of the checkout, with ``-dirty`` if files have changed; None without a checkout."""
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def arguments(description: str | None, seconds: float | None = None) -> argparse.ArgumentParser:
    """A parser with ``--json``; with seconds, also with ``--seconds`` and ``--least`` of :func:`in_turn`."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a case, instead of a table")
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help=f"limit of rounds (default: {seconds:g})")
        parser.add_argument("--least", type=int, default=LEAST_PAIRS, help="pairs of each case (default: %(default)s)")
    return parser


def report(cases: Sequence[Case], columns: Mapping[str, str], device: torch.device, *, as_json: bool) -> None:
    """Print cases with the machine and the commit, as JSON or as a Markdown table.

    Args:
        cases: the rows.
        columns: heading -> key of a case; some cases may lack it.
        device: of the measurement.
        as_json: a list, one object a case.
    """
    where = {"machine": machine(device), "commit": commit()}
    if as_json:
        print(json.dumps([{**case, **where} for case in cases], indent=1, default=dataclasses.asdict))
        return
    print(table(list(columns), [[case.get(key) for key in columns.values()] for case in cases]), end="\n\n")
    print(f"{where['machine']}; commit {where['commit']}.")


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [list(header), *(list(map(_text, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def progress(message: str) -> None:
    print(message, file=sys.stderr, flush=True)
