"""What a resume did to the loss, if the trainer or the script logs the loss.

loss = ResumedLoss()
loss.note(2, {"loss": 0.31})           # what is logged in a step; reads nothing of a tensor
checkpoint["loss"] = loss.saved()

loss.restore(checkpoint["loss"])       # in the resumed run
loss.note(3, {"loss": 0.35})
loss.tell(session.resume_report)       # a warning, if the resume has not restored everything
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.runs.answers import is_loss_of_training
from te_precision_callbacks.runs.fingerprints.changes import ResumeReport
from te_precision_callbacks.session.delivery import is_number, to_floats

logger = logging.getLogger(__name__)

NAMES = ("loss", "train_loss", "train/loss", "training_loss", "train_loss_step")
"""The names under which scripts and trainers log the training loss."""


_KEPT = 20
"""Losses in a checkpoint: the noise that the rule diverging-loss compares the first steps after a resume with."""


class ResumedLoss:
    """The last training losses before a checkpoint, and the first one after the resume.

    Attributes:
        restored: the losses of the checkpoint, the oldest first, until :meth:`take_restored`.
    """

    def __init__(self) -> None:
        self.restored: list[float] = []
        self._recent: deque[Any] = deque(maxlen=_KEPT)
        self._last: tuple[int, Any] | None = None
        self._before: tuple[int, float] | None = None

    def note(self, step: int, values: Mapping[str, Any]) -> None:
        """Note the training loss among what is logged in a step, under one of :data:`NAMES`, if it is there: a number,
        or a tensor with one element, which is read when it is needed."""
        loss = next((values[name] for name in NAMES if name in values), None)
        if is_number(loss):
            self._last = step, loss.detach().clone() if isinstance(loss, torch.Tensor) else loss
            self._recent.append(self._last[1])

    def saved(self) -> dict[str, Any]:
        """The last loss, for a checkpoint: ``loss`` and ``loss_step``; after a resume that of the resumed checkpoint,
        until another one is there; and ``losses``, the last ones. Empty without one."""
        last = self._last or self._before
        losses = to_floats(self._recent)
        return {} if last is None else {"loss": float(last[1]), "loss_step": last[0], "losses": losses}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Take the loss of a checkpoint, which may have none."""
        self._last = self._before = None
        self.restored = [float(loss) for loss in state.get("losses", ())]
        self._recent = deque(self.restored, _KEPT)
        if state.keys() >= {"loss", "loss_step"}:
            self._before = int(state["loss_step"]), float(state["loss"])

    def take_restored(self, values: Mapping[str, Any]) -> list[float]:
        """The losses of the checkpoint, once: when the first training loss after the resume is logged."""
        if not self.restored or not any(is_loss_of_training(str(name)) for name in values):
            return []
        restored, self.restored = self.restored, []
        return restored

    def tell(self, report: ResumeReport | None) -> None:
        """Log the loss before and after the resume, once both are there and the audit has come to its end.

        Args:
            report: that of the audit; None before its end.
        """
        if report is None or self._before is None or self._last is None:
            return
        before, self._before = self._before, None
        if report.findings:
            logger.warning("%s", _in_words(before, (self._last[0], float(self._last[1]))))


def losses_before(history: Sequence[Mapping[str, Any]], resumed_at: int) -> list[float]:
    """The last training losses up to the checkpoint, of the Hugging Face Trainer's log history."""
    losses = [entry["loss"] for entry in history if "loss" in entry and entry["step"] <= resumed_at]
    return losses[-_KEPT:]


def loss_after_resume(history: Sequence[Mapping[str, Any]], resumed_at: int) -> str | None:
    """The last training loss logged before the checkpoint, and the first one after it; None if one of them is missing.

    Args:
        history: the ``log_history`` of the Hugging Face Trainer. A loss in it is the mean over ``logging_steps`` steps.
        resumed_at: the ``global_step`` of the checkpoint.
    """
    losses = [(int(entry["step"]), float(entry["loss"])) for entry in history if "loss" in entry]
    before = [entry for entry in losses if entry[0] <= resumed_at]
    after = [entry for entry in losses if entry[0] > resumed_at]
    return _in_words(before[-1], after[0]) if before and after else None


def _in_words(before: tuple[int, float], after: tuple[int, float]) -> str:
    (last, was), (first, loss) = before, after
    return f"Training loss: {was:.6g} at step {last}, before the resume; {loss:.6g} at step {first}, after it."
