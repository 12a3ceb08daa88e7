"""A long run of a tiny model with everything on: does anything grow?

    python benchmarks/soak.py [--steps 20000] [--layers 1] [--every 10] [--records 64MiB] [--folder runs] [--json]

A Transformer Engine layer of 16 features trains in FP8, in one process and one thread, under an InspectSession with
tensor and FP8 statistics and histograms in every tenth step (--every), the statistics log, records, dumps within a
budget, a precision contract, activation overflow detection, the trainer's numbers, a sink of metrics, now and then an
evaluation and a checkpoint. The steps are reported in twenty stretches:

  ms         a step, the median of the stretch.
  cpu_us     a step, of the training thread's processor time; other programs on the machine change it little.
  other_us   a step, of the processor time of all other threads: those that write.
  rss_mib    the memory of the process.
  objects    the objects that Python's garbage collector knows, behind a collection.
  threads, open_files  of the process.
  files, files_mib     below the log folder.

The first tenth is the warm-up. A line through the other rows gives the growth up to the end, which must stay below
the limits in LIMITS. Files that have a limit of their own (records, the statistics log, dumps) grow until they have
reached it; their growth is the one of the last third, and is no part of the verdict. ``--trace`` also prints the lines
of code whose memory has grown most, and is slow.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import statistics
import tempfile
import threading
import time
import tracemalloc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measuring import arguments, machine, progress, report

from te_precision_callbacks import InspectSession, reference
from te_precision_callbacks.sinks import LoggerSink, MetricSelection

ROWS = 20
FEATURES, TOKENS = 16, 16
COLUMNS = (
    "iteration",
    "ms",
    "cpu_us",
    "other_us",
    "rss_mib",
    "objects",
    "threads",
    "open_files",
    "files",
    "files_mib",
)

LIMITS = {
    "cpu_us": ("share", 0.1),
    "other_us": ("share", 0.25),
    "rss_mib": ("more", 32.0),
    "objects": ("share", 0.02),
    "threads": ("more", 0.5),
    "open_files": ("more", 0.5),
}
"""What may grow, from the warm-up to the end: by a share of itself, or by so much."""

EVALUATION, CHECKPOINT, DUMP = 500, 2_000, 1_000
"""The steps from one to the next."""


def config(every: int) -> dict[str, Any]:
    """Tensor statistics, FP8 statistics and histograms of all operands, and dumps within a budget."""
    operands = ["activation", "weight", "gradient"]
    tensor = {
        "enabled": True,
        "tensors": operands,
        "stats": ["min", "max", "mean", "std", "cur_amax", "nonfinite_num", "exponent_histogram"],
        "freq": every,
    }
    quantized = {
        "enabled": True,
        "tensors": operands,
        "stats": ["underflows%", "overflows%", "mse", "scale_inv_min", "scale_inv_max"],
        "freq": every,
    }
    dumps = {
        "enabled": True,
        "tensors": ["activation"],
        "quantized_tensor": True,
        "high_precision_tensor": True,
        "freq": DUMP,
        "max_files": 20,
    }
    features = {"LogTensorStats": tensor, "LogFp8TensorStats": quantized, "DumpTensors": dumps}
    return {"soak": {"enabled": True, "layers": {"layer_types": ["all"]}, "transformer_engine": features}}


class Metrics(LoggerSink):
    """Gets metrics as a trainer's logger does, and keeps the last ones."""

    def log(self, metrics: Any, histograms: Any, step: int) -> None:
        self.last = metrics, histograms, step


def model(layers: int) -> torch.nn.Module:
    """The model."""
    import transformer_engine.pytorch as te

    options: dict[str, Any] = {"params_dtype": torch.bfloat16, "device": "cuda" if torch.cuda.is_available() else "cpu"}
    return torch.nn.Sequential(*(te.LayerNormLinear(FEATURES, FEATURES, **options) for _ in range(layers)))


