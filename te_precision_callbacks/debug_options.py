"""What ``debug=`` and ``--debug`` take, and the flag for any script with an argparse parser.

Usage::

    parser = argparse.ArgumentParser()
    add_debug_options(parser)  # --debug NAME [NAME ...], --te_precision_config PATH
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
import difflib
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

from te_precision_callbacks.errors import OptionError

if TYPE_CHECKING:
    from typing_extensions import Self, Unpack

    from te_precision_callbacks.debug_utils import DebugActivationOverflow
    from te_precision_callbacks.naming import Model
    from te_precision_callbacks.options import SessionKeywords, SessionOptions

__all__ = ["DebugRun", "UnknownDebugOptionError", "add_debug_options", "debugging"]

ACTIVATION_OVERFLOW = "activation_overflow"
"""Stop where an activation or a gradient becomes inf or nan: :mod:`te_precision_callbacks.debug_utils`."""

TE_PRECISION = "te_precision"
"""Precision debugging of Transformer Engine's layers: what a session does."""

DEBUG_OPTIONS = (ACTIVATION_OVERFLOW, TE_PRECISION)

DebugValue = str | Iterable[str] | None
"""Names, or a text of names with spaces in between."""


class UnknownDebugOptionError(OptionError, ValueError):
    """A value that ``debug=`` or ``--debug`` does not take."""


def parse_debug(value: DebugValue, *, valid: Sequence[str] = DEBUG_OPTIONS) -> tuple[str, ...]:
    """The names that a value of ``debug=`` holds, each once.

    Args:
        value: a text such as ``"a b"``, a list of such texts, or None.
        valid: the names that there are.

    Raises:
        UnknownDebugOptionError: another name, or something that holds no names; the text lists all valid ones.
    """
    parts = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    names: dict[str, None] = {}
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, str):
            raise UnknownDebugOptionError(f"debug= takes names, not {part!r}. There are {_listed(valid)}.")
        for name in part.split():
            if name not in valid:
                close = difflib.get_close_matches(name, valid, n=1)
                meant = f" Did you mean {close[0]!r}?" if close and "," not in name else ""
                raise UnknownDebugOptionError(
                    f"There is no debug option {name!r}.{meant} There are {_listed(valid)}; several are separated by"
                    " spaces."
                )
            names[name] = None
    return tuple(names)


def _listed(valid: Sequence[str]) -> str:
    return ", ".join(map(repr, valid))


def check_config_option(debug: Iterable[str], config: object) -> None:
    """Refuse a config that nothing would read.

    Args:
        debug: the debug options.
        config: what was given as ``te_precision_config``.

    Raises:
        OptionError: there is a config, and ``te_precision`` is not among the options.
    """
    if config is not None and TE_PRECISION not in debug:
        raise OptionError(
            f"te_precision_config={config!r} is read with the debug option {TE_PRECISION!r} alone. Add --debug"
            f" {TE_PRECISION} (or debug={TE_PRECISION!r}), or leave the config away."
        )


class DebugRun(Protocol):
    """What :func:`debugging` gives: a context manager around a training loop, and its step."""

    @property
    def overflow(self) -> DebugActivationOverflow | None:
        """Inside of the block, with ``activation_overflow``: what looks for inf and nan. A loop that scales its loss
        without torch's GradScaler sets its ``loss_scaled``."""

    def __enter__(self) -> Any:
        """Begin."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End, and put back what was changed."""

    def step(self, logging_step: int | None = None) -> Any:
        """After each step of the optimizer."""


def add_debug_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--debug NAME [NAME ...]`` and ``--te_precision_config PATH`` to a parser.

    The flag may be given several times, and takes ``"a b"`` as ``a b``; an unknown name ends the program with a message
    that lists all names. The results are ``arguments.debug``, a tuple, and ``arguments.te_precision_config``, a path or
    None, for :func:`debugging`.
    """
    parser.add_argument(
        "--debug",
        action=_AddNames,
        nargs="+",
        default=(),
        metavar="NAME",
        help=f"{ACTIVATION_OVERFLOW}: stop where an activation or a gradient becomes inf or nan; {TE_PRECISION}: debug"
        " the precision of Transformer Engine's layers",
    )
    parser.add_argument(
        "--te_precision_config",
        "--te-precision-config",
        metavar="PATH",
        help=f"with --debug {TE_PRECISION}: the YAML config (default: statistics on every Transformer Engine layer)",
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
    """What the parsed options of :func:`add_debug_options` ask for, as a context manager around a training loop.

    With ``te_precision`` it is an :class:`te_precision_callbacks.InspectSession`, whose ``step`` ends a debug iteration
    and hands its statistics on. With ``activation_overflow`` an inf or nan raises
    :class:`te_precision_callbacks.debug_utils.ActivationOverflowError` in the optimizer's step, at the latest in
    ``step``; alone, it needs no Transformer Engine. With neither it does nothing.

    Args:
        arguments: the parsed arguments.
        model: the complete model.
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`; ``debug`` is what the arguments say.
            ``activation_overflow`` alone has use for ``reduce`` and ``process_group``, and leaves the others be.

    Raises:
        OptionError: the parser has not got the options, or the config was given without ``te_precision``; an unknown
            keyword, or a value that it does not take.
        UnknownDebugOptionError: an unknown name.
        ConfigError: the config cannot be used.
    """
    try:
        debug, config = parse_debug(arguments.debug), arguments.te_precision_config
    except AttributeError as error:
        raise OptionError(
            f"The arguments have no {error.name!r}: call add_debug_options(parser) before parsing."
        ) from None
    check_config_option(debug, config)
    if "debug" in keywords:
        raise OptionError("debugging() takes no debug=: the parsed arguments say it.")
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
            from te_precision_callbacks.debug_utils import DebugActivationOverflow

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
