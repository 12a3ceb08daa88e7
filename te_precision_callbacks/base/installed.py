"""Installed versions of packages."""

from __future__ import annotations

import importlib.metadata


def installed_version(name: str) -> str | None:
    """Return the installed version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
