"""The values of ``debug=`` and ``--debug``, and how they are read.

parse_debug("activation_overflow te_precision") == parse_debug(["activation_overflow", "te_precision"])
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from te_precision_callbacks.base.errors import OptionError

ACTIVATION_OVERFLOW = "activation_overflow"
"""Stop where an activation, the loss or a gradient becomes inf or nan: :mod:`te_precision_callbacks.debug_utils`."""

TE_PRECISION = "te_precision"
"""Precision debugging of Transformer Engine's layers, as a session does it."""

DEBUG_OPTIONS = (ACTIVATION_OVERFLOW, TE_PRECISION)

DebugValue = str | Iterable[str] | None
"""Names, or one text of names separated by spaces."""


class UnknownDebugOptionError(OptionError, ValueError):
    """A value that ``debug=`` or ``--debug`` does not take."""


def parse_debug(value: DebugValue, *, valid: Sequence[str] = DEBUG_OPTIONS) -> tuple[str, ...]:
    """Gives the names in a value of ``debug=``, each once.

    Args:
        value: a text such as ``"a b"``, a list of such texts, or None.
        valid: all valid names.

    Raises:
        UnknownDebugOptionError: a name is unknown, or the value holds no names; the message lists all valid names.
    """
    parts = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    names: dict[str, None] = {}
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, str):
            raise UnknownDebugOptionError(f"debug= takes names, not {part!r}. The names are {_listed(valid)}.")
        for name in part.split():
            if name not in valid:
                close = difflib.get_close_matches(name, valid, n=1)
                meant = f" Did you mean {close[0]!r}?" if close and "," not in name else ""
                raise UnknownDebugOptionError(
                    f"There is no debug option {name!r}.{meant} The options are {_listed(valid)}; separate several by"
                    " spaces."
                )
            names[name] = None
    return tuple(names)


def _listed(valid: Sequence[str]) -> str:
    return ", ".join(map(repr, valid))


def check_options_of_te_precision(debug: Iterable[str], **given: object) -> None:
    """Refuse a config, a contract, or a choice of records, of a log or of a report, that nothing would read.

    Args:
        debug: the debug options.
        **given: the values of ``te_precision_config``, ``te_precision_require``, ``te_precision_records``,
            ``te_precision_statistics_log`` and ``te_precision_report``; None or False where it was not given.

    Raises:
        OptionError: one was given, but ``te_precision`` is not among the options.
    """
    for name, value in given.items():
        if value is not None and value is not False and TE_PRECISION not in debug:
            raise OptionError(
                f"{name}={value!r} is read only with the debug option {TE_PRECISION!r}. Add --debug {TE_PRECISION} (or"
                f" debug={TE_PRECISION!r}), or leave {name} out."
            )
