"""Detection of a usable compiled Transformer Engine, and of the version that the reference backend was written for."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

from te_precision_callbacks.base.errors import install_line
from te_precision_callbacks.reference.errors import InstallError, TransformerEngineVersionError
from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE

SUPPORTED = ">=2.20,<2.21"
REQUIREMENT = f"transformer-engine{SUPPORTED}"
IMPORTED = ("einops", "importlib_metadata", "onnx", "onnxscript", "packaging", "pydantic")
"""Packages that Transformer Engine's Python imports, but that only its compiled packages require in pip."""


def checked_version() -> str:
    """Return the version of the installed Transformer Engine, after checking that the backend supports it.

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


COMPILED_MODULE = "transformer_engine_torch"
"""The module of Transformer Engine's compiled extension."""


def why_unavailable() -> str | None:
    """Return None if the compiled Transformer Engine can be imported, else its error.

    The import runs in a separate process: a failed import would leave modules behind, and a package without its
    compiled extension raises RuntimeError instead of ImportError.
    """
    code = "import transformer_engine.pytorch"
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    if lines:
        return lines[-1]
    return f"the import ended with status {done.returncode}"
