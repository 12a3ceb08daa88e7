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
    """What ended the last start of a run before its last step; empty if nothing did."""
    if not run.segments:
        return []
    last = run.segments[-1]
    if last.status == "killed":
        return ["The run was killed: its process is gone, and has not ended the records."]
    if last.status != "failed":
        return []
    events = run.events.filter(pc.equal(run.events["segment"], last.number))
    ends = [row for row in _of_kind(events, "segment_ended") if row["severity"] == "error"]
    if not ends:
        return ["The run failed."]
    text, step = _first_line(ends[0]["text"]), ends[0]["iteration"]
    if ended_from_outside := ended_by(text):
        return [f"The run was ended by {ended_from_outside} after step {step}: the verdict is on the steps until then."]
    return [f"The run failed with step {step} as the last one: {text}."]


def ended_by(error: str) -> str:
    """What ended a run that did not fail, such as ``Ctrl-C`` or ``SIGTERM``; empty for a failure.

    Args:
        error: the first line about the exception that ended it: its class and text.
    """
    name, _, text = error.partition(":")
    if name == "SystemExit" and text.strip() not in ("", "0", "None"):
        return ""
    return _FROM_OUTSIDE.get(name, "")


_FROM_OUTSIDE = {
    "KeyboardInterrupt": "Ctrl-C",
    "SystemExit": "sys.exit()",
    "Terminated": "SIGTERM",
    "SIGTERMException": "SIGTERM",  # Lightning's
    "ProcessEnded": "the end of the process",
}


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
