"""The Trainer with the debug options of this package."""

from __future__ import annotations

import copy
import logging
from typing import TYPE_CHECKING, Any

import torch
import transformers

from te_precision_callbacks.accelerate.debugger import scales_loss
from te_precision_callbacks.base.debug_values import (
    ACTIVATION_OVERFLOW,
    CONFIG_FLAG,
    TE_PRECISION,
    DebugValue,
    refuse_unread_config,
)
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.session import InspectSession, SessionError
from te_precision_callbacks.transformers.arguments import parse_options
from te_precision_callbacks.transformers.callback import (
    PrecisionDebugTrainerCallback,
    find_training,
    refuse_data_parallel,
)

if TYPE_CHECKING:
    from te_precision_callbacks.overflow import DebugActivationOverflow


logger = logging.getLogger(__name__)


class ActivationOverflowCallback(transformers.TrainerCallback):
    """Watches the model for inf and nan during ``train()`` of :class:`Trainer`, without a session and without
    Transformer Engine.
    """

    def __init__(self) -> None:
        self._watch: DebugActivationOverflow | None = None

    def on_train_begin(  # type: ignore[override]  # the events of a Trainer have model=
        self, args: transformers.TrainingArguments, *_: Any, model: torch.nn.Module, **__: Any
    ) -> None:
        from te_precision_callbacks.overflow import DebugActivationOverflow

        self.close()
        refuse_data_parallel(args)
        self._watch = DebugActivationOverflow(model, distributed=True)
        if (training := find_training()) is not None:
            self._watch.loss_scaled = scales_loss(training.trainer.accelerator)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        watch = self._watch
        self._watch = None
        if watch is not None:
            watch.close(error)


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` that acts on ``--debug activation_overflow`` and ``--debug te_precision``.

    The class is also a mixin, in any order: ``class MyTrainer(Trainer, Seq2SeqTrainer)``. If the other class comes
    first, its constructor does not accept the keywords below: put the options into ``args``.

    An exception that ends a training, including KeyboardInterrupt, immediately ends the debugging, and the session of a
    :class:`PrecisionDebugTrainerCallback` in ``callbacks``.

    Other arguments are as for transformers' Trainer.

    Args:
        debug: debug options in addition to ``args.debug``, in the same form.
        te_precision_config: replaces ``args.te_precision_config``, unless None.

    Raises:
        UnknownDebugOptionError: a name is unknown; a ValueError.
        ConfigError: ``args.te_precision_config`` cannot be used; for problems that need the model, in ``train()``.
        DataParallelError: ``args.n_gpu`` is above 1, with a debug option of this package.

    Example::

        args = TrainingArguments("run", debug="te_precision", te_precision_config="config.yaml")
        Trainer(model, args, train_dataset=data, debug="activation_overflow").train()
    """

    def __init__(
        self,
        *arguments: Any,
        debug: DebugValue = None,
        te_precision_config: ConfigSource = None,
        **keywords: Any,
    ) -> None:
        more = parse_options(debug)
        super().__init__(*arguments, **keywords)
        options = parse_options([*parse_options(self.args.debug), *more])
        config = getattr(self.args, CONFIG_FLAG, None) if te_precision_config is None else te_precision_config
        refuse_unread_config(config, options)
        if options != self.args.debug:
            self.args = copy.copy(self.args)  # the caller may pass it to another trainer
            self.args.debug = list[Any](options)
        overflow = ACTIVATION_OVERFLOW in options
        precision = TE_PRECISION in options
        if overflow or precision:
            refuse_data_parallel(self.args)
        if precision:
            if any(isinstance(callback, PrecisionDebugTrainerCallback) for callback in self.callback_handler.callbacks):
                raise OptionError(
                    "Both debug='te_precision' and a PrecisionDebugTrainerCallback are given. Remove one."
                )
            watch = (ACTIVATION_OVERFLOW,) if overflow else ()
            self.add_callback(PrecisionDebugTrainerCallback(config, debug=watch))
        elif overflow:
            self.add_callback(ActivationOverflowCallback())

    @property
    def debug_session(self) -> InspectSession:
        """The session of the current or last training with ``te_precision``.

        Raises:
            SessionError: there was no such training yet.
        """
        for callback in self.callback_handler.callbacks:
            if isinstance(callback, PrecisionDebugTrainerCallback):
                return callback.session
        raise SessionError("The trainer has no session: with debug='te_precision', train() starts it.")

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Train like transformers' Trainer; an exception also ends the debugging."""
        try:
            return super().train(*arguments, **keywords)
        except BaseException as error:
            for callback in self.callback_handler.callbacks:
                if isinstance(callback, (ActivationOverflowCallback, PrecisionDebugTrainerCallback)):
                    try:
                        callback.close(error)
                    except Exception as failure:  # must not hide the error that ended the training
                        logger.error("%s could not be closed.", type(callback).__name__, exc_info=failure)
            raise
