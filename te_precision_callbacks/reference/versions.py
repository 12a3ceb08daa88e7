"""The Transformer Engine version that the reference backend was written for."""

from __future__ import annotations

import importlib.util

from te_precision_callbacks.base.errors import install_line
from te_precision_callbacks.reference.errors import InstallError, TransformerEngineVersionError

SUPPORTED = ">=2.20,<2.21"
REQUIREMENT = f"transformer-engine{SUPPORTED}"
IMPORTED = ("einops", "importlib_metadata", "onnx", "onnxscript", "packaging", "pydantic")
"""Packages that Transformer Engine's Python imports, but that only its compiled packages require in pip."""


def checked_version() -> str:
    """The version of the installed Transformer Engine, if the backend was written for it.

    Raises:
        TransformerEngineVersionError: no Transformer Engine, or another version, is installed.
        InstallError: a package that Transformer Engine's Python imports is not installed.
    """
    from importlib import metadata

    from packaging.specifiers import SpecifierSet

    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        raise TransformerEngineVersionError(
            "No Transformer Engine is installed. The reference backend runs the Python of Transformer Engine 2.20.x: "
            f"{install_line('reference')}"
        ) from None
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        raise TransformerEngineVersionError(
            f"Transformer Engine {version} is installed, and the reference backend was written for 2.20.x: "
            f'pip install "{REQUIREMENT}"'
        )
    missing = [name for name in IMPORTED if importlib.util.find_spec(name) is None]
    if missing:
        raise InstallError(
            f"Transformer Engine's Python imports {', '.join(missing)}, which is not installed:"
            f" {install_line('reference')}"
        )
    return version
