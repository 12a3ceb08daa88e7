"""The layout of the vectors of one measurement, for the checks of kernels here and in tests/engine."""

from __future__ import annotations

from typing import NamedTuple

from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    EXPONENT_BINS,
    MAXIMA,
    MOMENT_SUMS,
    SCALE_MAXIMA,
    SCALE_SUMS,
    ColumnPlaces,
)


class Layout(NamedTuple):
    """Layout of a single measurement's vectors, without gaps; ``sums`` and ``maxima`` are the lengths."""

    places: ColumnPlaces
    sums: int
    maxima: int


def layout(*, codes: bool, histogram: bool) -> Layout:
    """Return the layout of a measurement.

    Sums: MOMENT_SUMS; with ``codes`` COMPARISON_SUMS and SCALE_SUMS; with ``histogram`` EXPONENT_BINS counts. Maxima:
    MAXIMA; with ``codes`` SCALE_MAXIMA.
    """
    compared = len(MOMENT_SUMS)
    scales = compared + len(COMPARISON_SUMS)
    exponents = scales + len(SCALE_SUMS) if codes else compared
    places = ColumnPlaces(moments=0, maxima=0, exponents=exponents if histogram else -1)
    if codes:
        places = places._replace(compared=compared, scales=scales, scale_maxima=len(MAXIMA))
    maxima = len(MAXIMA) + (len(SCALE_MAXIMA) if codes else 0)
    return Layout(places, exponents + (EXPONENT_BINS if histogram else 0), maxima)
