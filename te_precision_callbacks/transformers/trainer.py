"""The Trainer that acts on the debug options of this package, and its TrainingArguments."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import TrainerControl, TrainerState

from te_precision_callbacks.accelerate import scales_loss
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
from te_precision_callbacks.transformers.callback import (
    DebugCallback,
    PrecisionDebugTrainerCallback,
    closing,
    find_training,
    refuse_data_parallel,
)

if TYPE_CHECKING:
    from te_precision_callbacks.overflow import DebugActivationOverflow
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from transformers.debug_utils import DebugOption
from transformers.utils.generic import ExplicitEnum

from te_precision_callbacks.base.debug_values import (
    CONFIG_HELP,
    DEBUG_OPTIONS,
    parse_debug,
)


class PrecisionDebugOption(ExplicitEnum):
    """This package's values of ``args.debug``; an enum of texts as transformers' own ``DebugOption``."""

    ACTIVATION_OVERFLOW = ACTIVATION_OVERFLOW
    TE_PRECISION = TE_PRECISION


VALID = (*(option.value for option in DebugOption), *DEBUG_OPTIONS)
"""Every value that ``debug=`` takes."""


def parse_options(value: Any) -> list[DebugOption | PrecisionDebugOption]:
    """The options in a value of ``debug=``, each once: a text such as ``"a b"``, a list of such texts or of options, or
    None.

    Raises:
        UnknownDebugOptionError: a name is unknown, or the value holds no names; the message lists all valid names.
    """
    if isinstance(value, Iterable) and not isinstance(value, str):
        value = [part.value if isinstance(part, (DebugOption, PrecisionDebugOption)) else part for part in value]
    names = parse_debug(value, valid=VALID)
    return [PrecisionDebugOption(name) if name in DEBUG_OPTIONS else DebugOption(name) for name in names]


@dataclass
class TrainingArguments(transformers.TrainingArguments):
    """``transformers.TrainingArguments`` with a ``debug`` that also takes ``activation_overflow`` and ``te_precision``.

    Both values take effect in :class:`te_precision_callbacks.transformers.Trainer` and its subclasses. To combine the
    class with another trainer's arguments, in any order::

        @dataclass
        class Arguments(TrainingArguments, Seq2SeqTrainingArguments): ...

    Args:
        debug: names separated by spaces, or a list of names: ``activation_overflow``, ``te_precision``, and the options
            of transformers.
        te_precision_config: with ``te_precision``, the path of the config, or a mapping. None: statistics on every
            Transformer Engine layer.

    Raises:
        UnknownDebugOptionError: a name is unknown, also inside a list; a ValueError.
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
                "te_precision_config= must be the path of a YAML file, or a mapping of the same content, not"
                f" {type(config).__name__} {config!r}."
            )
        refuse_unread_config(config, options)
        if isinstance(config, os.PathLike):
            self.te_precision_config = os.fspath(config)
        self.debug = [option for option in options if isinstance(option, DebugOption)]
        super().__post_init__()  # type: ignore[no-untyped-call]
        self.debug = list(options)


class ActivationOverflowCallback(DebugCallback):
    """Watches the model for inf and nan during ``train()`` of :class:`Trainer`: without a session and without
    Transformer Engine."""

    def __init__(self) -> None:
        self._watch: DebugActivationOverflow | None = None

    def on_train_begin(  # type: ignore[override]  # the events of a Trainer have model=
        self,
        args: transformers.TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        **keywords: Any,
    ) -> None:
        """Hook the model, after ``accelerator.prepare`` has replaced layers."""
        from te_precision_callbacks.overflow import DebugActivationOverflow

        self.close()
        refuse_data_parallel(args)
        self._watch = DebugActivationOverflow(model, distributed=True)
        if (training := find_training()) is not None:
            self._watch.loss_scaled = scales_loss(training.trainer.accelerator)

    def on_train_end(
        self, args: transformers.TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(error)


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` that acts on ``--debug activation_overflow`` and ``--debug te_precision``.

    The class is also a mixin, in any order: ``class MyTrainer(Trainer, Seq2SeqTrainer)``. If the other class comes
    first, its constructor does not take the keywords below: put the options into ``args``.

    Every exception that ends a training, including KeyboardInterrupt, also ends the debugging at once, and the session
    of a :class:`PrecisionDebugTrainerCallback` among ``callbacks``.

    Args:
        *arguments, **keywords: as in transformers' Trainer.
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
            self.args = copy.copy(self.args)  # the caller may give it to another trainer
            self.args.debug = list[Any](options)
        overflow, precision = ACTIVATION_OVERFLOW in options, TE_PRECISION in options
        if overflow or precision:
            refuse_data_parallel(self.args)
        if precision:
            if any(isinstance(callback, PrecisionDebugTrainerCallback) for callback in self.callback_handler.callbacks):
                raise OptionError(
                    "debug= has 'te_precision', and callbacks= a PrecisionDebugTrainerCallback. Give one of the two."
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
        raise SessionError("The trainer has no session: with debug='te_precision' it starts one when train() begins.")

    def train(self, *arguments: Any, **keywords: Any) -> Any:
        """Train as transformers' Trainer does; every exception ends the debugging."""
        with closing(self):
            return super().train(*arguments, **keywords)
