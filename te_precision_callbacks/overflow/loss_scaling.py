"""Finds out whether torch's GradScaler scales the loss of a model, as scripts and all trainers use it for float16."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from te_precision_callbacks.overflow.grad_scaler import listen


class LossScaling:
    """Listens to scalers, from :meth:`begin` until one has stepped an optimizer of the model, or until :meth:`remove`.

    Args:
        is_trained_by: whether an optimizer steps parameters of the model.
        note: called once, when a scaler that is enabled has stepped such an optimizer.
        report: receives failures.

    Attributes:
        journal: None: this is no detector.
    """

    def __init__(
        self,
        is_trained_by: Callable[[torch.optim.Optimizer], bool],
        note: Callable[[], None],
        report: Callable[[str, str, Exception], None],
    ) -> None:
        self.journal = None
        self._is_trained_by = is_trained_by
        self._note = note
        self._report = report
        self._others: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._end: Callable[[], object] | None = None

    def begin(self) -> None:
        """Listen, if that was not done yet."""
        if self._end is None:
            self._end = listen(self)

    def remove(self) -> None:
        """Listen no longer."""
        if self._end is not None:
            self._end()

    def watch_loss(self, loss: Any, scaled: Any = None) -> None:
        """Called with each loss; a scaler of another model has one too."""

    def before_scaled_step(self, optimizer: Any) -> None:
        """Note a scaler that is about to step an optimizer of the model."""
        try:
            if optimizer in self._others:
                return
            if self._is_trained_by(optimizer):
                self.remove()
                self._note()
            else:
                self._others.add(optimizer)
        except Exception as error:
            self.remove()
            self._report("looking at the scaler of", type(optimizer).__name__, error)
