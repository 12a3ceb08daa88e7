"""Columns of a block-scaled tensor, in plain torch.

    columns(in_blocks, tensor, {StatisticSource.QUANTIZED, StatisticSource.LOSSES})    # sums and maxima of each kind

Runs on any device, without a compiler. Codes are decoded one band of rows at a time, so temporaries do not grow with
the tensor.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from te_precision_callbacks.base.numerics.blocks import as_matrix, pad_to_blocks, split_into_blocks
from te_precision_callbacks.base.numerics.formats import FloatFormat
from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import (
    COMPARISON_SUMS,
    NOTHING,
    ROUNDING,
    BlockScaledTensor,
    ColumnPlaces,
    Pending,
)
from te_precision_callbacks.statistics.names import Blocks
from te_precision_callbacks.statistics.table import StatisticSource

_BAND = 2**24
"""Elements of a band, unless a row of blocks has more: 64 MiB decoded. A band takes some 100 operations."""

_BY_BLOCK = frozenset({StatisticSource.LOSSES, StatisticSource.SCALES, StatisticSource.SCALE_LIMITS})

_COMPARED, _UNDERFLOWS, _OVERFLOWS, _, _SIGNAL, _ = range(len(COMPARISON_SUMS))


def add(pending: Pending, sums: torch.Tensor, maxima: torch.Tensor) -> None:
    if pending.in_blocks is None:
        raise ValueError("in_blocks: must be given.")
    sources = [source for source in _OF_FORM if getattr(pending.places, PLACES[source][0]) >= 0]
    form_columns = columns(pending.in_blocks, pending.values.detach(), sources)
    eager.add_columns(form_columns, pending.places, sums, maxima)


PLACES: Mapping[StatisticSource, tuple[str, str]] = {
    StatisticSource.TENSOR: ("moments", "maxima"),
    StatisticSource.EXPONENTS: ("exponents", ""),
    StatisticSource.QUANTIZED: ("compared", ""),
    StatisticSource.SCALES: ("scales", "scale_maxima"),
    StatisticSource.SCALE_LIMITS: ("limits", ""),
    StatisticSource.LOSSES: ("losses", "loss_maxima"),
    StatisticSource.RANGES: ("ranges", "range_maxima"),
}
"""Source of statistics -> fields of :class:`ColumnPlaces` with the offsets of its sums and of its maxima, if any."""

_OF_FORM = tuple(PLACES)[2:]
"""Sources that a quantized form has."""


def places_of(segments: Mapping[StatisticSource, tuple[int, int]]) -> ColumnPlaces:
    """Return the places of sources, given the offsets of their sums and maxima."""
    offsets: dict[str, int] = {}
    for source, (sums_at, maxima_at) in segments.items():
        sums, maxima = PLACES[source]
        offsets[sums] = sums_at
        if maxima:
            offsets[maxima] = maxima_at
    return ColumnPlaces(**offsets)


def columns(
    tensor: BlockScaledTensor, values: torch.Tensor | None, sources: Collection[StatisticSource]
) -> dict[str, torch.Tensor]:
    """Compute the columns of the wanted kinds, by the names of their places.

    Args:
        values: the tensor before quantization, any shape and float dtype, if available.
        sources: without ``values``, only kinds of scales.

    Raises:
        ValueError: the tensors differ in size.
    """
    part = tensor.part
    down, along = tensor.stored_again
    matrix = None if values is None else tensor.matrix(values)
    factors = part.factors()[::down, ::along]
    scales = part.block_scales()[::down, ::along]
    merged: dict[str, torch.Tensor] = {}
    for rows, block_rows in _bands(tensor):
        band = matrix if matrix is None else split_into_blocks(matrix[rows], tensor.block)
        band_factors = factors[block_rows].reshape(-1, 1)
        compared = None
        occupied = None
        if band is not None and (StatisticSource.QUANTIZED in sources or StatisticSource.LOSSES in sources):
            elements = split_into_blocks(part.elements(rows), tensor.block, 0.0)
            compared = _compare_blocks(
                band, elements, band_factors, part.element_format, by_block=needs_blocks(sources)
            )
        elif needs_blocks(sources):
            blocks = split_into_blocks(part.elements(rows), tensor.block, 0.0) if band is None else band
            occupied = ((blocks != 0) & blocks.isfinite()).any(1)
        band_scales = Scales(band_factors.reshape(-1), scales[block_rows].reshape(-1), *tensor.limits)
        eager.accumulate(merged, columns_of(sources, compared, band_scales, occupied, band))
    return merged


def _bands(tensor: BlockScaledTensor) -> Iterator[tuple[slice, slice]]:
    rows, row = tensor.part.matrix_shape
    height = tensor.block[0]
    step = max(1, _BAND // max(1, height * row))
    for first in range(0, -(-rows // height), step):
        yield slice(first * height, (first + step) * height), slice(first, first + step)


class Scales(NamedTuple):
    """Factor from code to value and stored scale of each block, float32; limits of the stored scale."""

    factors: torch.Tensor
    stored: torch.Tensor
    low: float
    high: float


def needs_blocks(sources: Collection[StatisticSource]) -> bool:
    return not _BY_BLOCK.isdisjoint(sources)


def _compare_blocks(
    blocks: torch.Tensor, elements: torch.Tensor, factors: torch.Tensor, number_format: FloatFormat, *, by_block: bool
) -> torch.Tensor:
    """COMPARISON_SUMS of blocks and decoded codes: [6, blocks], or [6, 1] over all blocks."""
    pieces = eager.split_rows(blocks)
    sizes = [len(piece) for piece in pieces]
    compared = []
    for piece, codes, scales in zip(pieces, torch.split(elements, sizes), torch.split(factors, sizes), strict=True):
        compared.append(compare_piece(piece, codes * scales, scales, number_format, by_block=by_block))
    return join_comparisons(compared, by_block=by_block)


def compare_piece(
    piece: torch.Tensor, quantized: torch.Tensor, factors: torch.Tensor, number_format: FloatFormat, *, by_block: bool
) -> torch.Tensor:
    """COMPARISON_SUMS of a piece of blocks: [6, blocks], or [6, 1]; ``factors``: [blocks, 1], from code to value."""
    # The largest magnitude that does not overflow is inf where the factor is 0, where everything underflows.
    limit = torch.where(factors == 0, math.inf, factors * (number_format.max * ROUNDING))
    rows = eager.comparison(piece, quantized, limit)
    return rows if by_block else rows.sum(1, keepdim=True)


def join_comparisons(compared: Sequence[torch.Tensor], *, by_block: bool) -> torch.Tensor:
    joined = torch.cat(list(compared), 1)
    return joined if by_block else joined.sum(1, keepdim=True)


def columns_of(
    sources: Collection[StatisticSource],
    compared: torch.Tensor | None,
    scales: Scales,
    occupied: torch.Tensor | None,
    blocks: torch.Tensor | None,
) -> dict[str, torch.Tensor]:
    """Compute the columns of the wanted kinds, by the names of their places.

    Args:
        compared: COMPARISON_SUMS, [6, blocks] if a kind needs single blocks, else [6, 1].
        occupied: bool, [blocks]: true for a block with an element other than 0; None to derive it from ``compared``.
        blocks: [blocks, elements], before quantization; needed for the ranges.
    """
    computed: dict[str, torch.Tensor] = {}
    if occupied is None and compared is not None and needs_blocks(sources):
        occupied = compared[_SIGNAL] > 0
    # The scale of a block of zeros says nothing about the tensor: it follows from the recipe.
    factors = scales.factors if occupied is None else torch.where(occupied, scales.factors, math.inf)
    if StatisticSource.SCALES in sources:
        computed["scales"], computed["scale_maxima"] = eager.scale_columns(factors)
    if compared is not None and StatisticSource.QUANTIZED in sources:
        computed["compared"] = compared.sum(1)
    if compared is not None and StatisticSource.LOSSES in sources:
        computed["losses"], computed["loss_maxima"] = _loss_columns(compared)
    if StatisticSource.SCALE_LIMITS in sources and occupied is not None:
        computed["limits"] = _limit_sums(scales, occupied)
    if blocks is not None and StatisticSource.RANGES in sources:
        computed["ranges"], computed["range_maxima"] = range_columns(blocks)
    return computed


def _loss_columns(compared: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    underflows = compared[_UNDERFLOWS]
    number = torch.ones_like(underflows).sum()
    sums = torch.stack([number, (underflows > 0).sum(), (compared[_OVERFLOWS] > 0).sum()]).to(torch.float64)
    return sums, (underflows / compared[_COMPARED].clamp(min=1)).amax().reshape(1)


def _limit_sums(scales: Scales, occupied: torch.Tensor) -> torch.Tensor:
    flushed = occupied & (scales.stored <= scales.low)
    # Negated, so that a scale of nan counts too.
    saturated = flushed | (occupied & ~(scales.stored < scales.high))
    number = torch.ones_like(occupied, dtype=torch.float64).sum()
    return torch.stack([number, saturated.sum(), flushed.sum(), number - occupied.sum()]).to(torch.float64)


def range_columns(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """RANGE_SUMS and RANGE_MAXIMA, float64: the blocks' dynamic ranges log2(max(abs(x)) / min(abs(x))) over x != 0.

    Args:
        blocks: [blocks, elements], any float dtype; non-finite elements are ignored.
    """
    largest, smallest = _extremes_of(blocks)
    counted = largest > 0
    ranges = torch.where(counted, _log2_of_ratio(largest, smallest), 0.0)
    maxima = torch.stack([torch.where(counted, ranges, NOTHING).amax(), torch.where(counted, -ranges, NOTHING).amax()])
    return torch.stack([counted.sum(dtype=torch.float64), ranges.sum()]), maxima


def largest_range(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Largest log2(max(abs(x)) / min(abs(x))) of a block, over its non-zero finite elements.

    Equals ``max_blockwise_dynamic_range`` of Transformer Engine 2.20.2 (``debug/features/utils/stats_computation.py``),
    except that a block at the edge may be partial, and non-finite elements are ignored.

    Args:
        values: any shape, any float dtype; the last dimension is a row.

    Returns:
        float64, [1]; :data:`NOTHING` if no block has a non-zero finite element.
    """
    matrix = as_matrix(values)
    if not matrix.numel():
        return torch.full((1,), NOTHING, dtype=torch.float64, device=matrix.device)
    largest = _largest_range(matrix, blocks)
    if blocks.both and blocks.dims != 2:  # square tiles of the transposed tensor are the same tiles
        largest = torch.maximum(largest, _largest_range(matrix.t(), blocks))
    return largest.reshape(1)