class Meter:
    """Measures stretches of steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._steps: list[float] = []
        self._begin()

    def _begin(self) -> None:
        self._steps.clear()
        self._thread, self._process = time.thread_time(), time.process_time()

    def step(self, seconds: float) -> None:
        """Note a step."""
        self._steps.append(seconds)

    def row(self, iteration: int) -> dict[str, Any]:
        """What is to be said of the stretch that ends here."""
        own, all_threads, count = (
            time.thread_time() - self._thread,
            time.process_time() - self._process,
            len(self._steps),
        )
        milliseconds = 1e3 * statistics.median(self._steps)
        gc.collect()
        sizes = list(_sizes(self._folder))
        row = {
            "iteration": iteration,
            "ms": milliseconds,
            "cpu_us": 1e6 * own / count,
            "other_us": 1e6 * (all_threads - own) / count,
            "rss_mib": _resident() / 2**20,
            "objects": len(gc.get_objects()),
            "threads": len(os.listdir("/proc/self/task"))
            if os.path.isdir("/proc/self/task")
            else threading.active_count(),
            "open_files": len(os.listdir("/proc/self/fd")) if os.path.isdir("/proc/self/fd") else 0,
            "files": len(sizes),
            "files_mib": sum(sizes) / 2**20,
        }
        self._begin()
        return row


def _sizes(folder: Path) -> Iterator[int]:
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                yield os.stat(os.path.join(place, name)).st_size


def _resident() -> int:
    status = Path("/proc/self/statm")
    return int(status.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") if status.exists() else 0


def train(folder: Path, steps: int, layers: int, every: int, records: str, *, trace: bool) -> list[dict[str, Any]]:
    """Train, and measure."""
    import transformer_engine.pytorch as te
    from transformer_engine.common.recipe import DelayedScaling

    torch.manual_seed(0)
    network, recipe = model(layers), DelayedScaling()
    device = next(network.parameters()).device
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    batches = [torch.randn(TOKENS, FEATURES, dtype=torch.bfloat16, device=device) for _ in range(16)]
    session = InspectSession(
        config(every),
        model=network,
        log_dir=folder,
        records=records,
        require="fp8 >= 50%",
        debug="activation_overflow",
        sinks=[Metrics(MetricSelection())],
    )
    session.start()
    meter, rows, before = Meter(folder), [], None
    stretch = max(1, steps // ROWS)
    try:
        for iteration in range(steps):
            begun = time.perf_counter()
            with te.autocast(enabled=True, recipe=recipe):
                loss = network(batches[iteration % len(batches)]).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss.detach(), "lr": 1e-3})
            session.step()
            meter.step(time.perf_counter() - begun)
            if iteration % EVALUATION == EVALUATION - 1:
                with torch.no_grad(), te.autocast(enabled=True, recipe=recipe):
                    network.eval()(batches[0])
                    network.train()
            if iteration % CHECKPOINT == CHECKPOINT - 1:
                session.state_dict()
            if (iteration + 1) % stretch == 0:
                rows.append(meter.row(iteration + 1))
                progress(_line(rows[-1]))
            if trace and iteration + 1 == steps // 3:
                tracemalloc.start(12)
            if trace and iteration + 1 == steps // 2:
                before = tracemalloc.take_snapshot()
        if before is not None:
            _name_growth(before, steps - steps // 2)
    finally:
        begun = time.perf_counter()
        session.stop()
        progress(f"stop() took {time.perf_counter() - begun:.2f} s")
    return rows


def _line(row: dict[str, Any]) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


def _name_growth(before: tracemalloc.Snapshot, steps: int) -> None:
    gc.collect()
    grown = tracemalloc.take_snapshot().compare_to(before, "traceback")
    for each in grown[:12]:
        progress(f"{each.size_diff / steps:.2f} bytes a step, {each.count_diff / steps:.3f} blocks a step")
        progress("\n".join(each.traceback.format(most_recent_first=True, limit=8)))


def slope(places: Sequence[float], values: Sequence[float]) -> float:
    """The median of the slopes between any two points (Theil-Sen): a stretch that was disturbed changes little."""
    x, y = np.asarray(places, float), np.asarray(values, float)
    first, second = np.triu_indices(len(x), 1)
    return float(np.median((y[second] - y[first]) / (x[second] - x[first])))


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The growth of each quantity after the warm-up, to the end of the run, and whether it is flat."""
    kept = rows[max(1, len(rows) // 10) :]
    last = rows[-(len(rows) // 3) :]
    found = []
    for name, (kind, limit) in LIMITS.items():
        places, values = [row["iteration"] for row in kept], [row[name] for row in kept]
        growth = slope(places, values) * (places[-1] - places[0])
        level = float(np.median(values))
        compared = growth / max(level, 1e-9) if kind == "share" else growth
        found.append(
            {
                "quantity": name,
                "level": level,
                "growth": growth,
                "limit": _limit(kind, limit),
                "flat": compared <= limit,
            }
        )
    for name in ("files", "files_mib"):
        places, values = [row["iteration"] for row in last], [row[name] for row in last]
        growth = slope(places, values) * (places[-1] - places[0])
        found.append(
            {"quantity": name, "level": values[-1], "growth": growth, "limit": "of the last third", "flat": None}
        )
    return found


def _limit(kind: str, limit: float) -> str:
    return f"{100 * limit:.0f} %" if kind == "share" else f"{limit:g}"


def main(given: list[str] | None = None) -> int:
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=20_000, help="the steps (default: 20,000)")
    parser.add_argument("--layers", type=int, default=1, help="the layers (default: 1)")
    parser.add_argument("--every", type=int, default=10, help="the steps from one with statistics to the next")
    parser.add_argument("--records", default="64MiB", help="the limit of records (default: 64MiB)")
    parser.add_argument("--folder", type=Path, help="an empty log folder, which is kept")
    parser.add_argument("--trace", action="store_true", help="name the lines whose memory has grown most")
    options = parser.parse_args(given)
    if options.steps < 10 * ROWS:
        parser.error(f"--steps must be at least {10 * ROWS}")
    reference.install_where_needed()
    torch.set_num_threads(1)
    logging.getLogger("te_precision_callbacks").setLevel(logging.WARNING)
    described = machine(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    progress(described)
    with contextlib.ExitStack() as stack:
        folder = options.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        begun = time.perf_counter()
        rows = train(folder, options.steps, options.layers, options.every, options.records, trace=options.trace)
        seconds = time.perf_counter() - begun
    verdicts = judged(rows)
    flat = all(verdict["flat"] is not False for verdict in verdicts)
    if options.json:
        report(
            [
                {
                    "machine": described,
                    "steps": options.steps,
                    "seconds": seconds,
                    "flat": flat,
                    "rows": rows,
                    "growth": verdicts,
                }
            ],
            (),
            "",
            as_json=True,
        )
    else:
        report(
            rows,
            COLUMNS,
            f"{options.steps:,} steps in {seconds:,.0f} s. Growth from the warm-up to the end:",
            as_json=False,
        )
        print()
        report(
            verdicts, ("quantity", "level", "growth", "limit", "flat"), "FLAT" if flat else "NOT FLAT", as_json=False
        )
    return 0 if flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
