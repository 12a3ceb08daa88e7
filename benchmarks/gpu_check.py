"""All that can only be known on a GPU, in one command: what must be right there, and what it costs.

    python benchmarks/gpu_check.py [--parts kernels,parity] [--json] [--out benchmarks/gpu]
    python benchmarks/gpu_check.py --device cpu    # the same code on a CPU at the sizes of a test; three minutes

It takes about eight minutes and needs no network. Each part is a module of ``gpu_parts`` and runs in a process of its
own, so that one that fails, breaks the CUDA context or does not end fails by itself. Within a part a check that raises
is a row, and the next one runs. After ``--seconds`` no further part begins, and the last one is ended. The parts use
the compiled Transformer Engine if it can be imported, and the reference backend otherwise. The table is printed, and
written with the machine and the versions to ``<out>/<name of the GPU>.json``. The exit status is 1 if a number is wrong
or a part has failed.

A row without a verdict is a measurement, or a check that could not be made; its note says why. In the JSON, ``parts``
has of each part whether it has ``passed``, ``failed`` or ``cannot run here``, why, and its seconds; ``rows`` has all
figures.
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
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from gpu_parts.rows import BEGUN, Backend, Row, brief, read_rows, row
from measuring import progress, report

from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE

BENCHMARKS = Path(__file__).resolve().parent
COLUMNS = ("part", "check", "value", "unit", "expected", "verdict", "note")
_VERDICTS = {True: "ok", False: "WRONG", None: ""}
SECONDS = 540.0
"""For all parts together."""
_SLOWER_ON_A_CPU = 5
"""How many times as long a part may run there: most of it are imports, on a machine that others may use too."""
_LEAST_SECONDS = 5.0
"""With less no part begins."""
_MACHINE_SECONDS = 240.0
"""In which the machine must have been asked; the compiled Transformer Engine is imported for it once."""


@dataclass(frozen=True)
class Part:
    """A part of the check.

    Attributes:
        name: its name.
        module: what ``python -m`` runs.
        seconds: after which it is ended, and has failed.
        needs_transformer_engine: whether nothing of it can run without Transformer Engine's Python.
        capability: the compute capability whose recipes it runs: on the reference backend where the GPU has another.
        gpus: how many GPUs it may see.
    """

    name: str
    module: str
    seconds: float
    needs_transformer_engine: bool = True
    capability: str | None = None
    gpus: int = 1


PARTS = (
    Part("kernels", "gpu_parts.kernels", 200, needs_transformer_engine=False),
    Part("blocks", "gpu_parts.blocks", 150, needs_transformer_engine=False),
    Part("large", "gpu_parts.large", 45, needs_transformer_engine=False),
    Part("streams", "gpu_parts.streams", 25, needs_transformer_engine=False),
    Part("hopper", "gpu_parts.recipes", 60, capability="9.0"),
    Part("blackwell", "gpu_parts.recipes", 60, capability="10.0"),
    Part("gemm_error", "gpu_parts.gemm_error", 60),
    Part("capture", "gpu_parts.capture", 120),
    Part("ranks", "gpu_parts.ranks", 60, gpus=2),
    Part("parity", "gpu_parts.parity", 60),
    Part("launches", "gpu_parts.launches", 40),
    Part("healthy", "gpu_parts.healthy", 150),
    Part("planted", "gpu_parts.planted", 150),
    Part("overflow", "gpu_parts.overflow", 25, needs_transformer_engine=False),
    Part("bandwidth", "gpu_parts.bandwidth", 75),
    Part("speed", "gpu_parts.speed", 60),
    Part("overhead", "gpu_parts.overhead", 150),
)
"""What must be right comes before what it costs, for which no time may be left."""


class CannotRunError(Exception):
    """There is no GPU where one was asked for, or something that is needed cannot be imported."""


class Check:
    """Runs parts, each in a process of its own.

    Args:
        device: ``cuda`` or ``cpu``.
        small: whether the sizes are those of a test.
        seconds: for all parts together.

    Attributes:
        machine: what the numbers depend on.

    Raises:
        CannotRunError: the device is ``cuda``, and there is none; or the machine could not be asked.
    """

    def __init__(self, device: str, *, small: bool, seconds: float) -> None:
        self._device = device
        self._options = ["--device", device, *(["--small"] if small else [])]
        self._until = time.monotonic() + seconds
        self._small = small
        self.machine = self._ask(device)

    def _ask(self, device: str) -> dict[str, Any]:
        command = [sys.executable, "-m", "gpu_parts.machine", "--device", device]
        try:
            done = subprocess.run(
                command, env=_environment(device), capture_output=True, text=True, check=False, timeout=_MACHINE_SECONDS
            )
        except subprocess.TimeoutExpired:
            raise CannotRunError(f"the machine had not answered after {_MACHINE_SECONDS:.0f} s") from None
        if done.returncode:
            raise CannotRunError(f"the machine could not be asked: {_last_line(done.stderr)}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        if "error" in found:
            raise CannotRunError(f"{found['error']}. With --device cpu the same code runs on the CPU")
        return found

    def run(self, parts: Sequence[Part]) -> dict[str, Any]:
        """The machine, how each part has ended, and all rows."""
        rows: list[Row] = []
        seconds: dict[str, float] = {}
        ended: dict[str, dict[str, Any]] = {}
        for part in parts:
            progress(f"{part.name} ...")
            start = time.monotonic()
            found = self._rows_of(part)
            seconds[part.name] = round(time.monotonic() - start, 1)
            ended[part.name] = {**verdict(found), "seconds": seconds[part.name]}
            wrong = sum(one["ok"] is False for one in found)
            how = ended[part.name]["verdict"]
            progress(f"{part.name}: {how}, {len(found)} rows, {wrong} wrong, {seconds[part.name]} s")
            rows += found
        return {
            "machine": self.machine,
            "commit": commit(),
            "finished": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "small": self._small,
            "ok": all(one["ok"] is not False for one in rows),
            "parts": ended,
            "seconds": seconds,
            "rows": rows,
        }

    def _rows_of(self, part: Part) -> list[Row]:
        left = self._until - time.monotonic()
        if left < _LEAST_SECONDS:
            return [row(part.name, "all", note="no time was left for it: --seconds gives more")]
        backend = self._backend_of(part)
        if part.needs_transformer_engine and backend == "none":
            return [row(part.name, "all", note=self.machine["why_this_backend"])]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder, "rows")
            command = [sys.executable, "-m", part.module, "--rows", str(path), "--backend", backend, *self._options]
            command += [] if part.capability is None else ["--capability", part.capability]
            limit = part.seconds * (1 if self._device == "cuda" else _SLOWER_ON_A_CPU)
            failure = self._run(command, min(limit, left), Path(folder), part.gpus)
            found = read_rows(path)
            for one in found:
                one["part"] = part.name  # some parts share a module
            begun = path.with_suffix(BEGUN)
            if failure and begun.exists():
                failure = f"{failure}, in: {begun.read_text(encoding='utf-8')}"
        if not failure and not found:
            failure = "it gave no rows"
        if failure:
            found.append(row(part.name, "the part", "failed", expected="ran to its end", ok=False, note=failure))
        return found

    def _backend_of(self, part: Part) -> Backend:
        """A part that runs another GPU's recipes runs them on the reference backend."""
        backend: Backend = self.machine["backend"]
        has = self.machine["layouts"]
        return "reference" if backend == "compiled" and part.capability not in (None, has) else backend

    def _run(self, command: Sequence[str], limit: float, folder: Path, gpus: int) -> str:
        """Run a part; how it failed, or nothing."""
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
            try:
                status = process.wait(limit)
            except subprocess.TimeoutExpired:
                return f"it had not ended after {limit:.0f} s"
            finally:
                _end(process)
        text = output.read_text(encoding="utf-8", errors="replace")
        if status == 0:
            if "Traceback (most recent call last)" in text:  # of a check that has failed
                progress(text[-3000:])
            return ""
        progress(text[-3000:])
        return f"status {status}: {_last_line(text)}"


