"""Time of one large tensor's statistics here and in Transformer Engine, and the share of the GPU's bandwidth.

``stats.py`` measures the same times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from measuring import FP8_STATISTICS, TENSOR_STATISTICS, Interval
from stats import CURRENT, Measured

from gpu_parts.kernels import measured_tensor
from gpu_parts.rows import Rows, Settings

UNITS = {
    "ours_ms": "ms",
    "ours_reads": "times",
    "te_ms": "ms",
    "ratio": "times",
    "read_once_ms": "ms",
    "flush_ms": "ms",
    "pass_ms": "ms",
    "peak_gb_per_s": "GB/s",
    "bandwidth_share": "of the peak",
}
_COPIES_BYTES = 512 * 2**20  # larger than the cache of any GPU


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


def _bandwidth(measured: Measured) -> dict[str, float]:
    """Return the share of the GPU's bandwidth that our pass reaches, relative to copies and sums."""
    quantized = measured.quantized
    tensors = [measured.values] if quantized is None else [measured.values, quantized._data]
    read = sum(tensor.nbytes for tensor in tensors)
    copies = [[tensor.clone() for tensor in tensors] for _ in range(max(2, -(-_COPIES_BYTES // read)))]
    scale = () if quantized is None else (quantized._scale_inv,)
    ms = device_milliseconds([functools.partial(measured_tensor, *copy, *scale) for copy in copies])
    # Not `values`, whose sum may not be bound by memory in every dtype.
    large = torch.ones(_COPIES_BYTES // 4, device=measured.device)
    copying, summing = device_milliseconds([large.clone]), device_milliseconds([large.sum])
    peak = max(2 * large.nbytes / copying, large.nbytes / summing)
    return {"pass_ms": ms, "peak_gb_per_s": peak / 1e6, "bandwidth_share": read / ms / peak}


def check(settings: Settings, rows: Rows) -> None:
    settings.transformer_engine()
    size, least, seconds = (8192, 8, 20.0) if settings.on_gpu else (160, 1, 0.0)
    for tensor, quantized, recipe in ((TENSOR_STATISTICS, (), ""), ((), FP8_STATISTICS, CURRENT)):
        measured = Measured(torch.bfloat16, tensor, quantized, recipe, size=size, device=settings.device)
        results = measured.run(seconds, least)
        name = f"{measured.name}, {size} x {size}"
        if settings.on_gpu:
            results |= _bandwidth(measured)
        rows.equal_on_gpu(f"{name}: path", results["path"], "triton", settings)
        for key, value in results.items():
            if isinstance(value, Interval):
                rows.measured(f"{name}: {key}", value.value, UNITS[key], f"{value.low:.3g} to {value.high:.3g}")
            elif key in UNITS:
                rows.measured(f"{name}: {key}", value, UNITS[key])
