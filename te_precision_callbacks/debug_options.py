"""The flag ``--debug`` for any script with an argparse parser.

Usage::

    parser = argparse.ArgumentParser()
    add_debug_options(parser)  # --debug NAME [NAME ...], --te_precision_config PATH, --te_precision_require CONTRACT
    arguments = parser.parse_args()
    ...
    with debugging(arguments, model, log_dir="run") as debug:
        for batch in loader:
            ...
            optimizer.step()
            debug.step()

Importing this module is quick and imports no framework.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from te_precision_callbacks.base.debug_values import (
    ACTIVATION_OVERFLOW,
    TE_PRECISION,
    UnknownDebugOptionError,
    check_options_of_te_precision,
    parse_debug,
)
from te_precision_callbacks.base.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from te_precision_callbacks.layers.naming import Model
    from te_precision_callbacks.options import SessionKeywords, SessionOptions
    from te_precision_callbacks.overflow import DebugActivationOverflow

__all__ = [
    "ACTIVATION_OVERFLOW",
    "TE_PRECISION",
    "DebugRun",
    "UnknownDebugOptionError",
    "add_debug_options",
    "debugging",
]


class DebugRun(Protocol):
    """The result of :func:`debugging`: a context manager around a training loop, with a method for its steps."""

    @property
    def overflow(self) -> DebugActivationOverflow | None:
        """The detector of inf and nan, inside the block and with ``activation_overflow``. A loop that scales its loss
        without torch's GradScaler sets ``overflow.loss_scaled``."""

    def __enter__(self) -> Any:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, and put back what was changed."""

    def step(self, logging_step: int | None = None) -> Any:
        """End a step: call it after each step of the optimizer."""


def add_debug_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--debug NAME [NAME ...]`` and ``--te_precision_config``, ``_require``, ``_records``, ``_statistics_log``
    and ``_report`` to a parser.

    The flag may be given several times, and takes ``"a b"`` as ``a b``; an unknown name ends the program with a message
    that lists all names. The results, for :func:`debugging`, are ``arguments.debug``, a tuple, and
    ``arguments.te_precision_config``, ``arguments.te_precision_require``, ``arguments.te_precision_records`` and
    ``arguments.te_precision_statistics_log``, each a text or None, and ``arguments.te_precision_report``, True or
    False.
    """
    parser.add_argument(
        "--debug",
        action=_AddNames,
        nargs="+",
        default=(),
        metavar="NAME",
        help=f"{ACTIVATION_OVERFLOW}: stop where an activation, the loss or a gradient becomes inf or nan;"
        f" {TE_PRECISION}: debug the precision of Transformer Engine's layers",
    )
    parser.add_argument(
        "--te_precision_config",
        "--te-precision-config",
        metavar="PATH",
        help=f"with --debug {TE_PRECISION}: the YAML config (default: statistics on every Transformer Engine layer)",
    )
    parser.add_argument(
        "--te_precision_require",
        "--te-precision-require",
        metavar="CONTRACT",
        help=f"with --debug {TE_PRECISION}: what the run must hold, such as 'fp8 >= 95%%', or the path of a YAML file",
    )
    parser.add_argument(
        "--te_precision_records",
        "--te-precision-records",
        metavar="RECORDS",
        help=f"with --debug {TE_PRECISION}: 'on' (the default) or 'off', or the most that a rank records of the run,"
        " such as '64GiB'",
    )
    parser.add_argument(
        "--te_precision_statistics_log",
        "--te-precision-statistics-log",
        metavar="LOG",
        help=f"with --debug {TE_PRECISION}: the ranks that write the statistics log, 'rank0' (the default), 'all' or"
        " 'off', and the most that a rank's log grows to, such as 'rank0, 4GiB'",
    )
    parser.add_argument(
        "--te_precision_report",
        "--te-precision-report",
        action="store_true",
        help=f"with --debug {TE_PRECISION}: write the page of the run, report.html, into the log folder at its end",
    )


class _AddNames(argparse.Action):
    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        try:
            names = parse_debug([*getattr(namespace, self.dest), *(values or ())])
        except UnknownDebugOptionError as error:
            raise argparse.ArgumentError(self, str(error)) from None
        setattr(namespace, self.dest, names)


def debugging(arguments: argparse.Namespace, model: Model, **keywords: Unpack[SessionKeywords]) -> DebugRun:
    """Turn the parsed options of :func:`add_debug_options` into a context manager around a training loop.

    With ``te_precision`` the result is an :class:`te_precision_callbacks.InspectSession`, whose ``step`` ends a debug
    iteration and hands its statistics on. With ``activation_overflow`` an inf or nan raises
    :class:`te_precision_callbacks.debug_utils.ActivationOverflowError` in the optimizer's step, or at the latest in
    ``step``; on its own this option needs no Transformer Engine. Without either option the result does nothing.

    Args:
        arguments: the parsed arguments.
        model: the complete model.
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`; ``debug`` comes from the arguments.
            ``activation_overflow`` on its own uses only ``reduce`` and ``process_group``, and ignores the others.

    Raises:
        OptionError: the parser does not have the options; what belongs to ``te_precision`` was given
            without it; a keyword is unknown, or its value is invalid.
        UnknownDebugOptionError: an unknown name.
        ConfigError: the config cannot be used.
    """
    try:
        debug, config = parse_debug(arguments.debug), arguments.te_precision_config
        require = getattr(arguments, "te_precision_require", None)
        records = getattr(arguments, "te_precision_records", None)
        log = getattr(arguments, "te_precision_statistics_log", None)
        report = getattr(arguments, "te_precision_report", False)
    except AttributeError as error:
        raise OptionError(
            f"The arguments have no {error.name!r}: call add_debug_options(parser) before parsing."
        ) from None
    check_options_of_te_precision(
        debug,
        te_precision_config=config,
        te_precision_require=require,
        te_precision_records=records,
        te_precision_statistics_log=log,
        te_precision_report=report,
    )
    if require is not None:
        keywords["require"] = require
    if records is not None:
        keywords["records"] = records
    if log is not None:
        keywords["statistics_log"] = log
    if report:
        keywords["report"] = report
    if "debug" in keywords:
        raise OptionError("debugging() takes no debug=: its value is in the parsed arguments.")
    from te_precision_callbacks.options import SessionOptions

    options = SessionOptions.from_keywords(config, debug=debug, **keywords)
    if TE_PRECISION in debug:
        from te_precision_callbacks.session import InspectSession

        return InspectSession.from_options(options, model)
    return _WithoutSession(model, options)


class _WithoutSession:
    """The watch for inf and nan alone, or nothing."""

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

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        overflow, self.overflow = self.overflow, None
        if overflow is not None:
            overflow.close(error)

    def step(self, logging_step: int | None = None) -> None:
        if self.overflow is not None:
            self.overflow.look()
