"""Parsing of ``debug=`` and ``--debug``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from te_precision_callbacks.base.errors import OptionError

ACTIVATION_OVERFLOW = "activation_overflow"

TE_PRECISION = "te_precision"

DEBUG_OPTIONS = (ACTIVATION_OVERFLOW, TE_PRECISION)

DebugValue = str | Iterable[str] | None


class UnknownDebugOptionError(OptionError, ValueError):
    """Not a valid value of ``debug=`` or ``--debug``."""


def parse_debug(value: DebugValue, *, valid: Sequence[str] = DEBUG_OPTIONS) -> tuple[str, ...]:
    """Return the names in a value of ``debug=``, such as ``"a b"`` or a list of strings, without duplicates.

    Raises:
        UnknownDebugOptionError: a name is unknown, or is not a string; the message lists all valid names.
    """
    parts = [value] if isinstance(value, str) or not isinstance(value, Iterable) else list(value)
    valid_names = ", ".join(map(repr, valid))
    names: dict[str, None] = {}
    for part in parts:
        if part is None:
            continue
        if not isinstance(part, str):
            raise UnknownDebugOptionError(f"debug= takes names, not {part!r}. The names are {valid_names}.")
        for name in part.split():
            if name not in valid:
                close = difflib.get_close_matches(name, valid, n=1)
                meant = f" Did you mean {close[0]!r}?" if close and "," not in name else ""
                raise UnknownDebugOptionError(
                    f"There is no debug option {name!r}.{meant} The options are {valid_names}; separate several"
                    " by spaces."
                )
            names[name] = None
    return tuple(names)


CONFIG_FLAG = "te_precision_config"

CONFIG_HELP = f"with --debug {TE_PRECISION}: the YAML config (default: statistics of every Transformer Engine layer)"


def refuse_unread_config(config: object, debug: Iterable[str]) -> None:
    """Refuse a config that nothing reads.

    Raises:
        OptionError: a config is given, but ``te_precision`` is not among the debug options.
    """
    if config is not None and TE_PRECISION not in debug:
        raise OptionError(
            f"{CONFIG_FLAG}={config!r} is read only with the debug option {TE_PRECISION!r}. Add --debug {TE_PRECISION}"
            f" (or debug={TE_PRECISION!r}), or leave {CONFIG_FLAG} out."
        )
