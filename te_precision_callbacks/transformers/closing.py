"""Closes debug callbacks when a training fails: the Trainer raises no event then."""

from __future__ import annotations

import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_callback import CallbackHandler

from te_precision_callbacks.base.errors import OptionError

logger = logging.getLogger(__name__)


class DataParallelError(OptionError, ValueError):
    """Debugging was requested under ``torch.nn.DataParallel``, whose copies of the model cannot be watched."""


class DebugCallback(TrainerCallback, ABC):
    """A callback that opens resources when training begins, and closes them when training ends or fails."""

    @property
    @abstractmethod
    def watches(self) -> tuple[str, ...]:
        """The debug options that the callback acts on."""

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Close open resources after the training has failed with ``error``; does nothing if nothing is open."""


def refuse_data_parallel(args: TrainingArguments) -> None:
    """Refuse to debug under DataParallel, which makes new copies of the model for each forward.

    Raises:
        DataParallelError: ``args.n_gpu`` is above 1.
    """
    if args.n_gpu > 1:
        raise DataParallelError(
            f"Precision debugging does not work under DataParallel (args.n_gpu is {args.n_gpu}). Launch one process a"
            " GPU with torchrun or accelerate launch, or let the script see one GPU (CUDA_VISIBLE_DEVICES=0)."
        )


@contextmanager
def closing(handler: CallbackHandler) -> Iterator[None]:
    """Closes a known trainer's debug callbacks at once when its training raises."""
    try:
        yield
    except BaseException as error:
        for callback in handler.callbacks:
            if isinstance(callback, DebugCallback):
                try:
                    callback.close(error)
                except Exception as failure:  # what ended the training is what the user has to see
                    logger.error("%s could not be closed.", type(callback).__name__, exc_info=failure)
        raise


def close_with(trainer: transformers.Trainer, callback: DebugCallback) -> None:
    """Put :func:`closing` around ``train`` of this one trainer, as long as the callback lives."""
    train = _ClosingTrain(trainer, callback)
    trainer.train = train  # type: ignore[method-assign]
    weakref.finalize(callback, _restore_train, weakref.ref(trainer), weakref.ref(train))


class _ClosingTrain:
    """Replaces a trainer's method ``train``; a copy or pickle of the trainer has the original method."""

    def __init__(self, trainer: transformers.Trainer, callback: DebugCallback) -> None:
        self._trainer = trainer
        self._own = trainer.train
        self._callback = weakref.ref(callback)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        handler, callback = self._trainer.callback_handler, self._callback()
        if callback is not None and callback not in handler.callbacks:
            logger.warning(
                "%s was given this trainer but is not one of its callbacks, so it does nothing. Add it with"
                " trainer.add_callback(callback).",
                type(callback).__name__,
            )
        with closing(handler):
            return self._own(*args, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self._trainer, "train")


def _restore_train(trainer: weakref.ref[transformers.Trainer], train: weakref.ref[_ClosingTrain]) -> None:
    """Restore the trainer's own method, unless other code has replaced it since."""
    found = trainer()
    if found is not None and found.__dict__.get("train") is train():
        del found.__dict__["train"]
