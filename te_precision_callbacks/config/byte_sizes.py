"""Sizes in bytes, as written in a config.

size_in_bytes("2GiB")  # 2147483648
"""

from __future__ import annotations

import re

_UNITS = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}

_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)")

SIZE_PATTERN = r"^\s*(?!0+(?:\.0*)?(?!\.?\d))\d+(?:\.\d+)?\s*(?:(?:[kKmMgGtT][iI]?)?[bB])?\s*$"
"""The texts that are sizes, for JSON Schema; also some below one byte, and some beyond what a file system can count."""

_NEARLY_A_SIZE = re.compile(r"(\d[\d_]*(?:\.\d+)?(?:[eE]\+?\d+)?)\s*([a-zA-Z]*)")

LARGEST_SIZE = (1 << 63) - 1
"""The most bytes that a file system can count."""


def size_in_bytes(size: object) -> int:
    """A size as written in a config: a number of bytes, or a text with a unit (kB, MB, GB, TB; KiB, MiB, GiB, TiB).

    Raises:
        ValueError: not a size, or below one byte; the text continues a sentence that starts with the key.
    """
    found: float | None = None
    if type(size) is int:
        found = size
    elif isinstance(size, str) and (match := _SIZE.fullmatch(size.strip())) and match[2].lower() in _UNITS:
        found = float(match[1]) * _UNITS[match[2].lower()]
    if found is None or found < 1:
        raise ValueError(
            f"must be a number of bytes >= 1, or a text such as '10MB' (10 * 1000^2) or '2GiB' (2 * 1024^3), not"
            f" {size!r}.{_meant_size(size) if found is None else ''}"
        )
    if found > LARGEST_SIZE:
        raise ValueError(f"must be a number of bytes up to 2^63 - 1, not {size!r}.")
    return int(found)


def _meant_size(size: object) -> str:
    """``" Did you mean '10MB'?"`` for a size with the unit or the number of other programs: 10M, 10 Mo, 1e9."""
    given = isinstance(size, (str, float)) and _NEARLY_A_SIZE.fullmatch(str(size).strip())
    if not given:
        return ""
    number, unit = float(given[1]), given[2].lower()
    if not unit and 1 <= number <= LARGEST_SIZE:
        return f" Did you mean {int(number)}?"
    known = f"{unit[:2] if unit[1:2] == 'i' else unit[:1]}b"
    if not unit or known not in _UNITS or not 1 <= number * _UNITS[known] <= LARGEST_SIZE:
        return ""
    prefix = known[0] if known == "kb" else known[0].upper() + known[1:-1]
    return f" Did you mean '{number:.15g}{prefix}B'?"
