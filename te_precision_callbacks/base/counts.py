"""Formatting of counts and sizes: ``3,000 files``, ``1.5 GiB``."""

from __future__ import annotations


def many(count: int, what: str) -> str:
    return f"{count:,} {what}{'' if count == 1 or what == 'series' else 's'}"


def size(count: int) -> str:
    units = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
    number, unit = float(count), 0
    while abs(number) >= 999.5 and unit < len(units) - 1:
        number, unit = number / 1024, unit + 1
    return f"{count} B" if not unit else f"{number:.{max(0, 2 - len(str(abs(int(number)))) + 1)}f} {units[unit]}"
