"""Compares two recorded runs: facts that differ, and where values diverge first, and how far beyond the noise.

from te_precision_callbacks.views.compare import compare
from te_precision_callbacks.runs import open_run

result = compare(open_run("bf16"), open_run("fp8"), noise=[open_run("bf16_again")])
result.first.name, result.first.iteration, result.first.origin
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.base.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.views.compare.comparison import compare
    from te_precision_callbacks.views.compare.comparison_page import ComparedNumbers, write_comparison
    from te_precision_callbacks.views.compare.paired import SeedComparison, compare_seeds
    from te_precision_callbacks.views.compare.result import (
        Comparison,
        ComparisonError,
        FactDifference,
        Parting,
        StatisticDeparture,
    )

__all__ = [
    "ComparedNumbers",
    "Comparison",
    "ComparisonError",
    "FactDifference",
    "Parting",
    "SeedComparison",
    "StatisticDeparture",
    "compare",
    "compare_seeds",
    "write_comparison",
]

__getattr__, __dir__ = lazy_names(__name__)
