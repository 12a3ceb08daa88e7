"""The benchmarks run, and their JSON has the expected keys. Times are not asserted: machines differ."""

import contextlib
import importlib
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.forked import executable

pytestmark = pytest.mark.processes

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def cases_of(script: str, *arguments: str, names: str = "case") -> dict[Any, dict[str, Any]]:
    return {case[names]: case for case in json.loads(called([str(BENCHMARKS / script), "--json", *arguments]))}


def called(command: list[str]) -> str:
    # torch.compile does nothing here: compiling Transformer Engine's functions takes longer than all the rest.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [executable(whole=True), *command]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


SHORTEST = ("--seconds=0", "--least=1")


@pytest.mark.extended
def test_stats_benchmark_measures_every_case() -> None:
    cases = cases_of("stats.py", "--size", "160", *SHORTEST)
    assert len(cases) == 8
    for case in cases.values():
        for key in ("ours_ms", "ours_reads", "te_ms", "read_once_ms", "flush_ms"):
            assert 0 < case[key]["low"] <= case[key]["value"] <= case[key]["high"], (key, case)
        assert case["ratio"] == pytest.approx(case["te_ms"]["value"] / case["ours_ms"]["value"])
        assert case["shape"] == [160, 160]
        assert "torch" in case["machine"]
    assert {name.rpartition(", ")[2] for name in cases} == {"float32", "bfloat16"}


STEP_CASES = {
    "statistics": [
        "tensor statistics",
        "tensor and FP8 statistics",
        "fused, tensor statistics",
        "fused, tensor and FP8 statistics",
        "nothing due",
    ],
    "default": ["start, first step and stop", "a collection step", "five other steps"],
    "gemms": ["a step in which all GEMMs are measured", "another step"],
    "overflow": ["float32", "bfloat16"],
}


@pytest.mark.extended
@pytest.mark.parametrize("mode", STEP_CASES)
def test_step_benchmark_measures_every_case(mode: str) -> None:
    sizes = {"layers": 1, "hidden": 64, "sequence": 32, "batch": 2}
    cases = cases_of("step.py", mode, *(f"--{name}={size}" for name, size in sizes.items()), *SHORTEST)
    assert list(cases) == STEP_CASES[mode]
    for case in cases.values():
        assert case["none_ms"]["value"] > 0
        # The added time may be below zero: at this size it is noise.
        added = case["ours_added_ms"]["value"]
        assert case["ours_added_percent"]["value"] == pytest.approx(100 * added / case["none_ms"]["value"]), "one pair"
        assert case["pairs"] == 1
        assert sizes.items() <= case.items()
        assert "torch" in case["machine"]
    compared = {"statistics": STEP_CASES["statistics"][:2], "overflow": STEP_CASES["overflow"]}.get(mode, [])
    assert [name for name, case in cases.items() if case["upstream_added_percent"]] == compared


@pytest.mark.extended
def test_the_parts_of_a_watched_step() -> None:
    cases = cases_of("step.py", "watch", "--hidden=64", "--sequence=32", "--batch=2", *SHORTEST)
    *parts, whole = (case["ours_processor_percent"] for case in cases.values())
    assert list(cases) == ["GEMMs", "gradients", "weights and end of step", "all"]
    assert 0 < min(parts) <= sum(parts) < 100
    assert whole == pytest.approx(sum(parts))


# --- host_path.py -----------------------------------------------------------------------------------------------------

HOST_PATH = {
    "Python functions per observed tensor": 61,  # with 1 layer; 10 with 24
    "calls per observed tensor, with builtins": 150,
    "aten calls per observed GEMM": 2.3,
    "allocations per observed GEMM": 1,  # the norm of each gradient
    "every step: Python functions per GEMM": 13,
    "every step: calls per GEMM, with builtins": 50,
    "every step: aten calls per GEMM": 2.3,  # 13 of a step for the updates of all weights
}
"""Limits of exact counts. A change that raises one makes every observed step slower."""


