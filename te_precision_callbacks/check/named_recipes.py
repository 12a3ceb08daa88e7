"""Transformer Engine's recipes by name."""

from __future__ import annotations

from typing import Any

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.vocabulary import RECIPES
from te_precision_callbacks.config.problems import suggestion
from te_precision_callbacks.reference import is_installed, target

AUTO, NONE = "auto", "none"

CHOICES = (AUTO, NONE, *RECIPES)


class RecipeError(PrecisionDebugError, ValueError):
    """A recipe that does not exist, or that the GPU does not support."""


def recipe_named(name: str) -> Any:
    """A recipe with Transformer Engine's defaults, which environment variables such as NVTE_BACKWARD_OVERRIDE change.

    Args:
        name: ``auto``, Transformer Engine's default for the GPU; ``none``, for None; or one of RECIPES.

    Raises:
        RecipeError: there is no such recipe, Transformer Engine refuses it on this GPU, or an environment variable has
            an invalid value.
    """
    if name not in CHOICES:
        raise RecipeError(f"There is no recipe {name!r}.{suggestion(name, CHOICES)}")
    if name == NONE:
        return None
    from transformer_engine.common import recipe as recipes
    from transformer_engine.pytorch import quantization

    try:
        made = quantization.get_default_fp8_recipe() if name == AUTO else getattr(recipes, RECIPES[name].recipe_class)()
    except (AssertionError, ValueError) as error:  # of pydantic, if that is installed
        details = error.errors()[0]["msg"] if hasattr(error, "errors") else str(error)
        raise RecipeError(f"Transformer Engine refuses the recipe {name!r}: {details}") from error
    try:
        quantization.check_recipe_support(made)
        supported, why = quantization.check_nvfp4_support() if made.nvfp4() else (True, "")  # which that leaves out
    except RuntimeError as error:
        supported, why = False, str(error)
    if not supported:
        if is_installed() and target.capability() != target.ALLOWED[-1]:
            best = "{}.{}".format(*target.ALLOWED[-1])
            why += f" {target.ENVIRONMENT_VARIABLE}={best} in the environment makes the reference backend emulate"
            why += " another GPU."
        raise RecipeError(f"Transformer Engine refuses the recipe {name!r}: {why}")
    return made
