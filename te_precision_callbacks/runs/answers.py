"""Facts about a recorded run that several views show: whether anything was recorded, how much ran in which precision,
what was not measured, which of its numbers is the loss, and what ended it."""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable

import pyarrow.compute as pc

from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.tables import at_the_end

_MOST_NAMED = 4

_OF_EVERY_RUN = {"segment_started", "segment_ended"}
"""Kinds of events that say nothing of what happened."""


def has_numbers(run: RecordedRun) -> bool:
    """Whether a run has any number, of a layer or of the trainer, or a coverage."""
    return bool(len(run.series) or len(run.scalars) or len(run.gemms))


def why_nothing_to_show(run: RecordedRun) -> str:
    """What is said of a run of which nothing was recorded; empty if there is a number, a coverage, an event or an error
    that ended it."""
    has_failed = any(segment.status == "failed" for segment in run.segments)
    if has_numbers(run) or has_failed or set(run.events["kind"].to_pylist()) - _OF_EVERY_RUN:
        return ""
    return (
        f"{visible(str(run.path))} has no numbers, no coverage and no events: nothing was recorded. A run has records"
        " from its first step on. A process that is killed loses up to the last 5 seconds. Train for a step at least,"
        " and for longer before a kill."
    )


def no_step_in_words(run: RecordedRun) -> list[str]:
    """That a run has no step, as a line; none if it has one, or a part of it cannot be read."""
    if has_numbers(run) or len(run.steps) or run.unread:
        return []
    yet = " yet" if run.segments and run.segments[-1].status == "running" else ""
    return [f"The run has no step{yet}, so it has no numbers and no coverage."]


def multiply_adds(run: RecordedRun) -> dict[tuple[str, bool], int]:
    """Precision, and whether of the backward -> the multiply-adds of a step at the end of the run.

    The precision is empty where it is not known. Empty where the run has no coverage.
    """
    found: dict[tuple[str, bool], int] = defaultdict(int)
    for row in at_the_end(run.gemms).select(["precision", "backward", "macs"]).to_pylist():
        if row["macs"]:
            found[row["precision"] or "", bool(row["backward"])] += row["macs"]
    return dict(found)


def precision_shares(run: RecordedRun) -> dict[str, float]:
    """Precision -> its share of the multiply-adds that ran, from 0 to 1; the largest first."""
    macs: dict[str, int] = defaultdict(int)
    for (precision, _), count in multiply_adds(run).items():
        if precision:
            macs[precision] += count
    whole = sum(macs.values())
    return {name: macs[name] / whole for name in sorted(macs, key=lambda name: -macs[name])}


def not_measured_in_words(run: RecordedRun) -> list[str]:
    """What LogGemmError has not measured in the last start of a run, a line for each reason."""
    found = run.segments[-1].facts.get("not_measured") if run.segments else None
    lines = []
    for why, names in found.items() if isinstance(found, dict) else ():
        names = list(map(str, names)) if isinstance(names, list) else []
        more = [f"{len(names) - _MOST_NAMED} more"] if len(names) > _MOST_NAMED else []
        lines.append(f"LogGemmError does not measure {', '.join([*names[:_MOST_NAMED], *more])}: {why}.")
    return lines


_OF_TRAINING = frozenset({"loss", "train", "training", "total", "step", "batch", "lm"})
"""The words of a name that can only be that of the training's loss."""


def words_of(name: str) -> set[str]:
    """The words of the name of a number of the trainer, in small letters."""
    return set(re.split(r"[/._\s-]", name.lower()))


def is_loss(name: str) -> bool:
    """Whether a number of the trainer is a loss by its name: ``loss``, ``train/loss``; not ``loss_scale``."""
    words = words_of(name)
    return "loss" in words and "scale" not in words


def is_loss_of_training(name: str) -> bool:
    """Whether a number of the trainer can only be the loss of the training by its name. A part of the loss, such as
    ``aux_loss``, may be nan where it has no value, the mean of an epoch until the epoch ends, and ``best_loss`` is inf
    at first."""
    return is_loss(name) and words_of(name) <= _OF_TRAINING


def loss_first(names: Iterable[str]) -> list[str]:
    """The trainer's numbers: the likeliest loss of the training first, then other losses, then all others by name."""
    return sorted(names, key=lambda name: (not is_loss(name), name != "loss", "train" not in name, name))


# ---------------------------------------------------------------------- what ended it


def status_in_words(run: RecordedRun) -> str:
    """The status of the last start of a run; ``ended early`` where Ctrl-C, SIGTERM or ``sys.exit()`` ended it."""
    status: str = run.segments[-1].status if run.segments else "unknown"
    return "ended early" if status == "failed" and ended_by(_error_at_the_end(run)[0]) else status


def outcome_in_words(run: RecordedRun) -> list[str]:
    """What ended the last start of a run before its last step; empty if nothing did."""
    status = run.segments[-1].status if run.segments else "unknown"
    if status == "stopped without an end":
        return ["The run stopped without an end: its process is gone, and has not closed the records."]
    if status != "failed":
        return []
    text, step = _error_at_the_end(run)
    if not text:
        return ["The run failed."]
    if ended_from_outside := ended_by(text):
        return [f"The run was ended by {ended_from_outside} after step {step}: the verdict is on the steps until then."]
    return [f"The run failed with step {step} as the last one: {text}."]


def _error_at_the_end(run: RecordedRun) -> tuple[str, int]:
    """The first line about the error that ended the last start of a run, and the last step; an empty text if none is
    recorded."""
    events = run.events.filter(pc.equal(run.events["segment"], run.segments[-1].number))
    for row in events.filter(pc.equal(events["kind"], "segment_ended")).to_pylist():
        if row["severity"] == "error":
            return (row["text"] or "").partition("\n")[0].rstrip(":. "), row["iteration"]
    return "", -1


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


def broken_in_short(message: str) -> str:
    """A message about a broken contract in one line: what is broken, without the products that do it."""
    heading, *lines = message.splitlines() or [""]
    clauses = [line[2:] for line in itertools.takewhile(lambda line: line.startswith("- "), lines)]
    return " ".join([heading, *clauses])