@pytest.mark.slow  # it compiles kernels
def test_host_path_has_no_more_work_than_before() -> None:
    pytest.importorskip("triton")
    if not (os.environ.get("CC") or shutil.which("gcc") or shutil.which("clang")):
        pytest.skip("there is no C compiler, which the stub of libcuda needs")
    values = {name: case["value"] for name, case in cases_of("host_path.py", "--layers", "1").items()}
    assert values["observed tensors"] == 22
    assert values["aten calls of all planned GEMMs"] == 0
    assert values["launches in a step"] == 12, "one for each GEMM"
    assert values["every step: launches in a step"] == 8, "none for dgrad, whose gradient wgrad reads"
    assert values["microseconds of a launch, two tensors with codes"] > 0
    for name, limit in HOST_PATH.items():
        assert 0 < values[name] <= limit, name


# --- gpu_check.py -----------------------------------------------------------------------------------------------------


NAMES = (
    *("kernels", "large", "streams", "hopper", "blackwell", "gemm_error", "capture"),
    *("ranks", "parity", "launches", "overflow", "bandwidth"),
    "overhead",
)


def rows_of(found: dict[str, Any], part: str) -> dict[str, dict[str, Any]]:
    rows = [row for row in found["rows"] if row["part"] == part]
    assert len({row["check"] for row in rows}) == len(rows) > 0, part
    return {row["check"]: row for row in rows}


GOOD = (
    ("launches", "fused: host waits of ours in forward and backward"),
    ("launches", "debug: host waits of ours in forward and backward"),
    ("hopper", "Float8BlockScaling: losses, gradients and weights with a session"),
    ("large", "16,448 elements, transposed"),
    ("ranks", "two ranks over gloo: activation std, step 2, rank 1"),
    ("gemm_error", "block, 128, wgrad: error over its tolerance"),
)
POSITIVE = (
    ("overhead", "default config, a collection step: a step"),
    ("bandwidth", "8 of the tensor, bfloat16, 160 x 160: ratio"),
)


@pytest.mark.extended
def test_gpu_check_runs_all_parts_on_a_cpu(tmp_path: Path) -> None:
    separately = ("blackwell", "parity")  # another capability than the processes' here
    parts = [part for part in NAMES if part not in separately]
    printed = called(
        [str(BENCHMARKS / "gpu_check.py"), "--device", "cpu", "--out", str(tmp_path), "--parts", ",".join(parts)]
    )
    result = json.loads((tmp_path / "cpu.json").read_text())
    assert result["ok"] is True
    verdicts = {name: part["verdict"] for name, part in result["parts"].items()}
    assert verdicts == dict.fromkeys(parts, "passed") | {"capture": "cannot run here"}
    assert result["parts"]["capture"]["why"] == "needs a GPU"
    assert not [row for row in result["rows"] if row["ok"] is False]
    assert result["machine"]["backend"] == "reference"
    assert result["machine"]["versions"]["torch"]
    assert str(BENCHMARKS.parent) not in json.dumps(result), "it names no folder of this machine"
    kernels = rows_of(result, "kernels")
    assert all(row["ok"] and row["value"] <= 1 for row in kernels.values() if row["expected"])
    dtypes = ("float32", "bfloat16", "float8_e4m3fn", "float16", "float8_e5m2")
    views = ("transposed", "rows in whole runs", "5 dimensions", "6 dimensions")
    assert {
        *(f"{dtype}, with inf and nan" for dtype in dtypes),
        *(f"{dtype}, sliced" for dtype in dtypes[:3]),
        *(f"float32, {view}" for view in views),
    } <= kernels.keys()
    for part, check in GOOD:
        assert rows_of(result, part)[check]["ok"] is True, check
    for part, check in POSITIVE:
        assert rows_of(result, part)[check]["value"] > 0, check
    assert rows_of(result, "streams")["statistics, growing vectors: wrong numbers"]["value"] == 0
    assert rows_of(result, "overflow")["host waits added to a step"]["value"] == 1
    assert rows_of(result, "gemm_error")["mxfp8"]["note"] == "this GPU does not have it"
    header, _, *table = [line for line in printed.splitlines() if line.startswith("|")]
    assert "verdict" in header
    assert len(table) == len(result["rows"])


