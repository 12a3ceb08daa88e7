"""Reads a large tensor piece by piece.

Usage::

    for start in range(0, len(flat), PIECE):
        numbers = wide(flat[start : start + PIECE])
"""

from __future__ import annotations

import torch

PIECE = 1 << 16
"""The number of elements that are read at once, in float64: few enough for a cache."""


def wide(values: torch.Tensor) -> torch.Tensor:
    """The numbers in float64, or in complex128 if they are complex; integers beyond 2^53 are rounded."""
    if values.is_complex():
        return values.to(torch.complex128)
    # On some devices float8 can be converted to float64 only through float32.
    return (values if values.element_size() > 1 else values.float()).double()
