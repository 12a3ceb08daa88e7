"""The columns of the result of one pass over a tensor, all float64.

Sums and counts are merged over micro-batches and ranks by adding, extremes by their maximum, so a minimum is kept
negated. "Finite" elements are neither inf nor nan; every column except ``nonfinite`` is computed from these alone.
"""

from __future__ import annotations

import math

MOMENT_SUMS = ("finite", "nonfinite", "zeros", "sum", "square_sum", "abs_sum")
"""Number of finite elements; of inf and nan; of zeros; sum of x; sum of x^2; sum of abs(x)."""

MAXIMA = ("max", "negated_min", "negated_min_nonzero")
"""max(x); max(-x); max(-abs(x)) over x != 0. :data:`NOTHING` where there is no such element."""

COMPARISON_SUMS = ("compared", "underflows", "overflows", "error_square_sum", "signal_square_sum")
"""Comparing x with its quantized value y: number of finite x; of x != 0 with y == 0; of abs(x) > the largest value that
the format and scale can hold; sum of (x - y)^2; sum of x^2."""

SCALE_SUMS = ("scales", "scale_sum", "scale_square_sum")
"""The number of factors from code to value, their sum, and the sum of their squares. Factors of 0, inf and nan are left
out."""

SCALE_MAXIMA = ("scale_max", "negated_scale_min")
"""The largest factor, and the negated smallest. :data:`NOTHING` where there is none."""

EXPONENT_BINS = 256
"""Bin e of an exponent histogram counts the finite x != 0 whose biased float32 exponent is e: 2^(e-127) <= abs(x) <
2^(e-126) for e from 1 to 254. Bin 0 has the numbers below 2^-126; bin 255 those of float64 from 2^128 on."""

NOTHING = -math.inf
"""The neutral value of a maximum."""
