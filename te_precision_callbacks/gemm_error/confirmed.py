"""Where real kernels have confirmed the tolerances of GEMMs. torch is not imported."""

from __future__ import annotations

_CONFIRMED: frozenset[tuple[str, str]] = frozenset()
"""Recipes, each with a GPU as torch names it."""


def is_confirmed(recipe: str, gpu: str) -> bool:
    """Whether the tolerances are confirmed; if not, what is found wrong with a kernel is a warning.

    Args:
        recipe: as in :data:`~te_precision_callbacks.base.vocabulary.RECIPES`.
        gpu: as torch names it; empty for the reference backend, whose kernels have confirmed them.
    """
    return not gpu or (recipe, gpu) in _CONFIRMED
