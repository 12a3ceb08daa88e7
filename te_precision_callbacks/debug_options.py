"""The flag ``--debug`` for any script with an argparse parser.

Usage::

    parser = argparse.ArgumentParser()
    add_debug_options(parser)  # --debug NAME [NAME ...], --te_precision_config PATH
    arguments = parser.parse_args()
    with debugging(arguments, model, log_dir="run") as debug:
        for batch in loader:
            ...
            debug.step()

Importing this module is quick and imports no framework.
"""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Union

from te_precision_callbacks.base.debug_values import (
    ACTIVATION_OVERFLOW,
    CONFIG_FLAG,
    CONFIG_HELP,
    TE_PRECISION,
    UnknownDebugOptionError,
    parse_debug,
    refuse_unread_config,
)
from te_precision_callbacks.base.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from te_precision_callbacks.layers.naming import Model
    from te_precision_callbacks.options import SessionKeywords, SessionOptions
    from te_precision_callbacks.overflow import DebugActivationOverflow
    from te_precision_callbacks.session import InspectSession

__all__ = [
    "ACTIVATION_OVERFLOW",
    "TE_PRECISION",
    "DebugRun",
    "UnknownDebugOptionError",
    "add_debug_options",
    "debugging",
]


DebugRun = Union["InspectSession", "WithoutSession"]  # created at run time
"""Result of :func:`debugging`: a context manager around a training loop.

Call its ``step()`` after each optimizer step. With ``activation_overflow``, its ``overflow`` inside the block is the
detector of inf and nan. A loop that scales its loss without torch's GradScaler sets ``overflow.loss_scaled``.
"""


def add_debug_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--debug NAME [NAME ...]`` and ``--te_precision_config PATH`` to a parser.

    ``--debug`` may be repeated, and ``"a b"`` is read as ``a b``; an unknown name ends the program with a list of all
    names. ``arguments.debug`` is a tuple, ``arguments.te_precision_config`` is str or None.
    """
    parser.add_argument(
        "--debug",
        action=_AddNames,
        nargs="+",
        default=(),
        metavar="NAME",
        help=f"{ACTIVATION_OVERFLOW}: stop where an activation or a gradient becomes inf or nan;"
        f" {TE_PRECISION}: debug the precision of Transformer Engine's layers",
    )
    parser.add_argument(f"--{CONFIG_FLAG}", f"--{CONFIG_FLAG.replace('_', '-')}", metavar="PATH", help=CONFIG_HELP)


class _AddNames(argparse.Action):
    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option_string: object = None
    ) -> None:
        try:
            names = parse_debug([*getattr(namespace, self.dest), *(values or ())])
        except UnknownDebugOptionError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, names)


def debugging(arguments: argparse.Namespace, model: Model, **keywords: Unpack[SessionKeywords]) -> DebugRun:
    """Return a context manager around a training loop for the options of :func:`add_debug_options`.

    With ``te_precision`` it is an :class:`te_precision_callbacks.InspectSession`. With ``activation_overflow`` an inf
    or nan raises :class:`te_precision_callbacks.debug_utils.ActivationOverflowError` in the optimizer's step, or at the
    latest in ``step``; alone, this needs no Transformer Engine. Without either, it is a no-op.

    Args:
        arguments: the parsed arguments.
        model: the complete model.
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`; ``debug`` comes from the arguments.
            ``activation_overflow`` alone uses only ``reduce`` and ``process_group``.

    Raises:
        OptionError: the parser lacks the options; a config was given without ``te_precision``; an unknown keyword, or
            an invalid value.
        UnknownDebugOptionError: an unknown name.
        ConfigError: the config cannot be used.
    """
    for name in ("debug", CONFIG_FLAG):
        if not hasattr(arguments, name):
            raise OptionError(f"The arguments have no {name!r}: call add_debug_options(parser) before parsing.")
    debug = parse_debug(arguments.debug)
    config = arguments.te_precision_config
    refuse_unread_config(config, debug)
    if "debug" in keywords:
        raise OptionError("debugging() takes no debug=: its value is in the parsed arguments.")
    from te_precision_callbacks.options import SessionOptions

    options = SessionOptions.from_keywords(config, debug=debug, **keywords)
    if TE_PRECISION in debug:
        from te_precision_callbacks.session import InspectSession

        return InspectSession.from_options(options, model)
    return WithoutSession(model, options)


class WithoutSession:
    def __init__(self, model: Model, options: SessionOptions) -> None:
        self._model = model
        self._options = options
        self.overflow: DebugActivationOverflow | None = None

    def __enter__(self) -> Self:
        if ACTIVATION_OVERFLOW in self._options.debug:
            from te_precision_callbacks.overflow import DebugActivationOverflow

            options = self._options
            self.overflow = DebugActivationOverflow(
                self._model, distributed=options.reduce, process_group=options.process_group
            )
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        overflow = self.overflow
        self.overflow = None
        if overflow is not None:
            overflow.close(error)

    def step(self, logging_step: int | None = None) -> None:
        if self.overflow is not None:
            self.overflow.check()
