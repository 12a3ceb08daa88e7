"""Parsing of ``debug=`` and ``--debug``."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, NamedTuple

from te_precision_callbacks.base.errors import OptionError, named_as

ACTIVATION_OVERFLOW = "activation_overflow"

TE_PRECISION = "te_precision"

DEBUG_OPTIONS = (ACTIVATION_OVERFLOW, TE_PRECISION)

DebugValue = str | Iterable[str] | None


class UnknownDebugOptionError(OptionError, ValueError):
    """Not a valid value of ``debug=`` or ``--debug``."""


def parse_debug(value: DebugValue, *, valid: Sequence[str] = DEBUG_OPTIONS) -> tuple[str, ...]:
    """Return the names in a value of ``debug=``, such as ``"a b"`` or a list of such texts, without duplicates.

    Raises:
        UnknownDebugOptionError: a name is unknown, or the value is not text; the message lists all valid names.
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


class Flag(NamedTuple):
    """A session keyword that scripts accept as ``--te_precision_<keyword>``.

    Attributes:
        metavar: the placeholder of its value in help texts; empty for a switch.
        help: the help text, after "with --debug te_precision".
    """

    keyword: str
    metavar: str
    help: str

    @property
    def name(self) -> str:
        return f"{TE_PRECISION}_{self.keyword}"


FLAGS = (
    Flag("config", "PATH", "the YAML config (default: statistics of every Transformer Engine layer)"),
    Flag(
        "require",
        "CONTRACT",
        "what the run must hold, such as 'fp8 >= 95%%', or the path of a YAML file with a precision_contract",
    ),
    Flag("records", "RECORDS", "'on' (the default) or 'off', or the most that a rank records of the run, as '64GiB'"),
    Flag(
        "statistics_log",
        "LOG",
        "the ranks that write the statistics log, 'rank0' (the default), 'all' or 'off', and the most that a rank's log"
        " grows to, such as 'rank0, 4GiB'",
    ),
    Flag(
        "on_finding",
        "REACTION",
        "what happens when a rule finds something: 'warn' (the default), 'stop', or 'stop: ' with severities or rules,"
        " such as 'stop: error'",
    ),
    Flag("report", "", "write the page of the run, report.html, into the log folder at its end"),
)


def given_flags(
    arguments: object, debug: Iterable[str], instead: Mapping[str, object] = MappingProxyType({})
) -> dict[str, Any]:
    """Return the given flags as keywords of a session; values of ``instead`` that are not None take precedence.

    Raises:
        OptionError: a flag was given without ``te_precision`` among the debug options.
    """
    given: dict[str, Any] = {}
    for flag in FLAGS:
        value = instead.get(flag.keyword)
        if value is None:
            value = getattr(arguments, flag.name, None)
        if value is None or (value is False and not flag.metavar):
            continue
        if TE_PRECISION not in debug:
            raise OptionError(
                f"{flag.name}={value!r} is read only with the debug option {TE_PRECISION!r}. Add --debug"
                f" {TE_PRECISION} (or debug={TE_PRECISION!r}), or leave {flag.name} out."
            )
        given[flag.keyword] = value
    return given


def naming_flags(given: Mapping[str, object]) -> AbstractContextManager[None]:
    return named_as({flag.keyword: flag.name for flag in FLAGS if flag.keyword in given})
