"""One training under a session, from its beginning to its end or failure."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from accelerate import Accelerator

from te_precision_callbacks.base.before_calls import BeforeCalls
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.session import InspectSession, SessionError
from te_precision_callbacks.transformers.log_history import HistorySummary
from te_precision_callbacks.transformers.loop import TrainingLoop
from te_precision_callbacks.transformers.reporting import Reporting, TrainerEvent

logger = logging.getLogger(__name__)

_OPEN: weakref.WeakSet[Training] = weakref.WeakSet()
"""The trainings that were not closed yet."""


class Training:
    """A session that observes the steps of one training, and is closed once, by the first code that sees its end.

    The object refers to the model, never to the callback, which can be garbage-collected while the training runs.

    Args:
        session: a running session that knows its model.
        reporting: the integrations that get statistics.
        history: what the trainer's log history gets.
        loop: the training; None if it is unknown whether it is running.
        model: the model of the training. A forward of the model outside the training closes the session; a forward of
            only a part of the model runs as without a session.
    """

    def __init__(
        self,
        session: InspectSession,
        reporting: Reporting | None,
        history: HistorySummary,
        loop: TrainingLoop | None,
        model: torch.nn.Module,
    ) -> None:
        self.session = session
        self.history = history
        self.has_stepped = False
        self._reporting = reporting
        self._loop = loop
        _OPEN.add(self)
        self._handle = None
        self._loss: torch.Tensor | None = None
        self._backward: BeforeCalls | None = None
        if loop is not None:
            session.abandoned = lambda: not loop.running
            self._handle = model.register_forward_pre_hook(_ClosesAfterTraining(self), prepend=True)

    @property
    def running(self) -> bool:
        """Whether the session was not closed yet."""
        return self.session.running

    def begin_step(self, event: TrainerEvent) -> None:
        """Observe from here to :meth:`pause`: forwards between two steps are evaluation, or the user's own."""
        self._take(event)
        self._loss = None
        self.session.observing = True

    def follow(self, accelerator: Accelerator) -> None:
        """Get the loss of each micro-batch from ``accelerator.backward``. With ``logging_nan_inf_filter=True``, the
        default, the Trainer logs only what is finite."""
        self._backward = BeforeCalls(accelerator, "backward", self._note_loss)

    def _note_loss(self, loss: torch.Tensor, *_: Any, **keywords: Any) -> None:
        """Add the loss of a micro-batch to that of its step; it is not read here."""
        if self.session.observing:
            self._loss = loss.detach() if self._loss is None else self._loss + loss.detach()

    def pause(self) -> None:
        """Observe nothing until the next step begins."""
        self.session.observing = False

    def end_step(self, event: TrainerEvent) -> None:
        """End a debug iteration; if it stops the training, also the session, since the Trainer tells nobody."""
        self.has_stepped = True
        self._take(event)
        if self._loss is not None:
            self.session.log({"loss_step": self._loss}, event.state.global_step)
        try:
            records = self.session.step(event.state.global_step)
        except BaseException as error:
            self.close(error, at_once=True)
            raise
        if records is not None:
            self.history.add(records)

    def close(self, error: BaseException | None, *, at_once: bool) -> None:
        """End the session; does nothing if it has ended.

        Args:
            error: what ended the training, None after a normal end.
            at_once: False if time has passed since the training ended: the integrations then do not get the statistics
                gathered since its last step, since they may have been closed or moved on to another run.
        """
        _OPEN.discard(self)
        if self._handle is not None:
            self._handle.remove()
            self._handle = None
        if self._backward is not None:
            self._backward.remove()
        if not at_once:
            self._take(None)
        try:
            self.session.stop(error)
        finally:
            self._take(None)

    def close_if_over(self) -> None:
        """End the session if the caller is not inside the training."""
        if self.running and self._loop is not None and not self._loop.running:
            logger.warning(
                "The training that precision debugging observed has ended with an exception. Its session is closed now."
            )
            self.close(SessionError("The training ended with an exception."), at_once=False)

    def _take(self, event: TrainerEvent | None) -> None:
        if self._reporting is not None:
            self._reporting.take(event)


def close_abandoned() -> None:
    """End the sessions of failed trainings, of any callback: a process has one session at a time."""
    for training in list(_OPEN):
        training.close_if_over()


class _ClosesAfterTraining:
    """The hook at a model's forward. A copy of the model has nothing to do with the training."""

    def __init__(self, training: Training) -> None:
        self._check = outside_of_dynamo(training.close_if_over)

    def __call__(self, module: torch.nn.Module, inputs: Any) -> None:
        self._check()

    def __reduce__(self) -> tuple[Any, ...]:
        return _no_hook, ()


def _no_hook() -> Any:
    return _nothing


def _nothing(module: torch.nn.Module, inputs: Any) -> None:
    """What a copied or pickled model has in the place of the hook."""
