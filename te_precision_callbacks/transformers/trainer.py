"""The Trainer and its TrainingArguments with the debug options of this package."""

from __future__ import annotations

import copy
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers.debug_utils import DebugOption
from transformers.utils.generic import ExplicitEnum

from te_precision_callbacks.accelerate.unconverted import scales_loss
from te_precision_callbacks.base.debug_values import (
    ACTIVATION_OVERFLOW,
    CONFIG_FLAG,
    CONFIG_HELP,
    TE_PRECISION,
    DebugValue,
    parse_debug,
    refuse_unread_config,
)
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.session import InspectSession, SessionError
from te_precision_callbacks.transformers.callback import (
    PrecisionDebugTrainerCallback,
    find_training,
    refuse_data_parallel,
)

if TYPE_CHECKING:
    from te_precision_callbacks.overflow import DebugActivationOverflow


logger = logging.getLogger(__name__)


class PrecisionDebugOption(ExplicitEnum):
    """This package's values of ``args.debug``; a string enum like transformers' ``DebugOption``."""

    ACTIVATION_OVERFLOW = ACTIVATION_OVERFLOW
    TE_PRECISION = TE_PRECISION


_OPTIONS: dict[str, DebugOption | PrecisionDebugOption] = {
    option.value: option for option in (*DebugOption, *PrecisionDebugOption)
}
VALID = tuple(_OPTIONS)
"""Every value that ``debug=`` takes."""


def parse_options(value: Any) -> list[DebugOption | PrecisionDebugOption]:
    """Parse a value of ``debug=``: a text such as ``"a b"``, a list of such texts or of options, or None; deduplicated.

    Raises:
        UnknownDebugOptionError: a name is unknown, or the value does not consist of names.
    """
    return [_OPTIONS[name] for name in parse_debug(value, valid=VALID)]  # options are texts, too


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with a ``debug`` that also takes ``activation_overflow`` and ``te_precision``.

    Both take effect in :class:`te_precision_callbacks.transformers.Trainer` and its subclasses. To combine the class
    with another trainer's arguments, in any order::

        @dataclass
        class Arguments(TrainingArguments, Seq2SeqTrainingArguments): ...

    Args:
        debug: names separated by spaces, or a list of names: ``activation_overflow``, ``te_precision``, and the options
            of transformers.
        te_precision_config: with ``te_precision``, the path of the config, or a mapping. None: statistics on every
            Transformer Engine layer.

    Raises:
        UnknownDebugOptionError: a name is unknown; a ValueError.
        OptionError: ``te_precision_config`` without ``te_precision``, or of a wrong type.
    """

    debug: str | list[str] = field(  # type: ignore[assignment]  # upstream's enum takes no further members
        default="",
        metadata={
            "help": f"Enable one or more debug features: {', '.join(VALID)}. 'activation_overflow' stops where an"
            " activation or a gradient becomes inf or nan; 'te_precision' debugs the precision of Transformer Engine's"
            " layers, see --te_precision_config."
        },
    )
    te_precision_config: str | None = field(default=None, metadata={"help": CONFIG_HELP})

    def __post_init__(self) -> None:
        options = parse_options(self.debug)
        config: Any = self.te_precision_config
        if config is not None and not isinstance(config, (str, os.PathLike, Mapping)):
            raise OptionError(
                f"te_precision_config= must be the path of a YAML file or a mapping, not {type(config).__name__}"
                f" {config!r}."
            )
        refuse_unread_config(config, options)
        if isinstance(config, os.PathLike):
            self.te_precision_config = os.fspath(config)
        self.debug = [option for option in options if isinstance(option, DebugOption)]
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.debug = list(options)


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
