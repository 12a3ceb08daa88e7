"""Measures what quantization made, or would make, of a tensor: the columns for its statistics.

    found = read(quantized_tensor, columnwise=False)        # Transformer Engine's quantized tensor, of any recipe
    found.columns(tensor, {Of.QUANTIZED, Of.LOSSES})        # columns of each kind, if the tensor has blocks
    would = simulate("mxfp8", tensor, amax, {Of.QUANTIZED}, default_settings("mxfp8", "gradient"),
                     columnwise=False)
    would = simulate("mxfp8", tensor, amax, {Of.QUANTIZED}, settings_of(quantizer), columnwise=False)

A recipe is simulated from its arithmetic (:mod:`te_precision_callbacks.numerics.recipes`), without Transformer Engine's
quantizers, so that a layer in high precision, and a machine whose GPU has no such format, gets its numbers too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.engine import blockwise
from te_precision_callbacks.engine.kernels import compiled, eager
from te_precision_callbacks.engine.kernels.columns import COMPARISON_SUMS
from te_precision_callbacks.errors import PrecisionDebugError
from te_precision_callbacks.numerics.blocks import as_matrix, in_blocks, padded
from te_precision_callbacks.numerics.formats import E2M1, E5M2, FloatFormat
from te_precision_callbacks.numerics.layouts import MXFP8, NVFP4, PER_TENSOR, LayoutError, Stored, fp8_format, stored
from te_precision_callbacks.numerics.recipes import FLOAT32_SCALES, RECIPES, Recipe, Settings, round_blocks
from te_precision_callbacks.numerics.scaling import FLOAT32_MAX
from te_precision_callbacks.statistics.names import no_blocks
from te_precision_callbacks.statistics.table import OF_BLOCKS, SCALES, Of

LIMIT_SUMS = ("blocks", "saturated", "flushed", "zero_blocks")
"""Number of blocks; of blocks with an element other than 0, the number with a scale at a limit, and at the lower limit;
number of blocks with zeros only."""

LOSS_SUMS = ("blocks", "underflow_blocks", "overflow_blocks")
"""Number of blocks; of blocks with an underflow; of blocks with an overflow."""

LOSS_MAXIMA = ("underflow_share",)
"""The largest share of underflows among the finite elements of a block."""

SumsAndMaxima = tuple[torch.Tensor | None, torch.Tensor | None]
"""The columns that are added, and those of which the maximum is kept."""

_COMPARED, _UNDERFLOWS, _OVERFLOWS, _, _SIGNAL = range(len(COMPARISON_SUMS))


class QuantizationError(PrecisionDebugError, RuntimeError):
    """A statistic of a quantized tensor that cannot be computed."""


class PerTensor(NamedTuple):
    """A tensor in FP8 with one scale: its codes (uint8, the tensor's shape), and the factor from code to value."""

    codes: torch.Tensor
    scale_inv: torch.Tensor
    e5m2: bool


def read(quantized: Any, *, columnwise: bool) -> PerTensor | InBlocks:
    """What a quantized tensor of Transformer Engine holds.

    Args:
        quantized: a Float8, MXFP8, Float8 block-scaled or NVFP4 tensor or storage; its scales may be laid out for a
            GEMM.
        columnwise: which of its data. The columnwise data of per-tensor FP8 are its rowwise data.

    Raises:
        QuantizationError: the tensor does not hold these data, the data are of a Hadamard transform of the tensor, or
            the format is not one of these.
    """
    per_tensor = hasattr(quantized, "_scale_inv")
    direction = "columnwise" if columnwise else "rowwise"
    try:
        part = stored(quantized, columnwise=columnwise and not per_tensor)
    except LayoutError as error:
        raise QuantizationError(str(error)) from error
    if part is None and per_tensor:
        raise QuantizationError("the quantized tensor holds neither its data nor their transpose")
    if part is None:
        raise QuantizationError(f"the quantized tensor has no {direction} data")
    if part.hadamard:
        raise QuantizationError(f"the {direction} data are of a random Hadamard transform of the tensor")
    if part.mode == PER_TENSOR:
        return PerTensor(part.as_tensor(part.codes), quantized._scale_inv, part.element_format is E5M2)
    square = part.mode in (MXFP8, NVFP4) and getattr(quantized._quantizer, "with_2d_quantization", False)
    return InBlocks(part, (max(part.block),) * 2 if square else part.block)


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

    def columns(self, values: torch.Tensor | None, wanted: Collection[Of]) -> Mapping[Of, SumsAndMaxima]:
        """The columns of the kinds that are wanted.

        Args:
            values: the tensor before quantization, any shape and float dtype; None if it does not exist.
            wanted: the kinds; without ``values``, only kinds of the scales.
        """
        part = self.part
        down, along = (side // stored_side for side, stored_side in zip(self.block, part.block, strict=True))
        factors = part.factors()[::down, ::along].reshape(-1, 1)
        scales = part.block_scales()[::down, ::along].reshape(-1)
        blocks = compared = occupied = None
        if values is not None:
            matrix = as_matrix(values)
            blocks = in_blocks(matrix.t() if part.transposed else matrix, self.block)
        if blocks is not None and _needs_comparison(wanted):
            elements = in_blocks(part.elements(), self.block, 0.0)
            compared = _compared(blocks, elements, factors, part.element_format, by_block=_needs_blocks(wanted))
        elif blocks is not None and _needs_blocks(wanted):
            occupied = _occupied(blocks)
        elif _needs_blocks(wanted):
            occupied = _occupied(in_blocks(part.elements(), self.block, 0.0))
        return _columns(wanted, compared, _Scales(factors.reshape(-1), scales, *_scale_limits(part)), occupied, blocks)


def _occupied(blocks: torch.Tensor) -> torch.Tensor:
    """Which blocks have a finite element other than 0: bool, [blocks]."""
    return ((blocks != 0) & blocks.isfinite()).any(1)


class _Scales(NamedTuple):
    """The factor from code to value and the stored scale of each block, float32; and the limits of the stored scale."""

    factors: torch.Tensor
    stored: torch.Tensor
    low: float
    high: float


def _scale_limits(part: Stored) -> tuple[float, float]:
    return FLOAT32_SCALES if part.largest_scale is None else (0.0, part.largest_scale)


def _needs_comparison(wanted: Collection[Of]) -> bool:
    return Of.QUANTIZED in wanted or Of.LOSSES in wanted


def _needs_blocks(wanted: Collection[Of]) -> bool:
    """Whether each block must be looked at: for its losses, or for whether its scale means anything."""
    return not _BY_BLOCK.isdisjoint(wanted)


_BY_BLOCK = frozenset({Of.LOSSES, Of.SCALES, Of.SCALE_BINS, Of.SCALE_LIMITS})


def _compared(
    blocks: torch.Tensor, elements: torch.Tensor, factors: torch.Tensor, number_format: FloatFormat, *, by_block: bool
) -> torch.Tensor:
    """COMPARISON_SUMS of blocks and their decoded codes: [5, blocks], or [5, 1] over all blocks."""
    function = _comparison(number_format, by_block)
    pieces = compiled.pieces(blocks)
    sizes = [len(piece) for piece in pieces]
    others = zip(torch.split(elements, sizes), torch.split(factors, sizes), strict=True)
    found = [compiled.run(function, piece, *other) for piece, other in zip(pieces, others, strict=True)]
    return _joined(found, by_block)


@functools.cache
def _comparison(number_format: FloatFormat, by_block: bool) -> Callable[..., torch.Tensor]:
    def comparison(blocks: torch.Tensor, elements: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
        rows = eager.comparison(blocks, elements * factors, _limit(factors, number_format))
        return rows if by_block else rows.sum(1, keepdim=True)

    return comparison


def _joined(compared: list[torch.Tensor], by_block: bool) -> torch.Tensor:
    return torch.cat(compared, 1) if by_block else torch.cat(compared, 1).sum(1, keepdim=True)


def _columns(
    wanted: Collection[Of],
    compared: torch.Tensor | None,
    scales: _Scales,
    occupied: torch.Tensor | None,
    blocks: torch.Tensor | None,
) -> dict[Of, SumsAndMaxima]:
    """The columns of the kinds that are wanted.

    Args:
        wanted: the kinds.
        compared: COMPARISON_SUMS, [5, blocks] if a kind needs each block.
        scales: of the blocks.
        occupied: bool, [blocks]: which have an element other than 0; None if ``compared`` tells.
        blocks: [blocks, elements], before quantization; needed for the ranges.
    """
    found: dict[Of, SumsAndMaxima] = {}
    if occupied is None and compared is not None and _needs_blocks(wanted):
        occupied = compared[_SIGNAL] > 0
    # The factor of a block of zeros is set by the recipe, and says nothing about the tensor.
    factors = scales.factors if occupied is None else torch.where(occupied, scales.factors, 0.0)
    if Of.SCALES in wanted:
        found[Of.SCALES] = eager.scale_columns(factors)
    if Of.SCALE_BINS in wanted:
        found[Of.SCALE_BINS] = scale_bins(factors), eager.scale_columns(factors)[1]
    if compared is not None and Of.QUANTIZED in wanted:
        found[Of.QUANTIZED] = compared.sum(1), None
    if compared is not None and Of.LOSSES in wanted:
        found[Of.LOSSES] = _loss_columns(compared)
    if Of.SCALE_LIMITS in wanted and occupied is not None:
        found[Of.SCALE_LIMITS] = _limit_sums(scales, occupied), None
    if blocks is not None:
        found |= blockwise.range_columns(blocks, wanted)
    return found


def _loss_columns(compared: torch.Tensor) -> SumsAndMaxima:
    underflows = compared[_UNDERFLOWS]
    number = torch.ones_like(underflows).sum()
    sums = torch.stack([number, (underflows > 0).sum(), (compared[_OVERFLOWS] > 0).sum()]).to(torch.float64)
    return sums, (underflows / compared[_COMPARED].clamp(min=1)).amax().reshape(1)


def _limit_sums(scales: _Scales, occupied: torch.Tensor) -> torch.Tensor:
    flushed = occupied & (scales.stored <= scales.low)
    # Not "above the upper limit": a scale that is nan counts too.
    saturated = flushed | (occupied & ~(scales.stored < scales.high))
    number = torch.ones_like(occupied, dtype=torch.float64).sum()
    return torch.stack([number, saturated.sum(), flushed.sum(), number - occupied.sum()]).to(torch.float64)


def _limit(factors: torch.Tensor, number_format: FloatFormat) -> torch.Tensor:
    """The largest magnitude that codes and factors can hold; 0 where the factor is 0, so everything underflows."""
    return torch.where(factors == 0, math.inf, factors * number_format.max)


def scale_bins(scales: torch.Tensor) -> torch.Tensor:
    """How many factors are in each bin of :data:`~te_precision_callbacks.statistics.table.SCALES`: float64."""
    wide = scales.reshape(-1).to(torch.float64)
    return eager.count_in_bins(torch.log2(wide), (wide > 0) & (wide < math.inf), SCALES)


def default_settings(recipe: str, tensor: str, *, e5m2: bool | None = None) -> Settings:
    """As :meth:`Recipe.defaults`.

    Raises:
        QuantizationError: delayed scaling, which is not simulated.
    """
    return _simulated(recipe).defaults(tensor, e5m2=e5m2)


def settings_of(quantizer: Any) -> Settings:
    """The settings of one of Transformer Engine's quantizers.

    Read from TE 2.20.2, ``pytorch/tensor/{float8,mxfp8,float8_blockwise,nvfp4}_tensor.py``.

    Raises:
        QuantizationError: an NVFP4 quantizer with "4over6" or an amax for each row, which is not simulated.
    """
    for attribute, what in (("nvfp4_use_4over6", "4over6"), ("row_scaled_nvfp4", "an amax for each row")):
        if getattr(quantizer, attribute, False):
            raise QuantizationError(f"the layer runs NVFP4 with {what}, which is read from its tensors, not simulated")
    return Settings(
        e5m2=fp8_format(quantizer) is E5M2,
        square=getattr(quantizer, "block_scaling_dim", 1) == 2 or getattr(quantizer, "with_2d_quantization", False),
        power_of_two=getattr(quantizer, "force_pow_2_scales", False),
        amax_epsilon=getattr(quantizer, "amax_epsilon", 0.0),
    )


def _simulated(recipe: str) -> Recipe:
    if recipe not in RECIPES:
        raise QuantizationError(
            f"{recipe} can be read only in a layer that runs it: its scale comes from the amaxes of earlier steps"
        )
    return RECIPES[recipe]


def simulate(
    recipe: str,
    values: torch.Tensor,
    amax: torch.Tensor,
    wanted: Collection[Of],
    settings: Settings,
    *,
    columnwise: bool,
) -> Mapping[Of, SumsAndMaxima]:
    """What a recipe would make of a tensor.

    Args:
        recipe: any recipe except delayed scaling.
        values: any shape, float64, float32, float16 or bfloat16; only finite elements count.
        amax: float64 or float32, one element: the largest finite magnitude, 0 or below if there is none.
        wanted: the kinds of columns; a tensor without elements has none.
        settings: those of the recipe's quantizer.
        columnwise: whether blocks run down a column.

    Raises:
        QuantizationError: the recipe is delayed scaling, whose scale comes from the amaxes of earlier steps; or
            statistics of blocks are wanted of a recipe without blocks.
    """
    simulated = _simulated(recipe)
    block = simulated.block(settings)
    if block is None and not OF_BLOCKS.isdisjoint(wanted):
        raise QuantizationError(no_blocks(recipe))
    if not values.numel():
        return {}
    if block is None:
        blocks = _in_rows(values)
    else:
        matrix = as_matrix(values)
        blocks = in_blocks(matrix.t() if columnwise else matrix, block)
    if blockwise.RANGE_KINDS.issuperset(wanted):
        return blockwise.range_columns(blocks, wanted)
    tensor_amax = amax.reshape(()).clamp(0.0, FLOAT32_MAX).to(torch.float32)
    by_block = block is not None and _needs_blocks(wanted)
    simulation = _simulation(recipe, settings, by_block)
    found = [compiled.run(simulation, piece, tensor_amax) for piece in compiled.pieces(blocks)]
    compared = _joined([compared for compared, _, _ in found], by_block)
    kept = found[:1] if block is None else found
    factors, stored_scales = (torch.cat([piece[index].reshape(-1) for piece in kept]) for index in (1, 2))
    # One scale for the tensor always counts, as in a real quantized tensor.
    occupied = torch.ones_like(factors, dtype=torch.bool) if block is None else None
    return _columns(wanted, compared, _Scales(factors, stored_scales, *simulated.limits), occupied, blocks)


@functools.cache
def _simulation(
    recipe: str, settings: Settings, by_block: bool
) -> Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    def simulation(blocks: torch.Tensor, tensor_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rounded = round_blocks(recipe, blocks, tensor_amax, settings)
        number_format = E2M1 if recipe == "nvfp4" else settings.fp8
        rows = eager.comparison(blocks, rounded.values, _limit(rounded.factors, number_format))
        return rows if by_block else rows.sum(1, keepdim=True), rounded.factors, rounded.scales

    return simulation


def _in_rows(values: torch.Tensor) -> torch.Tensor:
    """All elements as a matrix, padded with nan, which no column counts."""
    row = math.gcd(values.numel(), 4096)
    row = row if row >= 256 else 4096
    return padded(eager.flattened(values).unsqueeze(0), (1, row), math.nan).view(-1, row)
