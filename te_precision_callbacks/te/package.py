"""The installed package ``transformer_engine``: its import, its version, its errors, and its folder of debug features.

Importing this module does not import Transformer Engine.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import logging
from pathlib import Path
from traceback import walk_tb

from te_precision_callbacks.base.errors import TransformerEngineUnavailableError

logger = logging.getLogger(__name__)

SUPPORTED_TE = ("2.20", "2.21")
"""Supported TE versions: at least the first, below the second."""


def import_transformer_engine() -> None:
    """Import Transformer Engine's PyTorch modules.

    Raises:
        TransformerEngineUnavailableError: Transformer Engine or its compiled extension is missing or broken.
    """
    try:
        importlib.import_module("transformer_engine.pytorch")
        importlib.import_module("transformer_engine.debug.pytorch.debug_quantization")
    except (ImportError, OSError, RuntimeError, AssertionError) as error:
        # Without its compiled part, the package raises RuntimeError or FileNotFoundError, not ImportError.
        raise TransformerEngineUnavailableError(error) from error


_installed_version = functools.cache(importlib.metadata.version)


def warn_unless_supported() -> None:
    from packaging.version import Version

    installed = _installed_version("transformer_engine")
    low, high = (Version(bound) for bound in SUPPORTED_TE)
    if not low <= Version(Version(installed).base_version) < high:
        logger.warning(
            "te-precision-callbacks supports Transformer Engine >=%s,<%s, but %s is installed. The session"
            " continues, but parts of the observation may fail.",
            *SUPPORTED_TE,
            installed,
        )


def transformer_engine_error(error: BaseException | None) -> BaseException | None:
    """Return the exception, of an exception and its causes, that a function of Transformer Engine raised."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            if frame.f_globals.get("__name__", "").partition(".")[0] == "transformer_engine":
                return error
        error = error.__cause__ or error.__context__
    return None


@functools.cache
def feature_folders() -> tuple[str, ...]:
    """Return the folder of Transformer Engine's debug features; empty if Transformer Engine is not installed."""
    spec = importlib.util.find_spec("transformer_engine")
    folders = (spec.submodule_search_locations or ()) if spec is not None else ()
    return tuple(str(Path(folder, "debug", "features")) for folder in folders)
