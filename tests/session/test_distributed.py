"""Two gloo processes: over which ranks statistics are reduced, and what a failing rank leaves behind."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.lightning.models import log_of, logged_lines, marked_lines

NAME = "linear_activation_max"


def run(case: str, folder: Path) -> list[int]:
    """The exit codes of the two ranks."""
    script = Path(__file__).with_name("distributed_script.py")
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), case]
    ranks = [subprocess.Popen([*command, str(rank), str(folder)], env=environment) for rank in range(2)]
    return [process.wait(timeout=120) for process in ranks]


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("world", [{0: 2.0, 1: 2.0, 2: 2.0}, None]),
        ("all", [{0: 2.0, 1: 2.0, 2: 2.0}] * 2),
        ("own group", [{0: 1.0, 1: 1.0, 2: 1.0}, {0: 2.0, 1: 2.0, 2: 2.0}]),
        ("no reduction", [{0: 1.0, 1: 1.0, 2: 1.0}, {0: 2.0}]),
    ],
)
def test_reduction(tmp_path: Path, case: str, expected: list[dict[int, float] | None]) -> None:
    assert run(case, tmp_path) == [0, 0]
    for rank in range(2):
        if expected[rank] is None:
            assert not log_of(tmp_path / "log", rank).exists(), "the numbers are those of rank 0, which writes them"
            continue
        lines = logged_lines(tmp_path / "log", rank)
        assert {step: value for (name, step), value in lines.items() if name == NAME} == expected[rank]
        assert not set().union(*marked_lines(tmp_path / "log", rank).values()), "nothing is out of the ordinary"


def test_what_a_failing_rank_had_gathered_is_its_own(tmp_path: Path) -> None:
    _, failing = run("one fails", tmp_path)
    assert failing != 0  # 1, or the abort of a thread of gloo's that did not end with the process
    survivor = logged_lines(tmp_path / "log", 0)
    assert {step: value for (name, step), value in survivor.items() if name == NAME} == {0: 2.0, 1: 2.0, 2: 1.0}, (
        "a collective that fails leaves the rank's own numbers, under the iteration that they are of"
    )
    lines = logged_lines(tmp_path / "log", 1)
    assert {step: value for (name, step), value in lines.items() if name == NAME} == {0: 2.0, 1: 2.0, 2: 2.0}
    assert {step: lines["linear_activation_l1_norm", step] for step in range(3)} == {0: 1536.0, 1: 1536.0, 2: 1024.0}, (
        "over both ranks, and the last one of this rank alone"
    )
    for rank in range(2):
        assert marked_lines(tmp_path / "log", rank) == {0: set(), 1: set(), 2: {f"rank={rank}"}}
