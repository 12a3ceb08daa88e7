"""Check on a GPU what cannot be checked without one, and measure costs.

    python benchmarks/gpu_check.py [--parts kernels,parity] [--json] [--out benchmarks/gpu]
    python benchmarks/gpu_check.py --device cpu    # the same code on a CPU, with the sizes of a test; three minutes

It takes at most nine minutes and needs no network. Each part is a module of ``gpu_parts`` and runs in its own process
with a time limit. Parts that check correctness run four at a time, then parts that measure time run one by one. A
failing check is a row, and the part continues with its next check. After nine minutes no part starts, and running
parts are stopped. Parts use the compiled Transformer Engine if it can be imported, otherwise the reference backend.

The table is printed, and written with the machine and the versions to ``<out>/<name of the GPU>.json``. There,
``parts`` has the verdict of each part (``passed``, ``failed`` or ``cannot run here``), its reason and its seconds, and
``rows`` has all values. A row without a verdict is a measurement, or a check that could not run, with the reason in
its note. The exit status is 1 if a value is wrong or a part has failed, and 2 without a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import math
import os
import platform
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_parts.rows import Backend, Row, brief, layouts, row
from measuring import commit, cores, processor, progress, table

from te_precision_callbacks.reference import compiled_extension
from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE
from te_precision_callbacks.te.environment import torch_facts

BENCHMARKS = Path(__file__).resolve().parent
COLUMNS = ("part", "check", "value", "unit", "expected", "verdict", "note")
_VERDICTS = {True: "ok", False: "WRONG", None: ""}
PACKAGES = (
    "torch",
    "triton",
    "transformer-engine",
    "te-precision-callbacks",
    "nvdlfw-inspect",
    "lightning",
    "accelerate",
    "transformers",
    "numpy",
)
SECONDS = 540.0  # of all parts together
_AT_ONCE = 4
_SLOWER_ON_A_CPU = 5
"""Factor on the time limit of a part: most of its time are imports, on a machine that others may use too."""
_LEAST_SECONDS = 5.0  # a part does not start with less time left


class Part(NamedTuple):
    """A part of the check.

    Attributes:
        seconds: time limit on a GPU.
        module: module of ``gpu_parts``; None for the one with the part's name.
        capability: compute capability of the recipes, run on the reference backend if the GPU has another one.
        gpus: number of visible GPUs.
        measures_time: whether the part runs alone, after all checks of correctness.
    """

    name: str
    seconds: float
    module: str | None = None
    capability: str | None = None
    gpus: int = 1
    measures_time: bool = False


PARTS = (
    Part("planted", 300),
    Part("healthy", 240),
    Part("kernels", 200),
    Part("blocks", 300),
    Part("parity", 120),
    Part("capture", 120),
    Part("launches", 60),
    Part("gemm_error", 60),
    Part("ranks", 60, gpus=2),
    Part("hopper", 60, "recipes", capability="9.0"),
    Part("blackwell", 60, "recipes", capability="10.0"),
    Part("streams", 45),
    Part("overflow", 45),
    Part("large", 60),
    Part("bandwidth", 45, measures_time=True),
    Part("overhead", 180, measures_time=True),
)
"""The longest ones first, so that none of them starts when the others end."""


class Check:
    """Run parts in processes.

    Args:
        device: ``cuda`` or ``cpu``, which has the sizes of a test.

    Attributes:
        machine: hardware and versions that the values depend on.
    """

    def __init__(self, device: str) -> None:
        self._device = device
        self._until = time.monotonic() + (SECONDS if device == "cuda" else math.inf)
        self._running: set[subprocess.Popen[bytes]] = set()
        self.machine = facts(device)

    def run(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the machine, the verdict of each part, and all rows."""
        results: dict[str, tuple[list[Row], dict[str, Any]]] = {}
        for measures_time, at_once in ((False, min(_AT_ONCE, self.machine["cores"])), (True, 1)):
            chosen = [part for part in parts if part.measures_time is measures_time]
            with ThreadPoolExecutor(at_once) as pool:
                try:
                    results |= zip([part.name for part in chosen], pool.map(self._run_part, chosen), strict=True)
                except BaseException:
                    self._until = 0.0  # parts that wait do not start
                    for process in list(self._running):
                        _end(process)
                    raise
        rows = [row for rows, _ in results.values() for row in rows]
        return {
            "machine": self.machine,
            "commit": commit(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "small": self._device == "cpu",
            "ok": all(row["ok"] is not False for row in rows),
            "parts": {name: verdict for name, (_, verdict) in results.items()},
            "rows": rows,
        }

    def _run_part(self, part: Part) -> tuple[list[Row], dict[str, Any]]:
        """Return the rows of a part; and its verdict (``passed``, ``failed`` or ``cannot run here``), the reason, and
        its seconds."""
        start = time.monotonic()
        rows = self._rows_of(part)
        seconds = round(time.monotonic() - start, 1)
        wrong = [f"{row['check']}: {row['note'] or row['value']}" for row in rows if row["ok"] is False]
        verdict, why = "failed" if wrong else "passed", "; ".join(wrong)
        if not wrong and all(row["value"] is None for row in rows):
            verdict, why = "cannot run here", "; ".join(dict.fromkeys(row["note"] for row in rows))
        progress(f"{part.name}: {verdict}, {len(rows)} rows, {len(wrong)} wrong, {seconds} s")
        return rows, {"verdict": verdict, "why": why, "seconds": seconds}

    def _rows_of(self, part: Part) -> list[Row]:
        left = self._until - time.monotonic()
        if left < _LEAST_SECONDS:
            return [row(part.name, "all", note="no time was left for it: choose fewer --parts")]
        foreign = part.capability not in (None, self.machine["layouts"])
        backend = "reference" if foreign else self.machine["backend"]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows")
            path.touch()
            command = [sys.executable, "-m", "gpu_parts", part.module or part.name, "--part", part.name]
            command += ["--device", self._device, "--rows", str(path), "--backend", backend]
            command += [] if part.capability is None else ["--capability", part.capability]
            limit = part.seconds * (1 if self._device == "cuda" else _SLOWER_ON_A_CPU)
            failure = self._run_process(command, min(limit, left), Path(folder), part.gpus)
            # A line that the part was killed in is left out.
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]]
        if not failure and not rows:
            failure = "it wrote no rows"
        if failure:
            rows.append(row(part.name, "the part", "failed", expected="ran to its end", ok=False, note=failure))
        return rows

    def _run_process(self, command: Sequence[str], limit: float, folder: Path, gpus: int) -> str:
        """Run a part with this number of visible GPUs, and return its failure; empty if it succeeded."""
        environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
        path = [str(BENCHMARKS), str(BENCHMARKS / "proof"), *filter(None, [environment.get("PYTHONPATH")])]
        all_gpus = environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")  # CUDA ignores all from a missing one on
        visible = ",".join(all_gpus[:gpus]) if self._device == "cuda" else ""
        output = folder / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env=environment | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": visible},
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            status: int | None = None
            with contextlib.suppress(subprocess.TimeoutExpired):
                status = process.wait(limit)
            _end(process)
            self._running.discard(process)
        text = output.read_text(encoding="utf-8", errors="replace")
        last_line = brief((text.strip().splitlines() or ["no output"])[-1])
        if status is None:
            return f"it had not ended after {limit:.0f} s, {last_line}"
        if status or "Traceback (most recent call last)" in text:  # a check that raises prints one
            progress(text[-3000:])
        return f"status {status}: {last_line}" if status else ""


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and its child processes, also if the part has ended before them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def facts(device: str) -> dict[str, Any]:
    """Return hardware and versions; ``gpu`` is None on a CPU. Without a usable Transformer Engine the backend is the
    reference, and there is a reason."""
    why: str | None = "the device is the CPU"
    gpu, versions = None, dict.fromkeys(PACKAGES)
    for name in PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            versions[name] = importlib.metadata.version(name)
    if device == "cuda":
        properties, about = torch.cuda.get_device_properties(0), torch_facts()
        capability = f"{properties.major}.{properties.minor}"
        gpu = {
            "name": properties.name,
            "capability": capability,
            "memory_bytes": properties.total_memory,
            "processors": properties.multi_processor_count,
            "driver": about.driver,
            "cuda": about.cuda,
            "cudnn": about.cudnn,
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        }
        has_fp8 = (properties.major, properties.minor) >= (8, 9)
        without = f"the GPU, of compute capability {capability}, has no FP8"
        why = compiled_extension.why_unavailable() if has_fp8 else without
    backend: Backend = "compiled" if why is None else "reference"
    return {
        "device": device,
        "gpu": gpu,
        "processor": f"{processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": cores(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "system": platform.system(),
        "versions": versions,
        "backend": backend,
        "why_this_backend": brief(why or ""),
        "layouts": layouts() if device == "cuda" else "9.0",
    }


def main() -> int:
    """Return 1 if a value is wrong or a part has failed, and 2 if the command cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of tensors (default: cuda)")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", default=",".join(names), help="parts to run, separated by commas (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "gpu", help="folder (default: benchmarks/gpu)")
    options = parser.parse_args()
    chosen = options.parts.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--parts: there is no part {', '.join(unknown)}; there are {', '.join(names)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU here. With --device cpu the same code runs on the CPU.")
    check = Check(options.device)
    results = check.run([part for part in PARTS if part.name in chosen])
    machine, gpu = check.machine, check.machine["gpu"] or {"name": "cpu"}
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / (re.sub(r"[^A-Za-z0-9.-]+", "_", gpu["name"]).strip("_") + ".json")
    text = json.dumps(results, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    if options.json:
        print(text)
        return 0 if results["ok"] else 1
    device = f"{gpu['name']}, CUDA {gpu['cuda']}, driver {gpu['driver']}" if machine["gpu"] else machine["processor"]
    packages = ", ".join(f"{name} {machine['versions'][name]}" for name in ("torch", "triton", "transformer-engine"))
    why = f" ({machine['why_this_backend']})" if machine["why_this_backend"] else ""
    print(f"{device}; {packages}; Transformer Engine: {machine['backend']}{why}", end="\n\n")
    rows = [{**row, "verdict": _VERDICTS[row["ok"]]} for row in results["rows"]]
    print(table(COLUMNS, [[row[column] for column in COLUMNS] for row in rows]), end="\n\n")
    parts = results["parts"].items()
    summary = ", ".join(f"{name} {part['verdict']} ({part['seconds']:.0f} s)" for name, part in parts)
    wrong = [row for row in rows if row["ok"] is False]
    print(f"{len(rows)} rows, {len(wrong)} wrong. {summary}. Written to {path.name}.")
    for wrong_row in wrong:
        print("WRONG: {part}, {check}: {value}. {note}".format_map(wrong_row))
    return 0 if results["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