def _largest_range(matrix: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    height = min(blocks.size, matrix.shape[0]) if blocks.dims == 2 else 1
    width = min(blocks.size, matrix.shape[1])
    # Padding zeros are ignored, like the tensor's own zeros.
    whole = pad_to_blocks(matrix, (height, width), 0.0)
    # Reduce rows first, without a transposed copy; then the rows of a tile.
    largest_of_rows, smallest_of_rows = _extremes_of(whole.reshape(-1, width))
    tiles = (whole.shape[0] // height, height, whole.shape[1] // width)
    largest = largest_of_rows.view(tiles).amax(1)
    smallest = smallest_of_rows.view(tiles).amin(1)
    return torch.where(largest > 0, _log2_of_ratio(largest, smallest), NOTHING).amax()


def _log2_of_ratio(largest: torch.Tensor, smallest: torch.Tensor) -> torch.Tensor:
    """log2(largest / smallest), float64: exact for powers of two, and never out of range."""
    upper, upper_exponent = torch.frexp(largest)
    lower, lower_exponent = torch.frexp(smallest)
    return torch.log2(upper.to(torch.float64) / lower) + (upper_exponent - lower_exponent)


def _extremes_of(rows: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield both :func:`_extremes` of a matrix."""
    return map(torch.cat, zip(*map(_extremes, eager.split_rows(rows)), strict=True))


def _extremes(pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Largest magnitude of each row, or 0; and smallest above 0, or inf."""
    magnitude = eager.widen(pieces).abs()
    counted = (magnitude > 0) & (magnitude < math.inf)
    return torch.where(counted, magnitude, 0.0).amax(1), torch.where(counted, magnitude, math.inf).amin(1)
