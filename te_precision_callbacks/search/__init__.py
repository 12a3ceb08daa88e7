"""Searches the layers and GEMMs to keep in high precision, on a live model, and confirms the choice with seeds.

    from te_precision_callbacks.search import search

    result = search(model, closure, batches, optimizer=optimizer, cosine=0.999, folder="search")
    result.high, result.extra_ms, result.confirmation

docs/search.md has an example.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.search.results import (
        Confirmation,
        GradientEffect,
        MeasuredGroup,
        Point,
        SearchOptions,
        SearchResult,
    )
    from te_precision_callbacks.search.searching import SearchAtStep, search
    from te_precision_callbacks.search.units import BudgetError, SearchError

__all__ = [
    "BudgetError",
    "Confirmation",
    "GradientEffect",
    "MeasuredGroup",
    "Point",
    "SearchAtStep",
    "SearchError",
    "SearchOptions",
    "SearchResult",
    "search",
]

__getattr__, __dir__ = lazy_names(__name__)
