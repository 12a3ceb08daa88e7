"""Columns of one pass over a tensor, all float64.

Micro-batches and ranks merge sums and counts by addition, and extremes by maximum, so minima are negated. Every column
except ``nonfinite`` ignores inf and nan.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

from te_precision_callbacks.base.numerics.blocks import Block, as_matrix
from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.engine.simulation import FLOAT32_SCALES

MOMENT_SUMS = ("finite", "nonfinite", "zeros", "sum", "square_sum", "abs_sum")
"""Number of finite elements; of inf and nan; of zeros; sum of x, of x^2 and of abs(x)."""

MAXIMA = ("max", "negated_min", "negated_min_nonzero")
"""max(x); max(-x); max(-abs(x)) over x != 0. :data:`NOTHING` without such an element."""

COMPARISON_SUMS = (
    "compared",
    "underflows",
    "overflows",
    "error_square_sum",
    "signal_square_sum",
    "underflow_square_sum",
)
"""Comparison of x with its quantized value y: number of finite x; of x != 0 with y == 0; of abs(x) above the largest
value of the format and scale times :data:`ROUNDING`; sum of (x - y)^2; sum of x^2; sum of x^2 over x with y == 0.
"""

ROUNDING = 1 + 2.0**-21
"""More than what rounding to float32 takes from a factor and its products, so that a tensor's amax does not overflow by
it. Products with the largest numbers of the formats are exact in float32."""

SCALE_SUMS = ("scales", "scale_sum", "scale_square_sum")
"""Number, sum and sum of squares of the factors from code to value, without inf and nan."""

SCALE_MAXIMA = ("scale_max", "negated_scale_min")
"""Largest factor, and negated smallest. :data:`NOTHING` without a factor."""

LIMIT_SUMS = ("blocks", "saturated", "flushed", "zero_blocks")
"""Number of blocks; of non-zero blocks with a scale at a limit; at the lower limit; of blocks of zeros only."""

LOSS_SUMS = ("blocks", "underflow_blocks", "overflow_blocks")
"""Number of blocks; with an underflow; with an overflow."""

LOSS_MAXIMA = ("underflow_share",)
"""Largest share of underflows among the finite elements of a block."""

RANGE_SUMS = ("ranges", "range_sum")
"""Number of blocks with a finite element other than 0; sum of their dynamic ranges."""

RANGE_MAXIMA = ("range_max", "negated_range_min")
"""Largest dynamic range of a block, and negated smallest."""

EXPONENT_BINS = 256
"""Bin e counts the finite x != 0 with biased float32 exponent e: 2^(e-127) <= abs(x) < 2^(e-126) for e from 1 to 254.
Bin 0 has magnitudes below 2^-126; bin 255 has float64 magnitudes of 2^128 and more.
"""

NOTHING = -math.inf
"""The neutral value of a maximum."""


class ColumnPlaces(NamedTuple):
    """Offsets of a measurement's columns in the vectors of sums and maxima; -1 if not measured.

    Only a block-scaled tensor has the columns from ``limits`` on.
    """

    moments: int = -1
    maxima: int = -1
    compared: int = -1
    scales: int = -1
    scale_maxima: int = -1
    exponents: int = -1
    limits: int = -1
    losses: int = -1
    ranges: int = -1
    loss_maxima: int = -1
    range_maxima: int = -1


UNBLOCKED = ColumnPlaces._fields.index("limits")
"""Number of places that every tensor can have."""

NOT_MEASURED = ColumnPlaces()


@dataclass(frozen=True)
class BlockScaledTensor:
    """A block-scaled tensor.

    Attributes:
        part: the rowwise or the columnwise data of the tensor.
        block: numbers of rows and columns that share a scale. Square blocks of MXFP8 and NVFP4 store the scale again
            for each row or column.
    """

    part: Stored
    block: Block

    @property
    def stored_again(self) -> tuple[int, int]:
        """Rows and columns of stored scales per block."""
        rows, columns = self.part.block
        return self.block[0] // rows, self.block[1] // columns

    @property
    def limits(self) -> tuple[float, float]:
        if self.part.largest_scale is None:
            return FLOAT32_SCALES
        return (0.0, self.part.largest_scale)

    def fits(self, values: torch.Tensor) -> bool:
        """Return whether a tensor has the shape of the tensor before quantization."""
        row = values.shape[-1] if values.ndim > 1 else values.numel()
        shape = (values.numel() // (row or 1), row)
        return (shape[::-1] if self.part.transposed else shape) == self.part.matrix_shape

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """Arrange the tensor before quantization in the rows and columns of the codes.

        Raises:
            ValueError: the sizes differ.
        """
        if not self.fits(values):
            raise ValueError(
                f"values: the shape is {tuple(values.shape)}, must be that of the quantized tensor, {self.part.shape}."
            )
        rows = as_matrix(values)
        if self.part.transposed:
            return rows.t()
        return rows


@dataclass(eq=False)
class Pending:
    """A tensor to measure.

    Attributes:
        values: any shape and strides.
        codes: uint8, the FP8 codes in the shape of ``values``, if any.
        scale_inv: float32, one element: the factor from decoded code to value.
        e5m2: whether the codes are E5M2, not E4M3.
        in_blocks: instead of ``codes`` and ``scale_inv``.
    """

    values: torch.Tensor
    codes: torch.Tensor | None = None
    scale_inv: torch.Tensor | None = None
    e5m2: bool = False
    places: ColumnPlaces = NOT_MEASURED
    in_blocks: BlockScaledTensor | None = None


Repeat: TypeAlias = Callable[[Sequence[Pending], torch.Tensor, torch.Tensor, int], Sequence[Pending]]
"""Repeats the launches of earlier tensors for others, which differ in nothing but their sizes and contents.

It takes the tensors, the vectors of sums and maxima, and the handle of the current stream, and returns the tensors that
are left.
"""


# --- the rows of every step (largest.py) ---

FLOAT32 = 0
E4M3 = 3
E5M2 = 4
E8M0 = 5
RECIPROCAL = 6
AMAX = 7
FORMATS = {torch.float32: FLOAT32, torch.bfloat16: 1, torch.float16: 2}
"""dtype -> its number in the kernels; FP8 codes are uint8; ``RECIPROCAL`` is float32, of which 1/x counts, and ``AMAX``
one float32 at any address."""

NOT_ADDED = -1
NEVER = 2**31 - 1
INFINITE = 0x7F800000
"""The first values of a row's columns; the bits of inf."""

MAGNITUDE = 0
SCALE = 1
FIRST = 2
COLUMNS = 3
"""The columns of a row, and their number."""


LargestOf: TypeAlias = tuple[torch.Tensor, int, torch.Tensor | None, int, int, int]
"""A tensor to add to a row: its values as stored; their format, a number of :data:`FORMATS`, ``E4M3``, ``E5M2``,
``E8M0``, ``RECIPROCAL`` or ``AMAX``; the factor of all codes, float32 [1], None without one; the place in the row; the
place in the order of execution; and the column, ``MAGNITUDE``, or ``SCALE`` for the scales of blocks. It is a plain
tuple, since one is made for each tensor of a step."""


@functools.cache
def single_one(device: torch.device) -> torch.Tensor:
    return torch.ones(1, dtype=torch.float32, device=device)
