"""The names of the extension: each module adds its functions and enumerations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

FunctionT = TypeVar("FunctionT", bound=Callable[..., Any])

EXPORTED: dict[str, Any] = {}


def export(function: FunctionT, name: str = "") -> FunctionT:
    """Export a function, under its own name by default, without recording gradients."""
    unrecorded = torch.no_grad()(function)
    EXPORTED[name or function.__name__] = unrecorded
    return unrecorded
