"""What a resume did to the loss, as far as the trainer's log history tells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def loss_after_resume(history: Sequence[Mapping[str, Any]], resumed_at: int) -> str | None:
    """The last training loss logged before the checkpoint, and the first one after it; None if one of them is missing.

    Args:
        history: the trainer's ``log_history``. A loss in it is the mean over ``logging_steps`` steps.
        resumed_at: the ``global_step`` of the checkpoint.
    """
    losses = [(int(entry["step"]), float(entry["loss"])) for entry in history if "loss" in entry]
    before = [entry for entry in losses if entry[0] <= resumed_at]
    after = [entry for entry in losses if entry[0] > resumed_at]
    if not before or not after:
        return None
    (last, was), (first, loss) = before[-1], after[0]
    return f"Training loss: {was:.6g} at step {last}, before the resume; {loss:.6g} at step {first}, after it."
