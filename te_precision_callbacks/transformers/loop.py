"""Finds the running training on the stack, since a callback gets neither the trainer nor its handler.

Read from transformers 4.57 to 5.23: ``Trainer.train`` runs the whole loop, and every event comes from a method of
``trainer.callback_handler``, a ``CallbackHandler``. The parameter ``resume_from_checkpoint`` of ``Trainer.train`` is
then the folder, even if the caller gave True.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType

from accelerate import Accelerator
from transformers import Trainer, TrainerState
from transformers.trainer_callback import CallbackHandler


def find_handler() -> CallbackHandler | None:
    """Finds the callback handler that raised the event in which this function is called; None if there is none.

    The handler is the ``self`` of the innermost frame whose ``self`` is a
    ``transformers.trainer_callback.CallbackHandler``. This also works in a callback that another callback calls.
    """
    return next((owner for _, owner in _methods() if isinstance(owner, CallbackHandler)), None)


def find_loop(handler: CallbackHandler, state: TrainerState) -> TrainingLoop | None:
    """Finds the running ``train()`` of the trainer that owns ``handler``; None if another kind of loop calls it."""
    for frame, owner in _methods():
        if isinstance(owner, Trainer) and owner.callback_handler is handler and frame.f_code.co_name == "train":
            resumed = frame.f_locals.get("resume_from_checkpoint")
            checkpoint = Path(resumed) if isinstance(resumed, (str, os.PathLike)) else None
            return TrainingLoop(owner, frame.f_code, state, checkpoint)
    return None


class TrainingLoop:
    """One call of ``trainer.train()``, which raises no event when it fails.

    Args:
        trainer: the trainer; it is not kept alive.
        code: of its method ``train``.
        state: the trainer's state, of which each training makes a new one.
        checkpoint: the folder that the training is resumed from; None for a new one.

    Attributes:
        checkpoint: as above.
    """

    def __init__(self, trainer: Trainer, code: CodeType, state: TrainerState, checkpoint: Path | None) -> None:
        self.checkpoint = checkpoint
        self._trainer = weakref.ref(trainer)
        self._code = code
        self._state = state
        self._thread = threading.get_ident()

    @property
    def accelerator(self) -> Accelerator | None:
        """The trainer's accelerator."""
        return getattr(self._trainer(), "accelerator", None)

    @property
    def running(self) -> bool:
        """Whether the caller is inside the training. From another thread this is unknown, and counts as inside.

        The check takes a few microseconds: it compares the code objects on the stack.
        """
        if threading.get_ident() != self._thread:
            return True
        trainer = self._trainer()
        if trainer is None or trainer.state is not self._state:
            return False
        return any(frame.f_code is self._code and _self_of(frame) is trainer for frame in _frames())


def _frames() -> Iterator[FrameType]:
    """The frames of the callers, the innermost first."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _methods() -> Iterator[tuple[FrameType, object]]:
    """The frames of methods, and the objects that the methods belong to."""
    return ((frame, _self_of(frame)) for frame in _frames() if frame.f_code.co_varnames[:1] == ("self",))


def _self_of(frame: FrameType) -> object:
    return frame.f_locals.get("self")
