"""Assigns an implementation to each of Transformer Engine's quantizers.

Usage::

    out = casting_for(quantizer).create(quantizer, (4, 32), torch.bfloat16, tensor.device)
    casting_for(quantizer).write(quantizer, tensor, out)

A quantizer is recognised by the name of its class or of a class that it derives from, so Transformer Engine is not
imported here, and a user's subclass is served like its parent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from te_precision_callbacks.base.vocabulary import RECIPES, recipe_of
from te_precision_callbacks.reference.errors import UnsupportedRecipeError
from te_precision_callbacks.reference.extension import float8, float8_block, mxfp8, nvfp4

# Transformer Engine's classes are known only at run time.
Quantizer = Any
QuantizedTensor = Any


class Casting(Protocol):
    """The implementation of one family of quantizers."""

    @property
    def rounds_first(self) -> bool:
        """Whether the float32 result of a norm, an activation or a GEMM is rounded to the nominal type first."""

    @property
    def sums_unrounded(self) -> bool:
        """Whether the bias gradient of an activation is the sum of its float32 gradient, and not of the rounded one."""

    def takes_amax(self, quantizer: Quantizer) -> bool:
        """Whether activations pass the amax of their float32 result, taken before rounding."""

    def create(
        self,
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """A tensor of the quantizer's kind, with unwritten buffers."""

    def fit(self, quantizer: Quantizer, out: QuantizedTensor) -> None:
        """Give ``out`` the buffers that the quantizer's usages ask for, and only those."""

    def write(
        self,
        quantizer: Quantizer,
        source: torch.Tensor,
        out: QuantizedTensor,
        noop: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantize ``source`` into the buffers of ``out``; a given ``amax`` is not measured again."""


_CASTINGS: dict[str, Casting] = {
    "fp8_delayed_scaling": float8.DelayedScaling(),
    "fp8_current_scaling": float8.CurrentScaling(),
    "fp8_block_scaling": float8_block.BlockScaling(),
    "mxfp8": mxfp8.BlockScaling(),
    "nvfp4": nvfp4.BlockScaling(),
}


def casting_for(quantizer: Quantizer) -> Casting:
    """The implementation for a quantizer.

    Raises:
        UnsupportedRecipeError: the reference backend has none for it.
    """
    recipe = recipe_of(quantizer)
    if recipe is None:
        raise UnsupportedRecipeError(
            f"{type(quantizer).__name__}: the reference backend does not have this quantizer. It has"
            f" {', '.join(row.quantizer for row in RECIPES.values())}."
        )
    return _CASTINGS[recipe]
