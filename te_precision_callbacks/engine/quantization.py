"""Reads quantized tensors and simulates quantization, for quantization statistics.

    data = read(quantized_tensor, columnwise=False)        # Transformer Engine's quantized tensor, of any recipe
    settings = default_settings("mxfp8", "gradient", e5m2=None)
    columns = simulate("mxfp8", tensor, {StatisticSource.QUANTIZED}, settings, columnwise=False)
    columns = simulate("mxfp8", tensor, {StatisticSource.QUANTIZED}, settings_of(quantizer), columnwise=False)

The simulation uses the recipe's arithmetic (:mod:`te_precision_callbacks.engine.simulation`), not Transformer
Engine's quantizers, so it also covers layers in high precision and GPUs without the format.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.errors import QuantizationError
from te_precision_callbacks.base.numerics.blocks import as_matrix, pad_to_blocks, split_into_blocks
from te_precision_callbacks.base.numerics.formats import E2M1, E5M2
from te_precision_callbacks.base.numerics.layouts import MXFP8, NVFP4, PER_TENSOR, LayoutError
from te_precision_callbacks.base.numerics.scaling import FLOAT32_MAX
from te_precision_callbacks.base.vocabulary import direction_name
from te_precision_callbacks.engine.kernels import eager
from te_precision_callbacks.engine.kernels.columns import BlockScaledTensor
from te_precision_callbacks.engine.kernels.eager_blocks import (
    PLACES,
    Scales,
    columns_of,
    compare_piece,
    join_comparisons,
    needs_blocks,
    range_columns,
)
from te_precision_callbacks.engine.simulation import SIMULATED, QuantizerSettings, Recipe, round_blocks
from te_precision_callbacks.statistics.names import no_blocks
from te_precision_callbacks.statistics.table import BLOCK_SOURCES, StatisticSource
from te_precision_callbacks.te.tensors import (
    PER_TENSOR_PARTS,
    fp8_format,
    is_scaled_in_2d,
    per_tensor_codes,
    read_stored,
    scaling_mode,
)


class PerTensor(NamedTuple):
    """An FP8 tensor with one scale.

    Attributes:
        codes: uint8, in the tensor's shape.
        scale_inv: the factor from decoded code to value.
    """

    codes: torch.Tensor
    scale_inv: torch.Tensor
    e5m2: bool


def read(quantized: Any, *, columnwise: bool) -> PerTensor | BlockScaledTensor:
    """Return the contents of a quantized tensor of Transformer Engine.

    Args:
        quantized: a Float8, MXFP8, Float8 block-scaled or NVFP4 tensor or storage; scales may be in GEMM layout.
        columnwise: whether to read the columnwise data; no difference for per-tensor FP8.

    Raises:
        QuantizationError: the data are missing or Hadamard-transformed, or the format is not supported.
    """
    if scaling_mode(quantized) == PER_TENSOR:
        codes = per_tensor_codes(quantized)
        if codes is None:
            raise QuantizationError("the quantized tensor has neither its data nor their transpose")
        return PerTensor(codes, PER_TENSOR_PARTS(quantized)[2], fp8_format(quantized) is E5M2)
    try:
        part = read_stored(quantized, columnwise=columnwise)
    except LayoutError as error:
        raise QuantizationError(str(error)) from error
    if part is None:
        raise QuantizationError(f"the quantized tensor has no {direction_name(columnwise)} data")
    if part.hadamard:
        direction = direction_name(columnwise)
        raise QuantizationError(f"the {direction} data are of a random Hadamard transform of the tensor")
    block = part.block
    if part.mode in (MXFP8, NVFP4) and is_scaled_in_2d(quantized):
        block = (max(block), max(block))
    return BlockScaledTensor(part, block)


def default_settings(recipe: str, tensor: str, *, e5m2: bool | None) -> QuantizerSettings:
    """Return the default settings of a recipe: :meth:`Recipe.defaults`.

    Raises:
        QuantizationError: delayed scaling, which is not simulated.
    """
    return _simulated_recipe(recipe).defaults(tensor, e5m2=e5m2)


def settings_of(quantizer: Any) -> QuantizerSettings:
    """Return the settings of a Transformer Engine quantizer.

    Read from TE 2.20.2, ``pytorch/tensor/{float8,mxfp8,float8_blockwise,nvfp4}_tensor.py``.

    Raises:
        QuantizationError: an NVFP4 quantizer with "4over6" or an amax per row, which is not simulated.
    """
    for attribute, what in (("nvfp4_use_4over6", "4over6"), ("row_scaled_nvfp4", "an amax for each row")):
        if getattr(quantizer, attribute, False):
            raise QuantizationError(
                f"the layer runs NVFP4 with {what}, which is not simulated, only read from its tensors"
            )
    return QuantizerSettings(
        e5m2=fp8_format(quantizer) is E5M2,
        square=getattr(quantizer, "block_scaling_dim", 1) == 2 or getattr(quantizer, "with_2d_quantization", False),
        power_of_two=getattr(quantizer, "force_pow_2_scales", False),
        amax_epsilon=getattr(quantizer, "amax_epsilon", 0.0),
    )


def _simulated_recipe(recipe: str) -> Recipe:
    if recipe not in SIMULATED:
        raise QuantizationError(
            f"{recipe} can be read only in a layer that runs it: its scale comes from the amaxes of earlier steps"
        )
    return SIMULATED[recipe]


def simulate(
    recipe: str,
    values: torch.Tensor,
    sources: Collection[StatisticSource],
    settings: QuantizerSettings,
    *,
    columnwise: bool,
) -> Mapping[str, torch.Tensor]:
    """Simulate a recipe on a tensor; return the columns by the names of their places.

    Args:
        values: any shape, float64, float32, float16 or bfloat16; only finite elements count.
        sources: the kinds of columns to return. An empty tensor returns no columns.

    Raises:
        QuantizationError: delayed scaling, since its scale comes from the amaxes of earlier steps; or block statistics
            of a recipe without blocks.
    """
    simulated = _simulated_recipe(recipe)
    block = simulated.block(settings)
    if block is None and not BLOCK_SOURCES.isdisjoint(sources):
        raise QuantizationError(no_blocks(recipe))
    if not values.numel():
        return {}
    if block is None:
        row = math.gcd(values.numel(), 4096)
        row = row if row >= 256 else 4096
        blocks = pad_to_blocks(eager.flatten(values).unsqueeze(0), (1, row), math.nan).view(-1, row)
    else:
        matrix = as_matrix(values)
        blocks = split_into_blocks(matrix.t() if columnwise else matrix, block)
    if set(sources) == {StatisticSource.RANGES}:
        return dict(zip(PLACES[StatisticSource.RANGES], range_columns(blocks), strict=True))
    finite = torch.where(values.isfinite(), values.abs(), 0.0)
    tensor_amax = finite.amax().double().clamp(0.0, FLOAT32_MAX).to(torch.float32)
    by_block = block is not None and needs_blocks(sources)
    number_format = E2M1 if recipe == "nvfp4" else settings.fp8
    compared = []
    factors = []
    scales = []
    for piece in eager.split_rows(blocks):
        rounded = round_blocks(recipe, piece, tensor_amax, settings)
        compared.append(compare_piece(piece, rounded.values, rounded.factors, number_format, by_block=by_block))
        factors.append(rounded.factors.reshape(-1))
        scales.append(rounded.scales.reshape(-1))
    sums = join_comparisons(compared, by_block=by_block)
    if block is None:  # one scale, which always counts, as in a real quantized tensor
        tensor_scales = Scales(factors[0], scales[0], *simulated.limits)
        return columns_of(sources, sums, tensor_scales, torch.ones_like(factors[0], dtype=torch.bool), blocks)
    block_scales = Scales(torch.cat(factors), torch.cat(scales), *simulated.limits)
    return columns_of(sources, sums, block_scales, None, blocks)
