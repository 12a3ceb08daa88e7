"""Shared parts of the benchmarks: statistics, Transformer Engine's original functions, a clock, tables."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.metadata
import json
import platform
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args
from unittest import mock

import torch

TENSOR_STATISTICS = ("min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range")
"""All that Transformer Engine's LogTensorStats takes as a plain name."""

FP8_STATISTICS = ("underflows%", "scale_inv_min", "scale_inv_max", "mse")
"""All that its LogFp8TensorStats has under any FP8 recipe; ``overflows%`` comes in under delayed scaling."""

Mode = Literal["eager", "torch.compile"]
MODES: tuple[Mode, ...] = get_args(Mode)

_COMPILED_UPSTREAM = (
    "_compute_dynamic_range_top",
    "_compute_dynamic_range_bottom",
    "compute_variance",
    "compute_std",
)
"""What Transformer Engine 2.20 decorates with torch.compile in ``debug/features/utils/stats_computation.py``."""


def llama(layers: int, hidden: int, sequence: int, vocabulary: int) -> Any:
    """A Llama of transformers, with random weights."""
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


def measured_tensor(
    values: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    e5m2: bool = False,
    histogram: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums and maxima of one pass over a tensor."""
    from te_precision_callbacks.engine import kernels
    from te_precision_callbacks.engine.kernels.columns import NOTHING, Pending, layout

    places, width, extremes = layout(codes=codes is not None, histogram=histogram)
    sums = torch.zeros(width, dtype=torch.float64, device=values.device)
    maxima = torch.full((extremes,), NOTHING, dtype=torch.float64, device=values.device)
    kernels.add([Pending(values.detach(), codes, scale_inv, e5m2, places)], sums, maxima)
    return sums, maxima


@contextlib.contextmanager
def as_in_a_long_run() -> Iterator[None]:
    """Simulations of recipes are compiled at once, as they are for nearly all of a long run."""
    from te_precision_callbacks.engine.kernels import compiled

    with mock.patch.object(compiled, "PAYS_FROM", 0):
        yield


@contextlib.contextmanager
def upstream_functions(mode: Mode) -> Iterator[None]:
    """Transformer Engine's statistics in one of its two modes, and otherwise as its source has them.

    The reference backend takes its ``torch.compile`` off and has its ``torch.norm`` sum in float64, which is the slower
    of the two. Both changes are undone here, so that nothing of this project slows Transformer Engine's side down.
    """
    from transformer_engine.debug.features.utils import stats_computation

    from te_precision_callbacks.reference import cuda_on_cpu

    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.object(cuda_on_cpu, "exact_norm", torch.norm))
        for name in _COMPILED_UPSTREAM:
            function = _in_mode(getattr(stats_computation, name), mode)
            stack.enter_context(mock.patch.object(stats_computation, name, function))
        yield


_compiled: dict[Callable[..., Any], Callable[..., Any]] = {}


def _in_mode(function: Callable[..., Any], mode: Mode) -> Callable[..., Any]:
    plain: Callable[..., Any] = getattr(function, "_torchdynamo_orig_callable", function)
    if mode == "eager":
        return plain
    if plain not in _compiled:
        _compiled[plain] = torch.compile(plain)
    return _compiled[plain]


@dataclass(frozen=True)
class Spent:
    """Milliseconds of a call, including the operations it started on the device."""

    wall: float
    processor: float


def spent(function: Callable[[], object], device: torch.device) -> Spent:
    """Time a call."""
    _synchronize(device)
    processor, wall = time.process_time(), time.perf_counter()
    function()
    _synchronize(device)
    return Spent(1e3 * (time.perf_counter() - wall), 1e3 * (time.process_time() - processor))


def _synchronize(device: torch.device) -> None:
    """Wait for a device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def device_milliseconds(calls: Sequence[Callable[[], object]]) -> float:
    """Return the time of a call on a GPU without the host's launches: calls in a CUDA graph, the best of 10.

    Args:
        calls: alike, on different tensors that together are larger than the GPU's cache; none of them waits for the
            device or copies to the host.
    """
    calls[0]()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    best = float("inf")
    for _ in range(10):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / len(calls))
    return best


def machine(device: torch.device) -> str:
    """Return the first line of the output: processor, GPU and versions."""
    vectors = torch.backends.cpu.get_cpu_capability()
    processor = f"{_processor()}, {vectors}, {len(_usable_processors())} cores, {torch.get_num_threads()} threads"
    if device.type == "cuda":
        processor = f"{torch.cuda.get_device_name(device)}; {processor}"
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in ("torch", "transformer-engine"))
    return f"{processor}; {versions}"


def _processor() -> str:
    described = Path("/proc/cpuinfo")
    lines = described.read_text().splitlines() if described.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _usable_processors() -> Sequence[int]:
    import os

    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with what all benchmarks take."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON list, one object a case, instead of a table")
    return parser


def report(cases: Sequence[dict[str, Any]], columns: Sequence[str], notes: str, *, as_json: bool) -> None:
    """Print the cases as JSON, or the given columns as a table in Markdown with notes."""
    if as_json:
        print(json.dumps(cases, indent=2, default=dataclasses.asdict))
        return
    cells = [list(columns), *([_cell(case.get(column)) for column in columns] for case in cases)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    lines = ["| " + " | ".join(map(str.ljust, row, widths)) + " |" for row in cells]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    print("\n".join(lines), notes, sep="\n\n")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.1f}" if abs(value) >= 10 else f"{value:.3g}"
    return "" if value is None else str(value)


def progress(message: str) -> None:
    """A line for whoever waits."""
    print(message, file=sys.stderr, flush=True)
