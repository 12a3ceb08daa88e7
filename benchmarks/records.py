"""What recorded runs cost: microseconds a value that is written, and seconds and memory of reading them.

    python benchmarks/records.py [--json] [--values 10000000] [--series 12000]

  write       a session's sink: ``handed_us`` is what the training thread pays for a value, ``cpu_us`` all that the
              process does for it, in the sink's thread and in the other.
  open        open_run of what was written.
  read        all of its numbers.
  import      open_run of the same numbers as a statistics log of nvidia-dlfw-inspect.
  compare     the run with a second one, with a third one as the noise: so many values of each.
  report      the page of what was written, with open_run; ``files_mib`` is its size.
  limit       as write, with a limit of two bytes for each value that comes: most of them are thinned out again.
              ``kept_percent`` of the values are left.
Each case has a process of its own; its memory is the most that it has had, with the imports.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import tempfile
import time
import zlib
from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

COLUMNS = ("case", "values", "seconds", "handed_us", "cpu_us", "peak_mib", "files_mib", "kept_percent")
STATISTICS = (
    "min",
    "max",
    "mean",
    "std",
    "l1_norm",
    "l2_norm",
    "cur_amax",
    "underflows%",
    "mse",
    "sqnr_db",
    "zeros%",
    "x",
)


def names(series: int) -> list[tuple[str, str, str]]:
    """Layer, tensor and statistic of so many series."""
    return [
        (
            f"model.layers.{number // 36}.fc1",
            ("activation", "weight", "gradient")[number // 12 % 3],
            STATISTICS[number % 12],
        )
        for number in range(series)
    ]


def write(folder: Path, values: int, series: int, limit: int = 1 << 40) -> dict[str, float]:
    """Record a run."""
    from te_precision_callbacks.runs.sink import RecordSink
    from te_precision_callbacks.sinks.step_records import RunInfo, StepRecords
    from te_precision_callbacks.statistics.series import SeriesTable

    table = SeriesTable()
    numbers = np.array([table.intern(*name) for name in names(series)], np.int32)
    generator = np.random.default_rng(zlib.crc32(folder.name.encode()))  # runs that are compared differ
    own = [False] * series
    sink = RecordSink(folder, limit)
    begun, cpu, handed = time.perf_counter(), time.process_time(), 0.0
    sink.start(RunInfo(folder, 0, 1, 0, (), {}, "benchmark"))
    for iteration in range(values // series):
        step = array("d", generator.standard_normal(series).tobytes())
        records = StepRecords(iteration, iteration, table, numbers, step, own=own)
        before = time.perf_counter()
        sink.write(records)
        handed += time.perf_counter() - before
    sink.close(None)
    seconds, written = time.perf_counter() - begun, values // series * series
    return {
        "seconds": seconds,
        "handed_us": 1e6 * handed / written,
        "cpu_us": 1e6 * (time.process_time() - cpu) / written,
    }


def write_limited(folder: Path, values: int, series: int) -> dict[str, float]:
    """Record a run that reaches its limit: two bytes for each value that comes."""
    from te_precision_callbacks.runs import open_run

    limited = folder.parent / "limited"
    found = write(limited, values, series, 2 * values)
    size = sum(file.stat().st_size for file in limited.rglob("*") if file.is_file())
    run = open_run(limited)
    kept = len(run.values()) / (values // series * series)
    if size > 2 * values or not run.thinned:
        raise SystemExit(f"{size} bytes, of {2 * values}")
    return {**found, "files_mib": size / 2**20, "kept_percent": 100 * kept}


def open_only(folder: Path, values: int, series: int) -> dict[str, float]:
    """Open a recorded run."""
    from te_precision_callbacks.runs import open_run

    begun = time.perf_counter()
    run = open_run(folder)
    seconds = time.perf_counter() - begun
    if sum(run.series["count"].to_pylist()) != values // series * series:
        raise SystemExit("values are missing")
    return {"seconds": seconds}


def read(folder: Path, values: int, series: int) -> dict[str, float]:
    """Read all numbers of a recorded run."""
    from te_precision_callbacks.runs import open_run

    run = open_run(folder)
    begun = time.perf_counter()
    if len(run.values()) != values // series * series:
        raise SystemExit("values are missing")
    return {"seconds": time.perf_counter() - begun}


def compare_all(folder: Path, values: int, series: int) -> dict[str, float]:
    """Compare a recorded run with those beside it."""
    from te_precision_callbacks.runs import open_run
    from te_precision_callbacks.views.compare import compare

    begun = time.perf_counter()
    a, b, noise = (open_run(path) for path in (folder, *(folder.parent / name for name in BESIDE)))
    if compare(a, b, noise=[noise]).pairing.values != values // series * series:
        raise SystemExit("values are missing")
    return {"seconds": time.perf_counter() - begun}


def log(folder: Path, values: int, series: int) -> Path:
    """Write the same numbers as a statistics log."""
    logs = folder / "nvdlfw_inspect_statistics_logs"
    logs.mkdir(parents=True)
    generator = np.random.default_rng(0)
    joined = ["_".join(name) for name in names(series)]
    with (logs / "nvdlfw_inspect_globalrank-0.log").open("w") as file:
        for iteration in range(values // series):
            middle = f" \t\t\t\t iteration={iteration:06d} \t\t\t\t value="
            numbers = generator.standard_normal(series).tolist()
            file.writelines(
                f"2026-11-22 13:01:44,718 - INFO - {name}{middle}{number:.4f}\n"
                for name, number in zip(joined, numbers, strict=True)
            )
    return folder


BESIDE = ("another", "noise")
"""The runs that are compared with the first one."""


def make_page(folder: Path, values: int, series: int) -> dict[str, float]:
    """Write the page of a recorded run."""
    from te_precision_callbacks.runs import open_run
    from te_precision_callbacks.views.report import write_report

    begun = time.perf_counter()
    size = write_report(open_run(folder), folder / "report.html").stat().st_size
    (folder / "report.html").unlink()
    return {"seconds": time.perf_counter() - begun, "files_mib": size / 2**20}


CASES: Mapping[str, tuple[str, Callable[[Path, int, int], dict[str, float]]]] = {
    "write": ("records", write),
    "open": ("records", open_only),
    "read": ("records", read),
    "import": ("log", open_only),
    "compare": ("records", compare_all),
    "report": ("records", make_page),
    "limit": ("records", write_limited),
}
"""Case -> the folder that it works on, ``records`` or ``log``, and what it does."""


def in_a_process(case: str, folder: Path, values: int, series: int) -> dict[str, Any]:
    """Run one case in a process of its own."""
    command = [sys.executable, __file__, "--case", case, str(folder), str(values), str(series)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def run_case(case: str, folder: Path, values: int, series: int) -> None:
    """What the process of one case does."""
    found: dict[str, float] = CASES[case][1](folder, values, series)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)
    print(json.dumps({**found, "peak_mib": peak}))


def main(given: list[str] | None = None) -> None:
    import torch
    from measuring import arguments, machine, progress, report

    parser = arguments(__doc__)
    parser.add_argument("--values", type=int, default=10_000_000, help="the values (default: 10^7)")
    parser.add_argument("--series", type=int, default=12_000, help="the values of a step (default: 12,000)")
    options = parser.parse_args(given)
    described = machine(torch.device("cpu"))
    progress(described) if options.json else print(described, end="\n\n")
    with tempfile.TemporaryDirectory() as temporary:
        folders = {"records": Path(temporary, "records"), "log": Path(temporary, "log")}
        log(folders["log"], options.values, options.series)
        rows = []
        for case, (what, _) in CASES.items():
            progress(case)
            if case == "compare":
                for name in BESIDE:
                    in_a_process("write", Path(temporary, name), options.values, options.series)
            found = in_a_process(case, folders[what], options.values, options.series)
            size = sum(file.stat().st_size for file in folders[what].rglob("*") if file.is_file()) / 2**20
            rows.append({"case": case, "values": options.values, "files_mib": size, **found, "machine": described})
    report(rows, COLUMNS, "Seconds; peak_mib: the most memory of the process.", as_json=options.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--case"]:
        run_case(sys.argv[2], Path(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
    else:
        main()