def _environment(device: str, gpus: int = 1) -> dict[str, str]:
    """Of the parts: they find these modules, and see so many GPUs, as far as there are any."""
    found = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    path = [str(BENCHMARKS), str(BENCHMARKS / "proof"), *filter(None, [found.get("PYTHONPATH")])]
    all_gpus = found.get("CUDA_VISIBLE_DEVICES", "0,1").split(",")  # what comes after one that is not there is ignored
    seen = ",".join(all_gpus[:gpus]) if device == "cuda" else ""
    return found | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": seen}


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a part that still runs, and the processes that it has started, also where it has ended before them."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def verdict(rows: Sequence[Row]) -> dict[str, str]:
    """How a part has ended: ``passed``, ``failed`` or ``cannot run here``, and why."""
    wrong = [one for one in rows if one["ok"] is False]
    if wrong:
        return {
            "verdict": "failed",
            "why": "; ".join(f"{one['check']}: {one['note'] or one['value']}" for one in wrong),
        }
    if all(one["value"] is None for one in rows):
        return {"verdict": "cannot run here", "why": "; ".join(dict.fromkeys(one["note"] for one in rows))}
    return {"verdict": "passed", "why": ""}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return brief(lines[-1]) if lines else "it said nothing"


def commit() -> str | None:
    """The commit of the checkout, with ``-dirty`` where files have changed since; None without one."""
    command = ["git", "-C", str(BENCHMARKS), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return None
    return done.stdout.strip() or None


def file_name(machine: dict[str, Any]) -> str:
    """The name of the GPU, or ``cpu``, as a file name."""
    name = machine["gpu"]["name"] if machine["gpu"] else "cpu"
    return re.sub(r"[^A-Za-z0-9.-]+", "_", name).strip("_") + ".json"


def in_words(machine: dict[str, Any]) -> str:
    """The first line of the output."""
    gpu, versions = machine["gpu"], machine["versions"]
    device = f"{gpu['name']}, CUDA {gpu['cuda']}, driver {gpu['driver']}" if gpu else machine["processor"]
    why = f" ({machine['why_this_backend']})" if machine["why_this_backend"] else ""
    named = ", ".join(f"{name} {versions[name]}" for name in ("torch", "triton", "transformer-engine"))
    return f"{device}; {named}; Transformer Engine: {machine['backend']}{why}"


def _parts(names: str | None) -> Sequence[Part]:
    """The parts with these names, in their own order."""
    if names is None:
        return PARTS
    wanted = {name.strip() for name in names.split(",")}
    unknown = wanted - {part.name for part in PARTS}
    if unknown:
        known = ", ".join(part.name for part in PARTS)
        raise argparse.ArgumentTypeError(f"no such part: {', '.join(sorted(unknown))}. There are {known}.")
    return [part for part in PARTS if part.name in wanted]


def main(given: Sequence[str] | None = None) -> int:
    """Exits with 1 if a number is wrong or a part has failed, with 2 where the command cannot run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="where tensors are (default: cuda)")
    parser.add_argument("--parts", type=_parts, default=PARTS, help=f"some of {','.join(one.name for one in PARTS)}")
    parser.add_argument("--small", action="store_true", help="the sizes of a test, which a CPU has in any case")
    parser.add_argument(
        "--seconds", type=float, help=f"for all parts together (default: {SECONDS:.0f}; on a CPU as long as they take)"
    )
    parser.add_argument("--json", action="store_true", help="print what is written instead of a table")
    parser.add_argument(
        "--out", type=Path, default=BENCHMARKS / "gpu", help="where it is written (default: benchmarks/gpu)"
    )
    options = parser.parse_args(given)
    try:
        small = options.small or options.device == "cpu"
        seconds = options.seconds or (SECONDS if options.device == "cuda" else math.inf)
        check = Check(options.device, small=small, seconds=seconds)
    except CannotRunError as error:
        progress(f"{parser.prog}: {error}.")
        return 2
    found = check.run(options.parts)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / file_name(check.machine)
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if options.json:
        print(json.dumps(found, indent=1))
    else:
        print(in_words(check.machine), end="\n\n")
        parts = found["parts"].items()
        seconds = ", ".join(f"{name} {how['verdict']} ({how['seconds']:.0f} s)" for name, how in parts)
        wrong = [one for one in found["rows"] if one["ok"] is False]
        notes = f"{len(found['rows'])} rows, {len(wrong)} wrong. {seconds}. Written to {path.name}."
        notes += "".join(f"\nWRONG: {one['part']}, {one['check']}: {one['value']}. {one['note']}" for one in wrong)
        report([{**one, "verdict": _VERDICTS[one["ok"]]} for one in found["rows"]], COLUMNS, notes, as_json=False)
    return 0 if found["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
