"""The option ``records=``."""

from __future__ import annotations

from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.config.fields import size_in_bytes

DEFAULT_LIMIT = 16 << 30
"""The default limit in bytes: about 10^9 values per rank."""

LEAST_LIMIT = 1 << 20
"""The smallest limit in bytes, since files are thinned one by one."""

Records = bool | int | str


def record_limit(records: object) -> int:
    """Return the most bytes that a rank records, or 0 without records; raises OptionError."""
    if isinstance(records, bool):
        return DEFAULT_LIMIT if records else 0
    word = records.strip().lower() if isinstance(records, str) else ""
    if word in ("on", "off"):
        return DEFAULT_LIMIT if word == "on" else 0
    try:
        limit = size_in_bytes(records)
    except ValueError:
        limit = 0
    if limit >= LEAST_LIMIT:
        return limit
    if limit:
        raise OptionError(
            f"records={records!r} leaves {limit:,} bytes for a run, which is too little to keep anything. Give a"
            " size of at least 1MiB, such as '64GiB', or 'off'."
        )
    raise OptionError(f"records= must be 'on' or True, 'off' or False, or a size such as '64GiB', not {records!r}.")
