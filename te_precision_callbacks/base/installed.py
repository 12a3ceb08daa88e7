"""Which version of a package is installed."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def installed_version(name: str) -> str | None:
    """The installed version of a package, read once in a process; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
