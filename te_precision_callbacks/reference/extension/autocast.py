"""A function of the extension does not see torch's autocast, as a kernel of the compiled extension does not.

In autocast torch multiplies float32 tensors as float16 or bfloat16. The codes of FP8 tensors are float32 here: a sum of
their products is too large for float16, and bfloat16 would round it twice.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")

_DEVICE_TYPES = ("cpu", "cuda")


def outside_of_autocast(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap ``function`` so that products have the type of their operands."""

    @functools.wraps(function)
    def call(*arguments: P.args, **options: P.kwargs) -> R:
        enabled = [name for name in _DEVICE_TYPES if torch.is_autocast_enabled(name)]
        if not enabled:
            return function(*arguments, **options)
        with contextlib.ExitStack() as stack:
            for name in enabled:
                stack.enter_context(torch.autocast(name, enabled=False))
            return function(*arguments, **options)

    return call
