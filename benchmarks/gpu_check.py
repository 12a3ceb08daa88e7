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
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from gpu_parts.machine import facts
from gpu_parts.rows import Backend, Row, brief, read_rows, row
from measuring import commit, progress, table

from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE

BENCHMARKS = Path(__file__).resolve().parent
COLUMNS = ("part", "check", "value", "unit", "expected", "verdict", "note")
_VERDICTS = {True: "ok", False: "WRONG", None: ""}
SECONDS = 540.0
"""Time limit of all parts together."""
_AT_ONCE = 4
_SLOWER_ON_A_CPU = 5
"""Factor on the time limit of a part: most of its time are imports, on a machine that others may use too."""
_LEAST_SECONDS = 5.0
"""A part does not start with less time left."""


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: printed name.
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
    Part("speed", 45, measures_time=True),
    Part("overhead", 180, measures_time=True),
)
"""The longest ones first, so that none of them starts when the others end."""


class Check:
    """Run parts in processes.

    Args:
        device: ``cuda`` or ``cpu``, which has the sizes of a test.
        seconds: time limit of all parts together.

    Attributes:
        machine: hardware and versions that the values depend on.
    """

    def __init__(self, device: str, seconds: float) -> None:
        self._device = device
        self._until = time.monotonic() + seconds
        self._running: set[subprocess.Popen[bytes]] = set()
        self.machine = facts(device)

    def run(self, parts: Sequence[Part]) -> dict[str, Any]:
        """Return the machine, the verdict of each part, and all rows."""
        results: dict[str, tuple[list[Row], float]] = {}
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
            "parts": {name: {**verdict(rows), "seconds": seconds} for name, (rows, seconds) in results.items()},
            "rows": rows,
        }

    def _run_part(self, part: Part) -> tuple[list[Row], float]:
        """Return the rows of a part, and its seconds."""
        start = time.monotonic()
        rows = self._rows_of(part)
        seconds = round(time.monotonic() - start, 1)
        wrong = sum(row["ok"] is False for row in rows)
        progress(f"{part.name}: {verdict(rows)['verdict']}, {len(rows)} rows, {wrong} wrong, {seconds} s")
        return rows, seconds

    def _rows_of(self, part: Part) -> list[Row]:
        left = self._until - time.monotonic()
        if left < _LEAST_SECONDS:
            return [row(part.name, "all", note="no time was left for it: choose fewer --parts")]
        backend = self._backend_of(part)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows")
            command = [sys.executable, "-m", f"gpu_parts.{part.module or part.name}", "--device", self._device]
            command += ["--rows", str(path), "--backend", backend]
            command += [] if part.capability is None else ["--capability", part.capability]
            limit = part.seconds * (1 if self._device == "cuda" else _SLOWER_ON_A_CPU)
            failure = self._run_process(command, min(limit, left), Path(folder), part.gpus)
            rows = read_rows(path)
            for read in rows:
                read["part"] = part.name  # some parts share a module
        if not failure and not rows:
            failure = "it wrote no rows"
        if failure:
            rows.append(row(part.name, "the part", "failed", expected="ran to its end", ok=False, note=failure))
        return rows

    def _backend_of(self, part: Part) -> Backend:
        """Return the reference backend for a part with recipes of another GPU."""
        backend: Backend = self.machine["backend"]
        layouts = self.machine["layouts"]
        return "reference" if backend == "compiled" and part.capability not in (None, layouts) else backend

    def _run_process(self, command: Sequence[str], limit: float, folder: Path, gpus: int) -> str:
        """Run a part, and return its failure; empty if it succeeded."""
        output = folder / "output"
        with output.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env=_environment(self._device, gpus),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._running.add(process)
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                return f"it had not ended after {limit:.0f} s, {_last_line(output.read_text(errors='replace'))}"
            finally:
                _end(process)
                self._running.discard(process)
        text = output.read_text(encoding="utf-8", errors="replace")
        if status or "Traceback (most recent call last)" in text:  # a check that raises prints one
            progress(text[-3000:])
        return f"status {status}: {_last_line(text)}" if status else ""


def _environment(device: str, gpus: int = 1) -> dict[str, str]:
    """Environment of a part, with ``gpu_parts`` on its path and at most this number of visible GPUs."""
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    path = [str(BENCHMARKS), str(BENCHMARKS / "proof"), *filter(None, [environment.get("PYTHONPATH")])]
    all_gpus = environment.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")  # CUDA ignores all from a missing one on
    visible = ",".join(all_gpus[:gpus]) if device == "cuda" else ""
    return environment | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": visible}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill a part and its child processes, also if the part has ended before them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(rows: Sequence[Row]) -> dict[str, str]:
    """Return the verdict of a part (``passed``, ``failed`` or ``cannot run here``), and the reason."""
    wrong = [f"{row['check']}: {row['note'] or row['value']}" for row in rows if row["ok"] is False]
    if wrong:
        return {"verdict": "failed", "why": "; ".join(wrong)}
    if all(row["value"] is None for row in rows):
        return {"verdict": "cannot run here", "why": "; ".join(dict.fromkeys(row["note"] for row in rows))}
    return {"verdict": "passed", "why": ""}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return brief(lines[-1]) if lines else "no output"


def file_name(machine: dict[str, Any]) -> str:
    """Return the name of the GPU, or ``cpu``, as a file name."""
    name = machine["gpu"]["name"] if machine["gpu"] else "cpu"
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("_") + ".json"


def describe(machine: dict[str, Any]) -> str:
    """Return the first line of the output."""
    gpu, versions = machine["gpu"], machine["versions"]
    device = f"{gpu['name']}, CUDA {gpu['cuda']}, driver {gpu['driver']}" if gpu else machine["processor"]
    why = f" ({machine['why_this_backend']})" if machine["why_this_backend"] else ""
    packages = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformer-engine"))
    return f"{device}; {packages}; Transformer Engine: {machine['backend']}{why}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Return 1 if a value is wrong or a part has failed, and 2 if the command cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="device of tensors (default: cuda)")
    names = [part.name for part in PARTS]
    parser.add_argument("--parts", default=",".join(names), help="parts to run, separated by commas (default: all)")
    parser.add_argument("--json", action="store_true", help="print JSON instead of the table")
    parser.add_argument("--out", type=Path, default=BENCHMARKS / "gpu", help="folder (default: benchmarks/gpu)")
    options = parser.parse_args(arguments)
    chosen = options.parts.split(",")
    if unknown := [name for name in chosen if name not in names]:
        parser.error(f"--parts: there is no part {', '.join(unknown)}; there are {', '.join(names)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error(f"torch {torch.__version__} sees no GPU here. With --device cpu the same code runs on the CPU.")
    check = Check(options.device, SECONDS if options.device == "cuda" else math.inf)
    results = check.run([part for part in PARTS if part.name in chosen])
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / file_name(check.machine)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(results, indent=1))
        return 0 if results["ok"] else 1
    print(describe(check.machine), end="\n\n")
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
