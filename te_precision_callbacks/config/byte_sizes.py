"""Sizes in bytes, as written in configs: ``2GiB``."""

from __future__ import annotations

import re

from pydantic import ByteSize, TypeAdapter

SIZE_PATTERN = r"^\s*(?!0+(?:\.0*)?(?!\.?\d))\d+(?:\.\d+)?\s*(?:[bB]|[kKmMgGtT](?:[iI]?[bB])?)?\s*$"
"""A pattern of sizes, without their range. pydantic also accepts bits and suffixes."""

LARGEST_SIZE = (1 << 63) - 1

_BYTES = TypeAdapter(ByteSize)


def size_in_bytes(size: object) -> int:
    """Parse a size: a number of bytes, or a text with a unit (kB, MB, GB, TB; KiB, MiB, GiB, TiB).

    Raises:
        ValueError: not a size, or below one byte; the text continues a sentence that starts with the key.
    """
    is_size = (type(size) is int and size > 0) or (isinstance(size, str) and re.match(SIZE_PATTERN, size))
    try:
        count = int(_BYTES.validate_python(size)) if is_size else 0
    except ValueError:  # more digits than a float has
        count = LARGEST_SIZE + 1
    if count < 1:
        raise ValueError(
            "must be a number of bytes >= 1, or a text such as '10MB' (10 * 1000^2) or '2GiB' (2 * 1024^3), not"
            f" {size!r}."
        )
    if count > LARGEST_SIZE:
        raise ValueError(f"must be a number of bytes up to 2^63 - 1, not {size!r}.")
    return count
