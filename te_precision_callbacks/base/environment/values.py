"""How libraries read the value of an environment variable, and what they make of one that they do not expect.

flag("2")        # Fault("0 or 1 is expected, and this value counts as 1", stops=False)
equals_1("1")    # None
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class Fault(NamedTuple):
    """What a library makes of a value that it does not expect.

    Attributes:
        what: in words.
        stops: whether a run ends with an exception.
    """

    what: str
    stops: bool


def anything(value: str) -> Fault | None:
    """Any value is read as it is meant."""
    return None


def equals_1(value: str) -> Fault | None:
    """Read as ``value == "1"``."""
    return None if value in ("", "0", "1") else Fault("only '1' turns it on, and this value does not", stops=False)


def equals_0_is_off(value: str) -> Fault | None:
    """Read as ``value != "0"``."""
    return None if value in ("0", "1") else Fault("only '0' turns it off, and this value turns it on", stops=False)


def integer(value: str) -> Fault | None:
    """Read as ``int(value)``."""
    try:
        int(value)
    except ValueError:
        return Fault("an integer is expected, and reading this value raises an exception", stops=True)
    return None


def flag(value: str) -> Fault | None:
    """Read as ``bool(int(value))``."""
    return _flag(value, bool)


def flag_above_0(value: str) -> Fault | None:
    """Read as ``int(value) > 0``."""
    return _flag(value, lambda number: number > 0)


def _flag(value: str, is_on: Callable[[int], bool]) -> Fault | None:
    if value in ("0", "1"):
        return None
    counts_as = "0 or 1 is expected, and this value counts as {:d}"
    return integer(value) or Fault(counts_as.format(is_on(int(value))), stops=False)


def extension_flag(value: str) -> Fault | None:
    """Read by Transformer Engine's extension (common/util/system.h: getenv<bool>), where empty is the default."""
    if value.strip() in ("", "0", "1"):
        return None
    return Fault("0 or 1 is expected, and the extension raises RuntimeError for this value", stops=True)


def torch_flag(value: str) -> Fault | None:
    """Read by torch (c10/util/env.cpp: check_env)."""
    return None if value in ("0", "1") else Fault("0 or 1 is expected, and torch ignores this value", stops=False)


def one_of(*words: str, otherwise: Fault) -> Callable[[str], Fault | None]:
    """Read as one of these words; ``otherwise`` says what another value does."""
    expected = f"{', '.join(map(repr, words[:-1]))} or {words[-1]!r} is expected, and {otherwise.what}"
    return lambda value: None if value in words else Fault(expected, otherwise.stops)
