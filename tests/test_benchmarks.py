"""The benchmarks run, and their JSON says what their readers rely on. No time is asserted: machines differ."""

from __future__ import annotations

import json
import math
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.forked import executable

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"


def cases_of(script: str, *arguments: str, names: str = "case") -> dict[Any, dict[str, Any]]:
    """The JSON of a benchmark: name of a case -> its numbers."""
    # torch.compile does nothing here: compiling Transformer Engine's functions takes longer than all the rest.
    environment = {**os.environ, "TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1"}
    command = [executable(whole=True), str(BENCHMARKS / script), "--json", *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {case[names]: case for case in json.loads(done.stdout)}


def test_stats() -> None:
    cases = cases_of("stats.py", "--size", "160", "--repeats", "1", "--device", "cpu")
    assert len(cases) == 9
    for case in cases.values():
        for key in ("ours_ms", "te_ms", "te_eager_ms", "ratio", "read_once_ms", "flush_ms"):
            assert case[key] > 0, (key, case)
        assert case["te_ms"] == min(case["te_eager_ms"], case["te_compile_ms"] or math.inf)
        assert case["ratio"] == pytest.approx(case["te_ms"] / case["ours_ms"])
        assert case["te_mode"] in ("eager", "torch.compile")
        assert case["shape"] == [160, 160]
        assert "torch" in case["machine"]
    assert {case["path"] for name, case in cases.items() if "plain torch" in name} == {"eager"}
    assert {case["dtype"] for case in cases.values()} == {"float32", "bfloat16"}
    assert {len(case["statistics"]) for case in cases.values()} == {4, 5, 8, 13}


def test_step() -> None:
    sizes = {"layers": 1, "hidden": 64, "sequence": 32, "batch": 2}
    cases = cases_of("step.py", *(f"--{name}={size}" for name, size in sizes.items()), "--steps=1")
    assert list(cases) == [
        "tensor statistics",
        "tensor and FP8 statistics",
        "fused, tensor statistics",
        "fused, tensor and FP8 statistics",
        "nothing due",
        "layers without features",
    ]
    for case in cases.values():
        assert case["none_ms"] > 0
        assert case["ours_ms"] > 0
        # What is added may be below zero: at this size it is noise.
        assert case["ours_added_ms"] == pytest.approx(case["ours_ms"] - case["none_ms"])
        assert sizes.items() <= case.items()
        assert "torch" in case["machine"]
    tokens, hidden = sizes["sequence"] * sizes["batch"], sizes["hidden"]
    # qkv, proj, fc1, fc2: inputs and their gradients, outputs and theirs; weights and theirs.
    inputs, outputs = 1 + 1 + 1 + 4, 3 + 1 + 4 + 1
    elements = 2 * tokens * hidden * (inputs + outputs) + 2 * hidden * hidden * (3 + 1 + 4 + 4)
    for name in ("tensor statistics", "tensor and FP8 statistics"):
        case = cases[name]
        assert case["te_ms"] > 0
        assert case["te_mode"] in ("eager", "torch.compile")
        assert case["te_added_ms"] == pytest.approx(min(case["te_eager_added_ms"], case["te_compile_added_ms"]))
        assert case["ratio"] == pytest.approx(case["te_added_ms"] / case["ours_added_ms"])
        assert case["watched_elements"] == elements
        assert case["te_ns_per_element"] == pytest.approx(1e6 * case["te_added_ms"] / elements)
        assert case["ours_ns_per_element"] == pytest.approx(1e6 * case["ours_added_ms"] / elements)


def test_backend() -> None:
    sizes = ("--layers=1", "--hidden=128", "--sequence=32", "--batch=1", "--steps=1")
    cases = cases_of("backend.py", *sizes, "--capability=9.0", names="name")
    without, plain = cases["without FP8 bfloat16"], cases["plain torch bfloat16"]
    assert without["ratio"] == pytest.approx(without["step_ms"] / plain["step_ms"])
    assert cases["DelayedScaling float32"]["to"] == "without FP8"
    assert len(cases) == 10


def test_host() -> None:
    cases = cases_of("host.py", "--tensors", "3", "30", "--repeats", "1", names="tensors")
    assert list(cases) == [3, 30]
    for case in cases.values():
        parts = [key for key in case if key.endswith("_us")]
        assert len(parts) == 8
        assert all(case[part] > 0 for part in parts)
        assert case["numbers"] == case["tensors"] * 8


def test_plan() -> None:
    (case,) = cases_of("plan.py", "--layers", "50").values()
    assert all(case[part] > 0 for part in ("build_s", "check_s", "rows_s"))
    assert case["added_mib"] >= 0
    assert case["lines"] < 40, "equal layers are one row"


def test_dumps() -> None:
    sizes = {"layers": 1, "hidden": 64, "sequence": 32, "batch": 2}
    cases = cases_of("dumps.py", *(f"--{name}={size}" for name, size in sizes.items()), "--steps=1")
    (case,) = cases.values()
    for key in ("none_ms", "ours_ms", "te_ms", "ours_left_ms"):
        assert case[key] > 0, (key, case)
    for name in ("ours", "te"):
        assert case[f"{name}_added_ms"] == pytest.approx(case[f"{name}_ms"] - case["none_ms"])
    assert case["ratio"] == pytest.approx(case["te_added_ms"] / case["ours_added_ms"])
    assert sizes.items() <= case.items()
    assert "torch" in case["machine"]
    # float32 activation, weight, gradient and output of the qkv projection, and two layouts of the codes of three.
    tokens, hidden = sizes["sequence"] * sizes["batch"], sizes["hidden"]
    operands = tokens * hidden + 3 * hidden * hidden + tokens * 3 * hidden
    least = 4 * (operands + tokens * 3 * hidden) + operands
    assert least < case["bytes_per_step"] < least + operands + 4 * (1 << 13)


def test_records() -> None:
    cases = cases_of("records.py", "--values=20000", "--series=200")
    assert list(cases) == ["write", "open", "read", "import", "compare", "report"]
    for case in cases.values():
        assert case["seconds"] > 0
        assert case["peak_mib"] > 0
        assert case["files_mib"] > 0
    assert 0 < cases["write"]["handed_us"] < cases["write"]["cpu_us"]
