"""Detection of a usable compiled Transformer Engine."""

from __future__ import annotations

import os
import subprocess
import sys

from te_precision_callbacks.reference.inherited import ENVIRONMENT_VARIABLE

COMPILED_MODULE = "transformer_engine_torch"
"""The module of Transformer Engine's compiled extension."""


def why_unavailable() -> str | None:
    """Return None if the compiled Transformer Engine can be imported, else its error.

    The import is tried in a separate process: a failed import would leave parts behind, and a package without its
    compiled part raises RuntimeError instead of ImportError.
    """
    code = "import transformer_engine.pytorch"
    environment = {name: value for name, value in os.environ.items() if name != ENVIRONMENT_VARIABLE}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    if done.returncode == 0:
        return None
    lines = done.stderr.strip().splitlines()
    return lines[-1] if lines else f"the import ended with status {done.returncode}"
