"""A stand-in for Transformer Engine's compiled module ``transformer_engine_torch``, in plain PyTorch.

It has all names that Transformer Engine 2.20.2's Python looks up in the compiled module. A function either replaces the
compiled function, on any device, slowly and exactly, or raises
:class:`~te_precision_callbacks.reference.errors.MissingFunctionError` (``missing.py``). Transformer Engine is not
imported until a function needs one of its tensor classes.
"""

# ruff: noqa: F401  # the modules add what they export

from __future__ import annotations

from typing import Any

from te_precision_callbacks.reference.extension import (
    activation,
    attention,
    enums,
    gemm,
    missing,
    multi_tensor,
    mxfp8,
    normalization,
    nvfp4,
    padding,
    quantization,
    rope,
    versions,
)
from te_precision_callbacks.reference.extension.exports import EXPORTED

globals().update(EXPORTED)
__all__ = sorted(EXPORTED)


def __getattr__(name: str) -> Any:
    raise AttributeError(
        f"The reference backend's transformer_engine_torch has no attribute {name!r}: the Python code of Transformer "
        "Engine 2.20.2 does not look it up."
    )
