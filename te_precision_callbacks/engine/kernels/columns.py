"""The columns of the result of one pass over a tensor, all float64.

Sums and counts are merged over micro-batches and ranks by adding, extremes by their maximum, so a minimum is kept
negated. "Finite" elements are neither inf nor nan; every column except ``nonfinite`` is computed from these alone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from te_precision_callbacks.base.numerics.blocks import as_matrix
from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.base.numerics.recipes import FLOAT32_SCALES

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

LIMIT_SUMS = ("blocks", "saturated", "flushed", "zero_blocks")
"""Number of blocks; of blocks with an element other than 0, the number with a scale at a limit, and at the lower limit;
number of blocks with zeros only."""

LOSS_SUMS = ("blocks", "underflow_blocks", "overflow_blocks")
"""Number of blocks; of blocks with an underflow; of blocks with an overflow."""

LOSS_MAXIMA = ("underflow_share",)
"""The largest share of underflows among the finite elements of a block."""

RANGE_SUMS = ("ranges", "range_sum")
"""Number of blocks with a finite element other than 0; the sum of their dynamic ranges."""

RANGE_MAXIMA = ("range_max", "negated_range_min")
"""The largest dynamic range of a block, and the negated smallest."""

EXPONENT_BINS = 256
"""Bin e of an exponent histogram counts the finite x != 0 whose biased float32 exponent is e: 2^(e-127) <= abs(x) <
2^(e-126) for e from 1 to 254. Bin 0 has the numbers below 2^-126; bin 255 those of float64 from 2^128 on."""

NOTHING = -math.inf
"""The neutral value of a maximum."""


class ColumnPlaces(NamedTuple):
    """Offsets of a measurement's columns in the vectors of sums and maxima; -1: not measured.

    Attributes:
        moments, compared, scales, exponents: MOMENT_SUMS, COMPARISON_SUMS, SCALE_SUMS, and EXPONENT_BINS counts.
        maxima, scale_maxima: MAXIMA and SCALE_MAXIMA.
    """

    moments: int = -1
    maxima: int = -1
    compared: int = -1
    scales: int = -1
    scale_maxima: int = -1
    exponents: int = -1


class BlockPlaces(NamedTuple):
    """As :class:`ColumnPlaces`, of what only a tensor that is quantized in blocks has.

    Attributes:
        limits, losses, ranges: LIMIT_SUMS, LOSS_SUMS and RANGE_SUMS.
        scale_bins, range_bins: the counts of the bins SCALES and RANGES.
        loss_maxima, range_maxima: LOSS_MAXIMA and RANGE_MAXIMA.
        binned_scale_maxima, binned_range_maxima: once more SCALE_MAXIMA and RANGE_MAXIMA, which the bins go with.
    """

    limits: int = -1
    losses: int = -1
    ranges: int = -1
    scale_bins: int = -1
    range_bins: int = -1
    loss_maxima: int = -1
    range_maxima: int = -1
    binned_scale_maxima: int = -1
    binned_range_maxima: int = -1


@dataclass(frozen=True)
class InBlocks:
    """A tensor that is quantized in blocks.

    Attributes:
        part: one direction of the tensor.
        block: rows and columns of a block, which shares a scale. For square blocks of MXFP8 and NVFP4 the scale is
            stored again for each row, or column.
    """

    part: Stored
    block: tuple[int, int]

    @property
    def stored_again(self) -> tuple[int, int]:
        """Rows and columns of stored scales per block."""
        (height, width), (rows, columns) = self.block, self.part.block
        return height // rows, width // columns

    @property
    def limits(self) -> tuple[float, float]:
        """Of the stored scales."""
        return FLOAT32_SCALES if self.part.largest_scale is None else (0.0, self.part.largest_scale)

    def fits(self, values: torch.Tensor) -> bool:
        """Return whether a tensor has the shape of the tensor before quantization."""
        row = values.shape[-1] if values.ndim > 1 else values.numel()
        shape = (values.numel() // (row or 1), row)
        return (shape[::-1] if self.part.transposed else shape) == self.part.matrix_shape

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """The tensor before quantization in the rows and columns of the codes.

        Raises:
            ValueError: the codes are of a tensor of another size.
        """
        if not self.fits(values):
            raise ValueError(
                f"values: the shape is {tuple(values.shape)}, must be that of the quantized tensor, {self.part.shape}."
            )
        rows = as_matrix(values)
        return rows.t() if self.part.transposed else rows


class Pending(NamedTuple):
    """A tensor that is to be measured.

    Attributes:
        values: any shape and strides.
        codes: uint8, the shape of ``values``: the FP8 codes of the quantized tensor; None without.
        scale_inv: float32, one element: the quantized values are the decoded codes times this factor.
        e5m2: whether the codes are E5M2, not E4M3.
        places: where the result goes.
        in_blocks: the quantized tensor, in place of ``codes`` and ``scale_inv``, if it has blocks.
        of_blocks: where the columns of these go.
    """

    values: torch.Tensor
    codes: torch.Tensor | None
    scale_inv: torch.Tensor | None
    e5m2: bool
    places: ColumnPlaces
    in_blocks: InBlocks | None = None
    of_blocks: BlockPlaces = BlockPlaces()


class Layout(NamedTuple):
    """The vectors of one measurement alone, without gaps.

    Attributes:
        places: of the columns.
        sums, maxima: how many columns they have.
    """

    places: ColumnPlaces
    sums: int
    maxima: int


def layout(*, codes: bool, histogram: bool) -> Layout:
    """The vectors of a measurement with or without codes, and with or without counts of exponents.

    The sums are MOMENT_SUMS, COMPARISON_SUMS and SCALE_SUMS of codes, EXPONENT_BINS counts; the maxima are MAXIMA, and
    SCALE_MAXIMA of codes.
    """
    compared = len(MOMENT_SUMS)
    scales = compared + len(COMPARISON_SUMS)
    exponents = scales + len(SCALE_SUMS) if codes else compared
    places = ColumnPlaces(moments=0, maxima=0, exponents=exponents if histogram else -1)
    if codes:
        places = places._replace(compared=compared, scales=scales, scale_maxima=len(MAXIMA))
    maxima = len(MAXIMA) + (len(SCALE_MAXIMA) if codes else 0)
    return Layout(places, exponents + (EXPONENT_BINS if histogram else 0), maxima)


def measured_by(
    add: Callable[[Sequence[Pending], torch.Tensor, torch.Tensor], None],
    values: torch.Tensor,
    codes: torch.Tensor | None = None,
    scale_inv: torch.Tensor | None = None,
    *,
    e5m2: bool = False,
    histogram: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns of one tensor: the vectors of :func:`layout`."""
    places, width, extremes = layout(codes=codes is not None, histogram=histogram)
    sums = torch.zeros(width, dtype=torch.float64, device=values.device)
    maxima = torch.full((extremes,), NOTHING, dtype=torch.float64, device=values.device)
    add([Pending(values, codes, scale_inv, e5m2, places)], sums, maxima)
    return sums, maxima
