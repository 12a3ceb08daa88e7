"""Assigns an implementation to each of Transformer Engine's quantizers.

A quantizer is recognised by the name of its class or of a class that it derives from, so Transformer Engine is not
imported here, and a user's subclass is served like its parent.
"""

from __future__ import annotations

from te_precision_callbacks.base.vocabulary import RECIPES, recipe_of
from te_precision_callbacks.reference.errors import UnsupportedRecipeError
from te_precision_callbacks.reference.extension import float8, float8_block, mxfp8, nvfp4
from te_precision_callbacks.reference.extension.casting import Casting, Quantizer

_CASTINGS: dict[str, Casting] = {
    "fp8_delayed_scaling": float8.DelayedScaling(),
    "fp8_current_scaling": float8.CurrentScaling(),
    "fp8_block_scaling": float8_block.Float8BlockCasting(),
    "mxfp8": mxfp8.Mxfp8Casting(),
    "nvfp4": nvfp4.Nvfp4Casting(),
}


def casting_for(quantizer: Quantizer) -> Casting:
    """The implementation for a quantizer.

    Raises:
        UnsupportedRecipeError: the reference backend has no implementation.
    """
    recipe = recipe_of(quantizer)
    if recipe is None:
        raise UnsupportedRecipeError(
            f"{type(quantizer).__name__}: the reference backend does not have this quantizer. It has"
            f" {', '.join(row.quantizer for row in RECIPES.values())}."
        )
    return _CASTINGS[recipe]
