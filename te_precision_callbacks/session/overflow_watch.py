"""Activation overflow detection in a session, with ``debug="activation_overflow"``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from te_precision_callbacks.base.debug_values import ACTIVATION_OVERFLOW
from te_precision_callbacks.base.errors import SessionError
from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.dumps.recording import Recorder
from te_precision_callbacks.layers.naming import Model, named_roots
from te_precision_callbacks.options import SessionOptions

if TYPE_CHECKING:
    from te_precision_callbacks.overflow import DebugActivationOverflow


class OverflowWatch:
    """The detector of a run, and its messages to the recorder of dumps.

    Args:
        options: the session's options.
        recorder: receives whether a step has overflowed.
        abandoned: whether the loop that started the session has ended without stopping it.
        step: gives the training step that runs, in words.

    Attributes:
        detector: the detector of inf and nan; None if detection is off, and before there is a model.
    """

    def __init__(
        self, options: SessionOptions, recorder: Recorder, abandoned: Callable[[], bool], step: Callable[[], str]
    ) -> None:
        self.detector: DebugActivationOverflow | None = None
        self._options = options
        self._recorder = recorder
        self._abandoned = abandoned
        self._step = step
        self._model: Model = ()
        self._reports = 0

    def attach(self, model: Model, messages: Messages | None) -> None:
        """Watch a model from now on, instead of the previous one; all ranks stop together, over these messages."""
        if ACTIVATION_OVERFLOW not in self._options.debug:
            return
        from te_precision_callbacks.overflow import DebugActivationOverflow

        former = self.detector
        if former is not None:
            if _same(model, self._model):
                return  # the detector follows modules that are replaced inside
            former.close(SessionError("Another model was attached."))
        options = self._options
        self.detector = DebugActivationOverflow(model, distributed=options.reduce, process_group=options.process_group)
        self.detector.join_session(messages=messages, abandoned=self._abandoned, step=self._step)
        self._model, self._reports = model, 0
        if former is not None:
            self.detector.loss_scaled = former.loss_scaled

    def tell_recorder(self) -> None:
        """Tell the recorder of dumps whether the detector has reported since the last call."""
        if self.detector is not None:
            self._recorder.overflowed = self.detector.reports > self._reports
            self._reports = self.detector.reports

    def close(self, error: BaseException | None) -> None:
        """Run the detector's last look, which may find one more overflow and raise."""
        try:
            if self.detector is not None:
                self.detector.close(error)
        finally:
            self.tell_recorder()


def _same(a: Model, b: Model) -> bool:
    """Whether both are the same model, or the same models under the same names."""
    first, second = ([(name, id(root)) for name, root in named_roots(model) or ()] for model in (a, b))
    return first == second
