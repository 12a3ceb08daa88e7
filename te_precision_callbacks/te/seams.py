"""The owners of Transformer Engine's functions that a session replaces. Importing this module imports them.

Read from Transformer Engine 2.20.2.
"""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from transformer_engine.pytorch import cpu_offload, cpu_offload_v1, graph, quantization
from transformer_engine.pytorch.attention.dot_product_attention import backends
from transformer_engine.pytorch.cpp_extensions import fused_attn, gemm
from transformer_engine.pytorch.module import _common, base, grouped_linear, layernorm_linear, layernorm_mlp, linear
from transformer_engine.pytorch.ops import fuser
from transformer_engine.pytorch.ops.basic import BasicLinear, GroupedLinear
from transformer_engine.pytorch.ops.op import FusedOperation

state_manager = quantization.FP8GlobalStateManager


def operation_methods(names: Sequence[str]) -> list[tuple[Any, str, Any]]:
    """Return the methods of ``te.ops`` that may run a GEMM: class, name and method."""
    basic = [BasicLinear, GroupedLinear]
    owners = list(itertools.product(basic, names))
    for parent in (*basic, FusedOperation):
        for kind in _subclasses(parent):
            owners += [(kind, name) for name in names if name in vars(kind)]
    return [(kind, name, getattr(kind, name)) for kind, name in owners]


def _subclasses(parent: Any) -> Iterator[Any]:
    for child in parent.__subclasses__():
        yield child
        yield from _subclasses(child)


def callers(functions: Mapping[Any, Sequence[str]]) -> Sequence[tuple[Any, str]]:
    """Return the Python modules that have imported functions of ``cpp_extensions``, and the functions' names there.

    Searches again after new imports.

    Args:
        functions: Python module of ``cpp_extensions`` -> names of functions.
    """
    originals = {name: getattr(origin, name) for origin, names in functions.items() for name in names}
    imported = len(sys.modules), next(reversed(sys.modules)), len(vars(sys.modules["__main__"]))
    candidates = itertools.product(_modules_with(tuple(originals), *imported), originals.items())
    return [(module, name) for module, (name, original) in candidates if _is_caller(module, name, original)]


@functools.lru_cache(maxsize=1)
def _modules_with(names: Sequence[str], *imported: object) -> Sequence[Any]:
    """Return the Python modules that have any of the names; ``imported`` changes with new imports."""
    keys = dict.fromkeys(names).keys()  # of two sets of keys the smaller is looked up; of a dict, all keys would be
    modules = list(sys.modules.values())
    return [module for module in modules if not keys.isdisjoint(getattr(module, "__dict__", {}).keys())]


def _is_caller(module: Any, name: str, original: Any) -> bool:
    """Return whether a module has the function, or belongs to Transformer Engine and has a user's replacement."""
    function = vars(module).get(name)
    return function is original or (
        callable(function) and str(getattr(module, "__name__", "")).startswith("transformer_engine.")
    )
