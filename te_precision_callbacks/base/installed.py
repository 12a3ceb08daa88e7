"""Which version of a package is installed."""

from __future__ import annotations

import importlib.metadata


def installed_version(name: str) -> str | None:
    """The version of a package that is installed now; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
