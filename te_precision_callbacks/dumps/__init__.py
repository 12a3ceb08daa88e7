"""Saves tensors of training to files that can be read years later; lists, loads, dequantizes and compares them.

Usage::

    from te_precision_callbacks import dumps

    dumps.save(quantized, "fc1_input.safetensors", high_precision=x, layer="fc1", tensor_name="activation")

    for entry in dumps.list("logs/tensor_dumps"):  # anywhere, without Transformer Engine
        dump = dumps.load(entry.path)
        numbers = dumps.dequantize(dump)
        dumps.compare(dump).differences  # quantized against high precision

``docs/dumps.md`` describes the content of a file.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from te_precision_callbacks.dumps.comparing import Comparison, Difference, compare
    from te_precision_callbacks.dumps.contents import Dump, dequantize
    from te_precision_callbacks.dumps.errors import (
        DifferentShapesError,
        DumpError,
        LaterVersionError,
        NotADumpError,
        NothingToCompareError,
        PickleRefusedError,
    )
    from te_precision_callbacks.dumps.files import load
    from te_precision_callbacks.dumps.header import Header
    from te_precision_callbacks.dumps.listing import Entry, Foreign, Listing
    from te_precision_callbacks.dumps.listing import list_dumps as list
    from te_precision_callbacks.dumps.saving import save

__all__ = [
    "Comparison",
    "Difference",
    "DifferentShapesError",
    "Dump",
    "DumpError",
    "Entry",
    "Foreign",
    "Header",
    "LaterVersionError",
    "Listing",
    "NotADumpError",
    "NothingToCompareError",
    "PickleRefusedError",
    "compare",
    "dequantize",
    "list",
    "load",
    "save",
]

_HERE = "te_precision_callbacks.dumps"
_HOMES = {
    **dict.fromkeys(("Comparison", "Difference", "compare"), "comparing"),
    **dict.fromkeys(("Dump", "dequantize"), "contents"),
    **dict.fromkeys((name for name in __all__ if name.endswith("Error")), "errors"),
    **dict.fromkeys(("Entry", "Foreign", "Listing", "list"), "listing"),
    "Header": "header",
    "load": "files",
    "save": "saving",
}


def __getattr__(name: str) -> object:
    # Each name is imported when it is first used: the command line asks for its help without torch.
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{_HERE}.{_HOMES[name]}"), "list_dumps" if name == "list" else name)
