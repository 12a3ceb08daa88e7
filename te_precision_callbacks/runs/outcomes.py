"""How a recorded run came out, beside its numbers: what has ended it, and whether it holds its precision contract.

print(*outcome_in_words(open_run("logs")), sep="\\n")      # The run failed in step 3: ValueError: ...
"""

from __future__ import annotations

import itertools

from te_precision_callbacks.runs.recorded import RecordedRun


def outcome_in_words(run: RecordedRun) -> list[str]:
    """That the last start of a run failed or was killed, and what is broken of its contract; empty if all is well."""
    if not run.segments:
        return []
    last = run.segments[-1]
    events = [row for row in run.events.to_pylist() if row["segment"] == last.number]
    found = []
    if last.status == "killed":
        found.append("The run was killed: its process is gone, and has not ended the records.")
    if last.status == "failed":
        ends = [row for row in events if row["kind"] == "segment_ended" and row["severity"] == "error"]
        for row in ends[:1]:
            why, *_ = (row["text"] or "").splitlines() or [""]
            found.append(f"The run failed in step {row['iteration']}: {why.rstrip(':.')}.")
        if not ends:
            found.append("The run failed.")
    judged = [row for row in events if row["kind"] == "contract_judged"]
    if judged and judged[-1]["severity"] != "info":
        found.append(broken_in_short(judged[-1]["text"] or ""))
    return found


def broken_in_short(message: str) -> str:
    """A message about a broken contract in one line: what is broken, without the products that do it."""
    heading, *lines = message.splitlines() or [""]
    clauses = [line[2:] for line in itertools.takewhile(lambda line: line.startswith("- "), lines)]
    return " ".join([heading, *clauses])
