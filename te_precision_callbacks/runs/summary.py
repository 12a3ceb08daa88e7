"""Facts about a recorded run that several views show: contents, precision shares, loss, and how it ended."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import defaultdict
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import pyarrow.compute as pc

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.runs.recorded import RecordedRun, Segment
from te_precision_callbacks.runs.tables import facts_at_end

_MOST_NAMED = 4

_OF_LAST_STEPS = ("text", "rank", "tensors", "iterations", "magnitudes", "first")

_ROUTINE_EVENTS = {"segment_started", "segment_ended"}


def has_numbers(run: RecordedRun) -> bool:
    return bool(len(run.series) or len(run.scalars) or len(run.gemms))


def why_nothing_to_show(run: RecordedRun) -> str:
    has_failed = any(segment.status == "failed" for segment in run.segments)
    if has_numbers(run) or has_failed or set(run.events["kind"].to_pylist()) - _ROUTINE_EVENTS:
        return ""
    return (
        f"{visible(str(run.path))} has no records. Train for at least one step; a killed process loses the step that it"
        " was in."
    )


def no_step_note(run: RecordedRun) -> list[str]:
    if has_numbers(run) or len(run.steps) or run.unread:
        return []
    yet = " yet" if run.segments and run.segments[-1].status == "running" else ""
    return [f"The run has no step{yet}, so it has no statistics and no coverage."]


def precision_shares(run: RecordedRun) -> dict[str, float]:
    """Return precision -> share of the multiply-adds, from 0 to 1, largest first."""
    macs: dict[str, int] = defaultdict(int)
    for row in facts_at_end(run.gemms).select(["precision", "macs"]).to_pylist():
        if row["precision"] and row["macs"]:
            macs[row["precision"]] += row["macs"]
    whole = sum(macs.values())
    return {name: macs[name] / whole for name in sorted(macs, key=lambda name: -macs[name])}


def not_counted_notes(run: RecordedRun) -> list[str]:
    """Return a note on products that the shares leave out."""
    gemms = facts_at_end(run.gemms)
    rows = gemms.filter(pc.equal(gemms["runs"], "uncounted")).to_pylist()
    layers = group_by_key(dict.fromkeys((row["not_run"] or "", row["layer"]) for row in rows))
    texts = [f"{why} ({', '.join(names[:_MOST_NAMED])})" for why, names in layers.items()]
    if texts:
        return [f"The shares of the multiply-adds leave out: {'; '.join(texts)}."]
    return []


_TRAINING_WORDS = frozenset({"loss", "train", "training", "total", "step", "batch", "lm"})


@lru_cache
def words_of(name: str) -> frozenset[str]:
    return frozenset(re.split(r"[/._\s-]", name.lower()))


@lru_cache
def is_loss(name: str) -> bool:
    words = words_of(name)
    return "loss" in words and "scale" not in words


@lru_cache
def is_training_loss(name: str) -> bool:
    """Return whether a scalar must be the training loss; others, such as ``best_loss``, may be inf in a healthy run."""
    return is_loss(name) and words_of(name) <= _TRAINING_WORDS


def loss_first(names: Iterable[str]) -> list[str]:
    """Sort names of scalars: the most likely training loss first, then other losses, then all others."""
    return sorted(names, key=lambda name: (not is_loss(name), name != "loss", "train" not in name, name))


def last_steps(run: RecordedRun) -> dict[str, Any] | None:
    """Return the last steps before the earliest inf or nan, or else before the first problem, or else the last ones.

    None without any.

    As :meth:`~te_precision_callbacks.flight.steps.LastSteps.as_json`, and ``text``; ``rank``; ``loss``: the training
    loss in each iteration, or None.
    """
    rows = run.events.filter(pc.field("kind") == "last_steps").to_pylist()
    recorded = [{**row, **json.loads(row["data"])} for row in rows]
    if not recorded:
        return None
    problems = [row for row in recorded if row["is_problem"]]
    others = [row for row in reversed(recorded) if not row["is_problem"]]
    chosen = min(problems + others, key=lambda row: row["first"][1] if row["first"] else math.inf)
    losses: dict[int, float] = {}
    name = next(filter(is_loss, loss_first(run.curves)), None)
    if name is not None:
        losses = dict(zip(run.curves[name].iterations.tolist(), run.curves[name].values.tolist(), strict=True))
    values = map(losses.get, chosen["iterations"])
    loss = [value if value is None or math.isfinite(value) else str(value) for value in values]
    return {**{name: chosen[name] for name in _OF_LAST_STEPS}, "loss": loss}


# ---------------------------------------------------------------------- end of the run


def format_status(run: RecordedRun) -> str:
    """Return the status of the last segment; ``ended early`` after Ctrl-C, SIGTERM or ``sys.exit()``."""
    if not run.segments:
        return "unknown"
    segment = run.segments[-1]
    if segment.status == "failed" and ended_by(_error_at_the_end(run, segment)[0]):
        return "ended early"
    return segment.status


def outcome_notes(run: RecordedRun) -> list[str]:
    if not run.segments:
        return []
    segment = run.segments[-1]
    if segment.lost:
        return [f"The records of the run end early: {segment.lost}. Set log_dir= to a disk with free space."]
    if segment.status == "stopped without an end":
        who = segment.who_stopped
        return [f"{who[0].upper()}{who[1:]} stopped without an end: its process is gone and did not close the records."]
    if segment.status != "failed":
        return []
    text, step = _error_at_the_end(run, segment)
    if not text:
        return ["The run failed."]
    if ended_from_outside := ended_by(text):
        return [f"The run was ended by {ended_from_outside} after step {step}: the steps until then were checked."]
    return [f"The run failed (last step: {step}): {text}."]


def failed_starts(run: RecordedRun) -> list[tuple[int, str]]:
    """Return step and description of each failure before the run was resumed; an end such as SIGTERM is none."""
    failures = []
    for number, segment in enumerate(run.segments[:-1], 1):
        error, step = _error_at_the_end(run, segment)
        if segment.status == "stopped without an end":
            how = "stopped without recording an end"
        elif error and not ended_by(error):
            how = f"was ended by {error}"
        else:
            continue
        failures.append((max(step, 0), f"start {number} of the run {how}, before the run was resumed"))
    return failures


def _error_at_the_end(run: RecordedRun, segment: Segment) -> tuple[str, int]:
    """Return the first line of the error that ended a segment, if any, and the last step."""
    is_end = (pc.field("segment") == segment.number) & (pc.field("kind") == "segment_ended")
    for row in run.events.filter(is_end).to_pylist():
        if row["severity"] == "error":
            return (row["text"] or "").partition("\n")[0].rstrip(":. "), row["iteration"]
    return "", -1


def ended_by(error: str) -> str:
    """Return the cause, such as ``Ctrl-C``, that ended a run without a failure, from the first line of its error."""
    name, _, text = error.partition(":")
    if name == "SystemExit" and text:  # an exit status other than 0
        return ""
    return _FROM_OUTSIDE.get(name, "")


_FROM_OUTSIDE = {
    "KeyboardInterrupt": "Ctrl-C",
    "SystemExit": "sys.exit()",
    "SIGTERM": "SIGTERM",
    "SIGTERMException": "SIGTERM",  # Lightning's
    "ProcessEnded": "the end of the process (exit status not known)",
}


def summarize_broken_contract(message: str) -> str:
    heading, *lines = message.splitlines() or [""]
    clauses = [line[2:] for line in itertools.takewhile(lambda line: line.startswith("- "), lines)]
    return " ".join([heading, *clauses])
