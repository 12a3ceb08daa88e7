"""How a recorded run came out, beside its numbers: what has ended it.

print(*outcome_in_words(open_run("logs")), sep="\\n")      # The run failed with step 3 as the last one: ...
"""

from __future__ import annotations

import itertools
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.runs.recorded import RecordedRun


def outcome_in_words(run: RecordedRun) -> list[str]:
    """That the last start of a run failed or was killed; empty if it did not."""
    if not run.segments:
        return []
    last, found = run.segments[-1], []
    events = run.events.filter(pc.equal(run.events["segment"], last.number))
    if last.status == "stopped without an end":
        found.append("The run stopped without an end: its process is gone, and has not closed the records.")
    if last.status == "failed":
        ends = [row for row in _of_kind(events, "segment_ended") if row["severity"] == "error"]
        why = [f" with step {row['iteration']} as the last one: {_first_line(row['text'])}" for row in ends[:1]]
        is_interrupted = any((row["text"] or "").startswith("KeyboardInterrupt") for row in ends[:1])
        found.append(f"The run {'was interrupted' if is_interrupted else 'failed'}{''.join(why)}.")
    return found


def _of_kind(events: pa.Table, kind: str) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = events.filter(pc.equal(events["kind"], kind)).to_pylist()
    return rows


def _first_line(text: str | None) -> str:
    return (text or "").partition("\n")[0].rstrip(":. ")


def broken_in_short(message: str) -> str:
    """A message about a broken contract in one line: what is broken, without the products that do it."""
    heading, *lines = message.splitlines() or [""]
    clauses = [line[2:] for line in itertools.takewhile(lambda line: line.startswith("- "), lines)]
    return " ".join([heading, *clauses])
