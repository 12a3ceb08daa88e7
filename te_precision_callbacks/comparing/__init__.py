"""Compares two recorded runs: which facts differ, where the numbers part first, and how far beyond the noise.

from te_precision_callbacks.comparing import compare
from te_precision_callbacks.store import open_run

result = compare(open_run("bf16"), open_run("fp8"), noise=[open_run("bf16_again")])
result.first.name, result.first.iteration, result.first.origin
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from te_precision_callbacks.lazy import lazy_names

if TYPE_CHECKING:
    from te_precision_callbacks.comparing.comparing import compare
    from te_precision_callbacks.comparing.errors import ComparisonError
    from te_precision_callbacks.comparing.model import (
        Comparison,
        Departure,
        FactDifference,
        FirstUnequal,
        Floor,
        LossComparison,
        Pairing,
        Parting,
        Yardstick,
    )
    from te_precision_callbacks.comparing.numbers import ComparedNumbers
    from te_precision_callbacks.comparing.page import write_comparison

__all__ = [
    "ComparedNumbers",
    "Comparison",
    "ComparisonError",
    "Departure",
    "FactDifference",
    "FirstUnequal",
    "Floor",
    "LossComparison",
    "Pairing",
    "Parting",
    "Yardstick",
    "compare",
    "write_comparison",
]

__getattr__, __dir__ = lazy_names(__name__)
