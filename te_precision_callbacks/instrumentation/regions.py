"""Tracks the ``te.autocast`` regions that a step's forwards enter.

A region sets its layers' precision. If a step enters the same regions in the same order as the last one, layers are
assumed to be in the same regions.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

_MAX_RECIPES = 64


class AutocastRegions:
    """Compares each step's regions with the step before.

    Attributes:
        excludes_more: whether the last complete step entered more regions with ``enabled=False`` than the step before.
            If so, layers that changed to high precision are in such a region.
    """

    def __init__(self) -> None:
        self.excludes_more = False
        self.has_enabled = False
        self._disabled = 0
        self._disabled_before = 0
        self._recipes: list[Any] = []
        self._entered = 0
        self._before = 0

    def wrap(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap ``FP8GlobalStateManager.autocast_enter`` of TE 2.20.2 (``pytorch/quantization.py``)."""

        @functools.wraps(upstream)
        def autocast_enter(
            enabled: bool = False, calibrating: bool = False, fp8_recipe: Any = None, *arguments: Any, **keywords: Any
        ) -> Any:
            if not torch.compiler.is_compiling():  # a compiled function would be recompiled for each new number
                self._entered = hash((self._entered, enabled, self._recipe_index(fp8_recipe)))
                self._disabled += not enabled
                self.has_enabled |= enabled
            return upstream(enabled, calibrating, fp8_recipe, *arguments, **keywords)

        return autocast_enter

    @property
    def has_entered(self) -> bool:
        return self._entered != 0

    def end_step(self) -> bool:
        before = self._before
        self._before = self._entered
        self._entered = 0
        self.excludes_more = self._disabled > self._disabled_before
        self._disabled_before = self._disabled
        self._disabled = 0
        return self._before != before

    def _recipe_index(self, recipe: Any) -> int:
        """Return the index of a recipe; equal recipes share it, since scripts may create a recipe per step."""
        for number, known in enumerate(self._recipes):
            if known is recipe or known == recipe:
                return number
        if len(self._recipes) == _MAX_RECIPES:
            self._recipes.clear()
        self._recipes.append(recipe)
        return len(self._recipes) - 1
