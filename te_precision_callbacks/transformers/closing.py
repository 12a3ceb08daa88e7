"""Debug callbacks, and their end when a training fails: the Trainer raises no event then."""

from __future__ import annotations

import logging
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from transformers import Trainer, TrainerCallback, TrainingArguments

from te_precision_callbacks.base.errors import OptionError

logger = logging.getLogger(__name__)


class DataParallelError(OptionError, ValueError):
    """Debugging was requested under ``torch.nn.DataParallel``, where copies of the model cannot be observed."""


class DebugCallback(TrainerCallback, ABC):
    """A callback that opens resources when training begins, and closes them when training ends or fails."""

    @abstractmethod
    def close(self, error: BaseException | None = None) -> None:
        """Close open resources after the training has failed with ``error``; does nothing if nothing is open."""


class RunningTraining(NamedTuple):
    """A call of ``trainer.train()``: the trainer, and the folder that it is resumed from, if any."""

    trainer: Trainer
    checkpoint: Path | None


def find_training() -> RunningTraining | None:
    """Find the Trainer that called a callback, which receives neither the trainer nor the checkpoint.

    Read from transformers 4.57 to 5.23: ``Trainer.train`` runs the whole loop. Its parameter ``resume_from_checkpoint``
    is the folder by then, even if the caller gave True.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self") if frame.f_code.co_name == "train" else None
        if isinstance(owner, Trainer):
            resumed = frame.f_locals.get("resume_from_checkpoint")
            return RunningTraining(owner, Path(resumed) if isinstance(resumed, (str, os.PathLike)) else None)
        frame = frame.f_back
    return None


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
def closing(trainer: Trainer) -> Iterator[None]:
    try:
        yield
    except BaseException as error:
        for callback in trainer.callback_handler.callbacks:
            if isinstance(callback, DebugCallback):
                try:
                    callback.close(error)
                except Exception as failure:  # must not hide the error that ended the training
                    logger.error("%s could not be closed.", type(callback).__name__, exc_info=failure)
        raise
