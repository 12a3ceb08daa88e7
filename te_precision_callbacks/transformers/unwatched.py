"""Warns if this package's debug options are given to a trainer that does not know them."""

from __future__ import annotations

import logging
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import DEFAULT_CALLBACKS

from te_precision_callbacks.base.debug_values import DEBUG_OPTIONS
from te_precision_callbacks.transformers.closing import DebugCallback
from te_precision_callbacks.transformers.loop import find_handler

logger = logging.getLogger(__name__)


def warn_where_unwatched() -> None:
    """Let each trainer that is made from now on say at train begin which debug options nobody acts on.

    Arguments are not told which trainer gets them. transformers 5.0 to 5.23 gives the callbacks of this list to every
    trainer, of its own classes and of others'.
    """
    callbacks: list[Any] = DEFAULT_CALLBACKS
    if UnwatchedOptionsCallback not in callbacks:
        callbacks.append(UnwatchedOptionsCallback)


class UnwatchedOptionsCallback(TrainerCallback):
    """Compares ``args.debug`` with what the trainer's callbacks watch for."""

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        """Warn, on the main process."""
        handler = find_handler()
        if handler is None or not state.is_world_process_zero:
            return
        watched = {
            name for callback in handler.callbacks if isinstance(callback, DebugCallback) for name in callback.watches
        }
        asked = [getattr(option, "value", option) for option in args.debug]
        unwatched = [name for name in asked if name in DEBUG_OPTIONS and name not in watched]
        if unwatched:
            logger.warning(
                "args.debug has %s, but nothing is watched: this trainer does not act on args.debug. Use"
                " te_precision_callbacks.transformers.Trainer, or a class that inherits from it and from the trainer's"
                " own; or give the trainer callbacks=[PrecisionDebugTrainerCallback(config, debug=...)].",
                " and ".join(map(repr, unwatched)),
            )
