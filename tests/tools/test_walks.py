"""The walks of docs/architecture.md are those of a real run."""

from __future__ import annotations

import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.forked import executable

ROOT = Path(__file__).parents[2]
ENGINE, INSTRUMENTATION = "Transformer Engine", "instrumentation"


def section() -> str:
    return (ROOT / "docs" / "architecture.md").read_text().partition("## Six walks\n")[2].partition("\n## ")[0]


@pytest.mark.slow  # two small trainings in a process of their own
@pytest.mark.skipif(sys.version_info < (3, 11), reason="code has no qualified name before Python 3.11")
def test_the_table_is_that_of_a_run() -> None:
    command = [executable(), str(ROOT / "tools" / "walks.py")]
    ended = subprocess.run(command, capture_output=True, text=True, check=True)
    assert ended.stdout in section(), "if the page should show this now: .venv/bin/python tools/walks.py"


def test_only_transformer_engine_is_between_two_entries_of_instrumentation() -> None:
    rows = [line.strip("| ").split(" | ")[-1] for line in section().splitlines() if line.startswith("| ")][1:]
    ways = [way.split(", ") for row in rows for way in row.split("; or ")]
    assert len(ways) > 15
    for way in ways:
        way = way[1:] if way[0] == "coverage" else way  # its call around each module of the model
        entries = [place for place, room in enumerate(way) if room == INSTRUMENTATION]
        assert all(way[first + 1 : second] == [ENGINE] for first, second in pairwise(entries)), way
        others = [room for room in way if room not in (ENGINE, INSTRUMENTATION)]
        assert len(set(others)) == len(others), way
