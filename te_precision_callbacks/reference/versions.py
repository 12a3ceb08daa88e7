"""Which Transformer Engine the reference backend was written for."""

from __future__ import annotations

from te_precision_callbacks.reference.errors import TransformerEngineVersionError

SUPPORTED = ">=2.20,<2.21"
REQUIREMENT = f"transformer-engine{SUPPORTED}"


def checked_version() -> str:
    """The version of the installed Transformer Engine, if the backend was written for it.

    Raises:
        TransformerEngineVersionError: none is installed, or another version.
    """
    from importlib import metadata

    from packaging.specifiers import SpecifierSet

    try:
        version = metadata.version("transformer-engine")
    except metadata.PackageNotFoundError:
        raise TransformerEngineVersionError(
            "No Transformer Engine is installed. The reference backend runs the Python of Transformer Engine 2.20.x: "
            f'pip install "{REQUIREMENT}"'
        ) from None
    if not SpecifierSet(SUPPORTED).contains(version, prereleases=True):
        raise TransformerEngineVersionError(
            f"Transformer Engine {version} is installed, and the reference backend was written for 2.20.x: "
            f'pip install "{REQUIREMENT}"'
        )
    return version
