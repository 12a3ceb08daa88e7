"""Recipes, and which of them this GPU supports. Importing this module imports Transformer Engine.

Read from 2.20.2: ``common/recipe/__init__.py``, ``pytorch/quantization.py`` and ``pytorch/utils.py``.
"""

from __future__ import annotations

from typing import Any

from transformer_engine.common import recipe as recipes
from transformer_engine.pytorch import quantization
from transformer_engine.pytorch.utils import get_device_compute_capability

from te_precision_callbacks.base.vocabulary import RECIPES

default_recipe = quantization.get_default_fp8_recipe
compute_capability = get_device_compute_capability
CustomRecipe = recipes.CustomRecipe


def recipe_of_name(name: str) -> Any:
    """Create one of RECIPES, with Transformer Engine's defaults."""
    return getattr(recipes, RECIPES[name].recipe_class)()


def why_unsupported(recipe: Any) -> str | None:
    """Return why this GPU does not support a recipe; None if it does."""
    try:
        quantization.check_recipe_support(recipe)
        if recipe.nvfp4():  # not part of that check
            runs, why = quantization.check_nvfp4_support()
            return None if runs else str(why)
    except RuntimeError as error:
        return str(error)
    return None


def unsupported_recipes() -> dict[str, str]:
    """Return each of RECIPES that this GPU does not support, with the reason."""
    refusals = {}
    for name, row in RECIPES.items():
        runs, why = getattr(quantization, row.check)()
        if not runs:
            refusals[name] = why
    return refusals