@pytest.mark.extended
def test_proof_names_a_planted_defect() -> None:
    options = ("--kinds", "not-fp8", "--draws", "1", "--blocks", "4", "--models", "bytes")
    case = cases_of("proof/contest.py", *options, names="kind")["not-fp8"]
    assert case["right"], case["first"]
    assert case["exact"]
    assert 0 <= case["delay"] <= 10


@pytest.mark.extended
def test_proof_names_a_published_bug_and_goes_on(tmp_path: Path) -> None:
    name = "lost-tie-current-session"
    left = tmp_path / f"{name}-broken" / "left.txt"
    left.parent.mkdir()
    left.touch()
    options = ("--names", name, "--draws", "1", "--folder", str(tmp_path))
    rows = cases_of("proof/external.py", *options, names="name")
    assert rows[f"{name}-broken"]["found"] == "warning", rows[f"{name}-broken"]["first"]
    assert rows[f"{name}-healthy"]["silent"], rows[f"{name}-healthy"]["first"]
    assert not left.exists(), "what an interrupted training left is removed"
    recorded = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert cases_of("proof/external.py", *options, names="name") == rows
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*")} == recorded


@pytest.mark.extended
def test_proof_applies_a_remedy() -> None:
    rows = cases_of("proof/remedies.py", "--names", "no-zero-grad", "--models", "vit", names="remedy")
    row = rows["optimizer.zero_grad()"]
    assert row["found"]
    assert row["gone"]
    assert row["remedied"] == row["healthy"]
    assert row["hurts"] == (row["broken"] - row["healthy"] > 0.1 * (row["first"] - row["healthy"]))


CPU = torch.device("cpu")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """benchmarks/measuring.py."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    yield importlib.import_module("measuring")
    sys.modules.pop("measuring", None)


class Machine:
    """Its time passes only in calls. It changes its speed now and then by a half, and each call by some percent."""

    def __init__(self, clock: Any, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
        self.now = 0.0
        self._random, self._speed = random.Random(seed), 1.0
        for name in ("perf_counter", "process_time", "monotonic"):
            monkeypatch.setattr(clock.time, name, lambda: self.now)
        monkeypatch.setattr(clock, "progress", lambda message: None)

    def taking(self, seconds: float) -> Callable[[], Any]:
        def call() -> None:
            if self._random.random() < 0.05:
                self._speed = self._random.choice([1.0, 1.5])
            self.now += seconds * self._speed * self._random.lognormvariate(0.0, 0.03)

        return lambda: contextlib.nullcontext(call)


@pytest.mark.extended
def test_an_interval_covers_the_true_value_at_its_stated_rate(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """95 % is stated; fewer than 87 of 100 intervals hold it with a probability of 6e-4."""
    held = 0
    for seed in range(100):
        machine = Machine(clock, monkeypatch, seed)
        ways = {"slower": machine.taking(0.0103)}
        pairs = clock.in_turn(ways, machine.taking(0.01), CPU, share=1.0, seconds=0, least=24, seed=seed)
        ratio = pairs["slower"].ratio()
        held += ratio.low <= 1.03 <= ratio.high
    assert held >= 87


def test_it_stops_when_the_interval_is_narrow(clock: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(clock, monkeypatch, 1)
    ways = {"cheap": machine.taking(0.0101), "dear": machine.taking(0.012)}
    pairs = clock.in_turn(ways, machine.taking(0.01), CPU, share=0.01, seconds=1e6)
    cheap, dear = pairs["cheap"].ratio(), pairs["dear"].ratio()
    assert cheap.high <= 1.03 < dear.low
    assert all(ratio.high - ratio.low <= 0.02 * ratio.value for ratio in (cheap, dear))
    assert clock.in_turn(ways, machine.taking(0.01), CPU, share=0.0, seconds=0)["dear"].ways[8:] == []
