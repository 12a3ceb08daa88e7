"""TrainingArguments that also accept the debug options of this package."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import transformers
from transformers.debug_utils import DebugOption
from transformers.utils.generic import ExplicitEnum

from te_precision_callbacks.base.debug_values import (
    ACTIVATION_OVERFLOW,
    CONFIG_HELP,
    TE_PRECISION,
    parse_debug,
    refuse_unread_config,
)
from te_precision_callbacks.base.errors import OptionError


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
