"""The dynamic range inside the blocks of a tensor.

    largest_range(tensor, Blocks(32, 1))                       # max_blockwise_dynamic_range, of the user's own blocks
    blocks = in_blocks(as_matrix(tensor), (1, 32))             # [blocks, elements]
    range_columns(blocks, {Of.RANGES, Of.RANGE_BINS})          # block_dynamic_range_*, of the blocks of a recipe

``max_blockwise_dynamic_range`` is as in Transformer Engine 2.20.2 (``debug/features/utils/stats_computation.py:
compute_max_blockwise_dynamic_range``), with two differences: a block at the edge may be partial, and elements that are
not finite are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch

from te_precision_callbacks.engine.kernels import compiled, eager
from te_precision_callbacks.engine.kernels.columns import NOTHING
from te_precision_callbacks.numerics.blocks import as_matrix, padded
from te_precision_callbacks.statistics.names import Blocks
from te_precision_callbacks.statistics.table import RANGES, Of

RANGE_SUMS = ("ranges", "range_sum")
"""Number of blocks with a finite element other than 0; the sum of their dynamic ranges."""

RANGE_MAXIMA = ("range_max", "negated_range_min")
"""The largest dynamic range of a block, and the negated smallest."""

RANGE_KINDS = frozenset({Of.RANGES, Of.RANGE_BINS})
"""What :func:`range_columns` gives."""


def largest_range(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The largest log2(max(abs(x)) / min(abs(x))) over the non-zero finite elements of a block.

    Args:
        values: any shape, any float dtype; its last dimension is that of the rows.
        blocks: which blocks.

    Returns:
        float64, [1]; :data:`NOTHING` where no block has a non-zero finite element.
    """
    matrix = as_matrix(values)
    if not matrix.numel():
        return torch.full((1,), NOTHING, dtype=torch.float64, device=matrix.device)
    found = _largest_range(matrix, blocks)
    if blocks.both and blocks.dims != 2:  # square tiles of the transposed tensor are the same tiles
        found = torch.maximum(found, _largest_range(matrix.t(), blocks))
    return found.reshape(1)


def _largest_range(matrix: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    height = min(blocks.size, matrix.shape[0]) if blocks.dims == 2 else 1
    width = min(blocks.size, matrix.shape[1])
    # Zeros fill a partial block: they are left out as the zeros of the tensor are.
    whole = padded(matrix, (height, width), 0.0)
    found = [compiled.run(_extremes, piece) for piece in compiled.pieces(whole.reshape(-1, width))]
    # Along a row first, so that no transposed copy is made; then over the rows of a tile.
    tiles = (whole.shape[0] // height, height, whole.shape[1] // width)
    largest = torch.cat([largest for largest, _ in found]).view(tiles).amax(1)
    smallest = torch.cat([smallest for _, smallest in found]).view(tiles).amin(1)
    return torch.where(largest > 0, _log2_of_ratio(largest, smallest), NOTHING).amax()


def _log2_of_ratio(largest: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """log2(largest / smallest), float64: a whole number where the ratio is a power of two, and never out of range."""
    (upper, upper_exponent), (lower, lower_exponent) = torch.frexp(largest), torch.frexp(smallest)
    return torch.log2(upper.to(torch.float64) / lower) + (upper_exponent - lower_exponent)


def _extremes(pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest magnitude of each row, or 0, and the smallest above 0, or inf."""
    magnitude = eager.widened(pieces).abs()
    counted = (magnitude > 0) & (magnitude < math.inf)
    return torch.where(counted, magnitude, 0.0).amax(1), torch.where(counted, magnitude, math.inf).amin(1)


def range_columns(
    blocks: torch.Tensor, wanted: Collection[Of]
) -> dict[Of, tuple[torch.Tensor | None, torch.Tensor | None]]:
    """The columns of the dynamic ranges log2(max(abs(x)) / min(abs(x))) of blocks, over x != 0.

    Args:
        blocks: [blocks, elements], any float dtype; elements that are not finite are left out.
        wanted: the kinds to compute; those outside :data:`RANGE_KINDS` are ignored.

    Returns:
        The columns that are added and those of which the maximum is kept: RANGE_SUMS and RANGE_MAXIMA, the counts of
        the bins and RANGE_MAXIMA. float64.
    """
    if RANGE_KINDS.isdisjoint(wanted):
        return {}
    found = [compiled.run(_extremes, piece) for piece in compiled.pieces(blocks)]
    largest, smallest = (torch.cat([piece[index] for piece in found]) for index in (0, 1))
    counted = largest > 0
    ranges = torch.where(counted, _log2_of_ratio(largest, smallest), 0.0)
    sums = torch.stack([counted.sum(dtype=torch.float64), ranges.sum()])
    maxima = torch.stack([torch.where(counted, ranges, NOTHING).amax(), torch.where(counted, -ranges, NOTHING).amax()])
    columns: dict[Of, tuple[torch.Tensor | None, torch.Tensor | None]] = {}
    if Of.RANGES in wanted:
        columns[Of.RANGES] = sums, maxima
    if Of.RANGE_BINS in wanted:
        columns[Of.RANGE_BINS] = eager.count_in_bins(ranges, counted, RANGES), maxima
    return columns
