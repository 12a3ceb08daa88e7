"""What every view asks of a recorded run: how much ran in which precision, and which of its numbers is the loss."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable

from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.tables import at_the_end


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


def is_loss(name: str) -> bool:
    """Whether a number of the trainer is a loss by its name: ``loss``, ``train/loss``; not ``loss_scale``."""
    words = re.split(r"[/._]", name.lower())
    return "loss" in words and "scale" not in words


def loss_first(names: Iterable[str]) -> list[str]:
    """The trainer's numbers: the likeliest loss of the training first, then other losses, then all others by name."""
    return sorted(names, key=lambda name: (not is_loss(name), name != "loss", "train" not in name, name))
