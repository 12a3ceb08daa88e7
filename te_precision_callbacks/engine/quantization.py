"""What quantization made of a tensor, or would make of it: the columns of the statistics of quantized tensors.

    found = read(quantized_tensor, columnwise=False)        # Transformer Engine's quantized tensor, of any recipe
    would = simulate("mxfp8", tensor, amax, e5m2=False, weight=False, columnwise=False)

A recipe is simulated in plain torch from its arithmetic, without Transformer Engine's quantizers, so that a layer in
high precision, and a machine whose GPU has no such format, gets its numbers too. Rounding is to nearest; NVFP4 without
the random Hadamard transform. Sources: Transformer Engine 2.20.2, ``common/recipe/recipe_common.cuh`` (current and
block scaling), ``common/util/ptx_arch_spec.cuh`` (E8M0), ``common/cast/nvfp4/core_nvfp4.cuh``; OCP Microscaling Formats
(MX) Specification 1.0 for the formats.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.engine.kernels import compiled, eager
from te_precision_callbacks.engine.kernels.columns import NOTHING
from te_precision_callbacks.errors import PrecisionDebugError
from te_precision_callbacks.formats import E2M1, E4M3, E5M2, E8M0, FloatFormat

SCALE_SUMS = ("scales", "scale_sum", "scale_square_sum")
SCALE_MAXIMA = ("scale_max", "negated_scale_min")

_FLOAT32_MAX = torch.finfo(torch.float32).max


class QuantizationError(PrecisionDebugError, RuntimeError):
    """A statistic of a quantized tensor that cannot be had."""


class PerTensor(NamedTuple):
    """A tensor in FP8 with one scale: its codes (uint8, the tensor's shape), and the factor from code to value."""

    codes: torch.Tensor
    scale_inv: torch.Tensor
    e5m2: bool


class Expanded(NamedTuple):
    """A quantized tensor as values (float32), its block scales, and the largest magnitude that each could have."""

    values: torch.Tensor
    scales: torch.Tensor
    limit: torch.Tensor


def recipe_of(quantizer: Any) -> str | None:
    """The recipe (as in statistics' names) that one of Transformer Engine's quantizers belongs to; None for no recipe.

    A quantizer is recognised by the name of its class or of a class that it derives from.
    """
    for base in type(quantizer).__mro__:
        if base.__name__ in _RECIPE_OF_QUANTIZER:
            return _RECIPE_OF_QUANTIZER[base.__name__]
    return None


_RECIPE_OF_QUANTIZER = {
    "Float8Quantizer": "fp8_delayed_scaling",
    "Float8CurrentScalingQuantizer": "fp8_current_scaling",
    "MXFP8Quantizer": "mxfp8",
    "Float8BlockQuantizer": "fp8_block_scaling",
    "NVFP4Quantizer": "nvfp4",
}


def is_quantized(tensor: Any) -> bool:
    """Whether a tensor is one of Transformer Engine's quantized tensors, with a scale."""
    return tensor is not None and (hasattr(tensor, "_scale_inv") or hasattr(tensor, "_rowwise_scale_inv"))


def is_e5m2(thing: Any) -> bool:
    """Whether a quantizer or a quantized tensor of Transformer Engine has E5M2 codes."""
    dtype = getattr(thing, "_fp8_dtype", None)
    if dtype is None:
        dtype = getattr(thing, "dtype", None)
    return getattr(dtype, "name", "") == "kFloat8E5M2"


def read(quantized: Any, *, columnwise: bool) -> PerTensor | Expanded:
    """What a quantized tensor of Transformer Engine holds.

    Args:
        quantized: a Float8, MXFP8, Float8 block-scaled or NVFP4 tensor or storage.
        columnwise: which of its data. The columnwise data of per-tensor FP8 are its rowwise data.

    Raises:
        QuantizationError: it does not hold these data, its scales are laid out for a GEMM, the data are of a Hadamard
            transform of the tensor, or the format is not one of these.
    """
    if hasattr(quantized, "_scale_inv"):
        return _read_per_tensor(quantized)
    direction = "columnwise" if columnwise else "rowwise"
    codes = getattr(quantized, f"_{direction}_data")
    scales = getattr(quantized, f"_{direction}_scale_inv")
    if codes is None or scales is None:
        raise QuantizationError(f"the quantized tensor has no {direction} data")
    if getattr(quantized, "_with_gemm_swizzled_scales", False):
        raise QuantizationError("the scales of the quantized tensor are laid out for a GEMM")
    if hasattr(quantized, "_is_2D_scaled"):
        return _read_block_fp8(quantized, codes, scales, columnwise)
    if hasattr(quantized, "_amax_rowwise"):
        return _read_nvfp4(quantized, codes, scales, columnwise)
    return _read_mxfp8(quantized, codes, scales, columnwise)


def _read_per_tensor(quantized: Any) -> PerTensor:
    if not hasattr(quantized, "_fp8_dtype"):  # as of a quantizer of the user's own
        raise QuantizationError(f"the format of a {type(quantized).__name__} is not known")
    codes = quantized._data
    if codes is None:
        if quantized._transpose is None or quantized._transpose_invalid:
            raise QuantizationError("the quantized tensor holds neither its data nor their transpose")
        codes = quantized._transpose.movedim(0, -1)
    return PerTensor(codes, quantized._scale_inv, is_e5m2(quantized))


def _read_mxfp8(quantized: Any, codes: torch.Tensor, scales: torch.Tensor, columnwise: bool) -> Expanded:
    """MXFP8 in blocks of 32; columnwise data are not transposed. The scales are padded to whole tiles of 128 x 4."""
    number_format = E5M2 if is_e5m2(quantized) else E4M3
    rows, columns = _rows_and_columns(codes)
    height, width = (-(-rows // 32), columns) if columnwise else (rows, -(-columns // 32))
    factors = _e8m0(scales.reshape(-1, scales.shape[-1])[:height, :width])
    spread = factors.repeat_interleave(32, dim=0 if columnwise else 1)[:rows, :columns]
    values = number_format.decode(codes.reshape(rows, columns)) * spread
    return Expanded(values, factors, spread * number_format.max)


def _read_block_fp8(quantized: Any, codes: torch.Tensor, scales: torch.Tensor, columnwise: bool) -> Expanded:
    """FP8 in blocks of 128: the columnwise data are the transpose, and scales of 1 x 128 blocks lie transposed."""
    number_format = E5M2 if is_e5m2(quantized) else E4M3
    if columnwise:  # [last dimension, *leading dimensions]
        codes = codes.flatten(1)
    rows, columns = _rows_and_columns(codes)
    across = -(-columns // 128)
    if quantized._is_2D_scaled:
        factors = scales[: -(-rows // 128), :across]
        spread = factors.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
    else:
        factors = scales[:across, :rows].t()
        spread = factors.repeat_interleave(128, 1)[:, :columns]
    values = number_format.decode(codes.reshape(rows, columns)) * spread
    return _as_stored(Expanded(values, factors, spread * number_format.max), columnwise)


def _read_nvfp4(quantized: Any, codes: torch.Tensor, scales: torch.Tensor, columnwise: bool) -> Expanded:
    """FP4 in blocks of 16, two codes a byte, the even one in the low half; the columnwise data are the transpose."""
    if columnwise and getattr(quantized._quantizer, "with_rht", False):
        raise QuantizationError("the columnwise data are of a random Hadamard transform of the tensor")
    rows, half = _rows_and_columns(codes)
    columns = 2 * half
    packed = codes.reshape(rows, half)
    values = E2M1.decode(torch.stack([packed & 0xF, packed >> 4], dim=-1).reshape(rows, columns))
    amax = quantized._amax_columnwise if columnwise else quantized._amax_rowwise
    largest = E2M1.max * getattr(quantized, "_nvfp4_e4m3_max", E4M3.max)
    block_scales = E4M3.decode(scales.reshape(-1, scales.shape[-1])[:rows, : -(-columns // 16)].contiguous())
    factors = block_scales * (amax.reshape(-1, 1).to(torch.float32) * (1.0 / largest))
    spread = factors.repeat_interleave(16, 1)[:, :columns]
    return _as_stored(Expanded(values * spread, factors, _limit(spread, E2M1)), columnwise)


def _limit(factors: torch.Tensor, number_format: FloatFormat) -> torch.Tensor:
    """The largest magnitude that codes and factors stand for; none where the factor is 0, so that all underflows."""
    return torch.where(factors == 0, math.inf, factors * number_format.max)


def _as_stored(found: Expanded, transposed: bool) -> Expanded:
    return Expanded(found.values.t(), found.scales, found.limit.t()) if transposed else found


def _rows_and_columns(codes: torch.Tensor) -> tuple[int, int]:
    columns = codes.shape[-1] if codes.ndim else 1
    return (codes.numel() // columns if columns else 0), columns


def _e8m0(codes: torch.Tensor) -> torch.Tensor:
    return E8M0.decode(codes.contiguous().view(torch.uint8))


def scale_columns(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SCALE_SUMS and SCALE_MAXIMA of factors from code to value.

    A factor of 0, which fills the padding of a tensor of scales and is no scale, is left out, and so is nan.
    """
    wide = scales.reshape(-1).to(torch.float64)
    real = (wide > 0) & (wide < math.inf)
    kept = torch.where(real, wide, 0.0)
    sums = torch.stack([real.sum(dtype=torch.float64), kept.sum(), (kept * kept).sum()])
    nothing = torch.full((2,), NOTHING, dtype=torch.float64, device=wide.device)
    if not wide.numel():
        return sums, nothing
    maxima = torch.stack([torch.where(real, wide, NOTHING).amax(), torch.where(real, -wide, NOTHING).amax()])
    return sums, maxima


@dataclass(frozen=True)
class _Simulated:
    """A recipe that is simulated.

    Attributes:
        block: rows and columns of a block; None for the whole tensor.
        weight_block: that of a weight.
        quantize: (x [blocks, elements], amax of the blocks [blocks, 1], amax of the tensor, format) -> the quantized
            values and the factors [blocks, 1], all float32.
    """

    block: tuple[int, int] | None
    weight_block: tuple[int, int] | None
    quantize: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, FloatFormat], tuple[torch.Tensor, torch.Tensor]]


def _cast(values: torch.Tensor, number_format: FloatFormat) -> torch.Tensor:
    """Saturating cast to a format and back."""
    if number_format.dtype is None:
        return number_format.round(values)
    return values.clamp(-number_format.max, number_format.max).to(number_format.dtype).to(torch.float32)


def _scale(amax: torch.Tensor, largest: float) -> torch.Tensor:
    """largest / amax as upstream takes it: 1 for an amax of 0, and never inf.

    A division of two tensors: number / tensor is a reciprocal and a product to torch, off by a unit in the last place.
    """
    scale = torch.full_like(amax, largest) / amax
    return torch.where(amax > 0, scale.clamp(max=_FLOAT32_MAX), 1.0)


def _current(
    x: torch.Tensor, amax: torch.Tensor, tensor_amax: torch.Tensor, number_format: FloatFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scale(tensor_amax, number_format.max)
    scale_inv = torch.ones_like(scale) / scale
    return _cast(x * scale, number_format) * scale_inv, scale_inv.reshape(1, 1)


def _block_fp8(
    x: torch.Tensor, amax: torch.Tensor, tensor_amax: torch.Tensor, number_format: FloatFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _scale(amax, number_format.max)
    scale = (scale.view(torch.int32) & 0x7F800000).view(torch.float32)  # down to a power of two
    scale_inv = 1.0 / scale
    return _cast(x * scale, number_format) * scale_inv, scale_inv


def _mxfp8(
    x: torch.Tensor, amax: torch.Tensor, tensor_amax: torch.Tensor, number_format: FloatFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    # Up to a power of two, but not beyond E8M0's largest one, and 2^-127 for all below it.
    bits = (amax * (1.0 / number_format.max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    up = (mantissa > 0) & (exponent < 254) & ~((exponent == 0) & (mantissa <= 0x400000))
    code = exponent + up.to(torch.int32)
    scale_inv = torch.where(code == 0, 0x400000, code << 23).view(torch.float32)
    return _cast(x * (1.0 / scale_inv), number_format) * scale_inv, scale_inv


def _nvfp4(
    x: torch.Tensor, amax: torch.Tensor, tensor_amax: torch.Tensor, number_format: FloatFormat
) -> tuple[torch.Tensor, torch.Tensor]:
    encode = _scale(tensor_amax, E4M3.max * E2M1.max)
    block_scale = _cast(amax * (encode * (1.0 / E2M1.max)), E4M3)
    multiplier = (1.0 / (block_scale * (1.0 / encode))).clamp(max=_FLOAT32_MAX)
    factors = block_scale * (tensor_amax * (1.0 / (E4M3.max * E2M1.max)))
    return E2M1.round(x * multiplier) * factors, factors


SIMULATED: dict[str, _Simulated] = {
    "fp8_current_scaling": _Simulated(None, None, _current),
    "mxfp8": _Simulated((1, 32), (1, 32), _mxfp8),
    "fp8_block_scaling": _Simulated((1, 128), (128, 128), _block_fp8),
    "nvfp4": _Simulated((1, 16), (16, 16), _nvfp4),
}


def simulate(
    recipe: str, values: torch.Tensor, amax: torch.Tensor, *, e5m2: bool, weight: bool, columnwise: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """What a recipe would make of a tensor.

    Args:
        recipe: one of the recipes but delayed scaling.
        values: any shape, float32, float16 or bfloat16; its finite elements are looked at.
        amax: float64 or float32, one element: the largest finite magnitude, 0 or below where there is none.
        e5m2: whether an FP8 recipe casts to E5M2, not E4M3.
        weight: whether it is a weight, whose blocks are square under FP8 block scaling and NVFP4.
        columnwise: whether blocks run down a column.

    Returns:
        COMPARISON_SUMS, SCALE_SUMS, SCALE_MAXIMA: float64.

    Raises:
        QuantizationError: delayed scaling, whose scale comes from the amaxes of earlier steps.
    """
    if recipe not in SIMULATED:
        raise QuantizationError(
            f"{recipe} cannot be had of a layer that does not run it: its scale comes from the amaxes of earlier steps"
        )
    simulated = SIMULATED[recipe]
    block = simulated.weight_block if weight else simulated.block
    number_format = E2M1 if recipe == "nvfp4" else E5M2 if e5m2 else E4M3
    tensor_amax = amax.reshape(()).to(torch.float32).clamp(min=0.0)
    simulation = _simulation(recipe, number_format)
    found = [
        compiled.run(simulation, piece, tensor_amax) for piece in compiled.pieces(_in_blocks(values, block, columnwise))
    ]
    compared = torch.stack([compared for compared, _ in found]).sum(0)
    scales = found[0][1] if block is None else torch.cat([scales for _, scales in found])
    return compared, *scale_columns(scales)


@functools.cache
def _simulation(recipe: str, number_format: FloatFormat) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    simulated = SIMULATED[recipe]

    def simulation(blocks: torch.Tensor, tensor_amax: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = blocks.to(torch.float32)
        magnitude = x.abs()
        x = torch.where(magnitude < math.inf, x, 0.0)
        amax = torch.where(magnitude < math.inf, magnitude, 0.0).amax(1, keepdim=True)
        quantized, factors = simulated.quantize(x, amax, tensor_amax, number_format)
        return eager.comparison(blocks, quantized, _limit(factors, number_format)).sum(1), factors

    return simulation


def _in_blocks(values: torch.Tensor, block: tuple[int, int] | None, columnwise: bool) -> torch.Tensor:
    """[blocks, elements]; a partial block at an edge is filled with nan, which nothing counts."""
    if block is None:
        row = math.gcd(values.numel(), 4096)
        row = row if row >= 256 else 4096
        return padded(eager.flattened(values).unsqueeze(0), 1, row, math.nan).view(-1, row)
    matrix = as_matrix(values)
    if columnwise:
        matrix = matrix.t()
    height, width = block
    matrix = padded(matrix, height, width, math.nan)
    if height == 1:
        return matrix.reshape(-1, width)
    rows, columns = matrix.shape
    tiles = matrix.reshape(rows // height, height, columns // width, width).transpose(1, 2)
    return tiles.reshape(-1, height * width)


def round_to_mxfp8(values: torch.Tensor, *, e5m2: bool, columnwise: bool) -> torch.Tensor:
    """A tensor rounded to MXFP8 and back.

    Args:
        values: any shape, float32, float16 or bfloat16; blocks at an edge may be partial.
        e5m2: whether the elements are E5M2, not E4M3.
        columnwise: whether blocks of 32 run down the columns, not along the rows of the last dimension.

    Returns:
        float32, the same shape. The scale of a block follows from its finite elements; inf becomes its largest value.
    """
    matrix = as_matrix(values).to(torch.float32)
    matrix = matrix.t() if columnwise else matrix
    whole = padded(matrix, 1, 32, 0.0)
    blocks = whole.reshape(-1, 32)
    magnitude = blocks.abs()
    amax = torch.where(magnitude < math.inf, magnitude, 0.0).amax(1, keepdim=True)
    rounded, _ = _mxfp8(blocks, amax, amax, E5M2 if e5m2 else E4M3)
    result = rounded.view(whole.shape)[:, : matrix.shape[1]]
    return (result.t() if columnwise else result).reshape(values.shape)


def as_matrix(values: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of its last dimension."""
    return values.reshape(-1, values.shape[-1] or 1) if values.ndim > 1 else values.reshape(1, -1)


def padded(matrix: torch.Tensor, height: int, width: int, value: float) -> torch.Tensor:
    """A matrix whose sides are multiples of ``height`` and ``width``, filled up with ``value``."""
    below, right = -matrix.shape[0] % height, -matrix.shape[1] % width
    return torch.nn.functional.pad(matrix, (0, right, 0, below), value=value) if below or right else matrix
