"""Replaces triton in Transformer Engine's modules if the CPU replaces the GPU.

The modules import triton, but launch its kernels only for permutation, cross entropy and a few others. Every name
exists here; launching a kernel raises an error.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from te_precision_callbacks.reference.errors import MissingFunctionError

__version__ = "0"


class _Absent:
    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> _Absent:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Absent(f"{self._name}.{name}")

    def __getitem__(self, grid: Any) -> _Absent:
        return self

    def __call__(self, *_arguments: Any, **_options: Any) -> NoReturn:
        raise MissingFunctionError(
            f"{self._name}: the reference backend on a CPU does not support triton kernels. Avoid it, or run on a GPU."
        )


def jit(function: Callable[..., Any] | None = None, **_options: Any) -> Any:
    if function is None:
        return jit
    return _Absent(f"the triton kernel {function.__name__}")


def autotune(*_arguments: Any, **_options: Any) -> Callable[[Any], Any]:
    return lambda kernel: kernel


heuristics = autotune


def Config(*_arguments: Any, **_options: Any) -> None:
    """A candidate for ``autotune``, which ignores it."""


def constexpr_function(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def __getattr__(name: str) -> _Absent:
    if name.startswith("__"):
        raise AttributeError(name)
    return _Absent(f"triton.{name}")
