"""Saves tensors of training to safetensors files; lists, loads and dequantizes them.

Usage::

    from te_precision_callbacks import dumps

    dumps.save(quantized, "fc1_input.safetensors", high_precision=x, layer="fc1", tensor_name="activation")

    for entry in dumps.list("logs/tensor_dumps"):  # anywhere, without Transformer Engine
        dump = dumps.load(entry.path)
        error = dumps.dequantize(dump) - dump.tensors["high_precision"]

    dumps.gemm_errors("fc1.fprop_gemm.safetensors")  # of a whole GEMM: of its kernel, and of its format

``docs/gemm-error.md`` describes the content of a file.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.dumps.contents import Dump, DumpError, Header, NotADumpError, dequantize
    from te_precision_callbacks.dumps.dump_files import Entry, load, save
    from te_precision_callbacks.dumps.dump_files import list_dumps as list
    from te_precision_callbacks.dumps.gemms import GemmErrors, gemm_errors

__all__ = [
    "Dump",
    "DumpError",
    "Entry",
    "GemmErrors",
    "Header",
    "NotADumpError",
    "dequantize",
    "gemm_errors",
    "list",
    "load",
    "save",
]

__getattr__, __dir__ = lazy_names(__name__)
