"""The recipes in numpy, from the definitions of the formats: the reference for the statistics."""

import math
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from tests.engine.exact import ROUNDING
from tests.reference.block_formats import E2M1, E4M3, E5M2, Format

INF, NAN = math.inf, math.nan
FLOAT32_MAX = np.finfo(np.float32).max
Matrix = npt.NDArray[np.float32]
Codes = npt.NDArray[np.uint8]


FP8 = {False: E4M3, True: E5M2}  # e5m2?
BLOCKS = {  # recipe -> block of a tensor, of a weight
    "fp8_current_scaling": (None, None),
    "mxfp8": ((1, 32), (1, 32)),
    "fp8_block_scaling": ((1, 128), (128, 128)),
    "nvfp4": ((1, 16), (16, 16)),
}


class Block(NamedTuple):
    """A block: where it lies, its codes, and how its scale is stored; a quantized value is its number times factor."""

    where: tuple[slice, slice]
    codes: Codes
    stored_scale: int | np.float32
    factor: np.float32


class Quantized(NamedTuple):
    number_format: Format
    blocks: list[Block]
    shape: tuple[int, int]
    tensor_amax: np.float32

    def over(self, of_block: Sequence[Any], dtype: Any = np.float32) -> npt.NDArray[Any]:
        matrix = np.empty(self.shape, dtype)
        for block, value in zip(self.blocks, of_block, strict=True):
            matrix[block.where] = value
        return matrix

    @property
    def values(self) -> Matrix:
        with np.errstate(over="ignore", invalid="ignore"):  # a factor may be infinite
            return self.over([self.number_format.decode(block.codes) * block.factor for block in self.blocks])

    @property
    def codes(self) -> Codes:
        return self.over([block.codes for block in self.blocks], np.uint8)

    @property
    def limits(self) -> Matrix:
        return self.over(limits(self))


@np.errstate(over="ignore", divide="ignore")
def quantize(
    recipe: str, x: npt.NDArray[Any], *, e5m2: bool = False, weight: bool = False, columnwise: bool = False
) -> Quantized:
    """As the recipe is defined; inf and nan become 0 and do not count, and float64 is rounded to float32 first."""
    x = np.where(np.isfinite(x), x.clip(-FLOAT32_MAX, FLOAT32_MAX), 0).astype(np.float32)
    number_format = E2M1 if recipe == "nvfp4" else FP8[e5m2]
    size = BLOCKS[recipe][weight] or x.shape
    height, width = size[::-1] if columnwise and BLOCKS[recipe][0] else size
    tensor_amax = np.abs(x).max(initial=np.float32(0))
    blocks = []
    for top in range(0, x.shape[0], height):
        for left in range(0, x.shape[1], width):
            where = slice(top, top + height), slice(left, left + width)
            multiplier, stored, factor = scale_of(recipe, np.abs(x[where]).max(), tensor_amax, number_format.max)
            blocks.append(Block(where, number_format.encode(x[where] * multiplier), stored, factor))
    return Quantized(number_format, blocks, (x.shape[0], x.shape[1]), tensor_amax)


def scale_of(
    recipe: str, amax: np.float32, tensor_amax: np.float32, largest: np.float32
) -> tuple[np.float32, Any, np.float32]:
    """The elements' factor, the stored scale, and the codes' factor."""
    first = np.float32(1)
    if recipe == "nvfp4":  # the scale of a block is E4M3, in units of a factor of the whole tensor
        encode = min(np.float32(448 * 6) / tensor_amax, FLOAT32_MAX) if tensor_amax else first
        stored = E4M3.encode(np.array([amax * (encode * (first / np.float32(6)))]))
        scale = E4M3.decode(stored)[0]
        multiplier = min(first / (scale * (first / encode)), FLOAT32_MAX)
        return multiplier, stored[0], scale * tensor_amax * np.float32(1 / (448 * 6))
    if recipe == "mxfp8":  # the smallest power of two without overflow of an element; 2^-127 is E8M0's smallest
        mantissa, exponent = math.frexp(float(amax) / float(largest))
        exponent = max(exponent - (mantissa == 0.5), -127) if amax else -127
        return np.float32(2.0**-exponent), exponent + 127, np.float32(2.0**exponent)
    scale = min(largest / amax, FLOAT32_MAX) if amax else first
    if recipe == "fp8_block_scaling":  # the largest power of two
        scale = np.float32(2.0 ** (math.frexp(scale)[1] - 1))
    return scale, first / scale, first / scale


LIMITS = {  # recipe -> the lowest and the highest scale, as scale_of() stores it
    "mxfp8": (0, 254),
    "fp8_block_scaling": (2.0**-127, 2.0**127),
    "nvfp4": (0, 0x7E),
}


class Pair(NamedTuple):
    x: npt.NDArray[Any]
    quantized: Quantized


def by_block(recipe: str, pairs: Sequence[Pair]) -> dict[str, Any]:
    columns = [columns_by_block(recipe, pair) for pair in pairs]

    def total(place: str, name: str) -> float:
        return math.fsum(of_pair[place][name] for of_pair in columns)

    def largest(place: str, name: str) -> float:
        return max(of_pair[place][name] for of_pair in columns)

    number, ranges = total("limits", "blocks"), total("ranges", "ranges")
    return {
        "block_dynamic_range_min": -largest("range_maxima", "negated_range_min") if ranges else 0.0,
        "block_dynamic_range_max": largest("range_maxima", "range_max") if ranges else 0.0,
        "block_dynamic_range_mean": total("ranges", "range_sum") / ranges if ranges else 0.0,
        "saturated_scales%": 100 * total("limits", "saturated") / number,
        "flushed_scales%": 100 * total("limits", "flushed") / number,
        "zero_blocks%": 100 * total("limits", "zero_blocks") / number,
        "underflow_blocks%": 100 * total("losses", "underflow_blocks") / number,
        "overflow_blocks%": 100 * total("losses", "overflow_blocks") / number,
        "block_underflows%_max": 100 * largest("loss_maxima", "underflow_share"),
    }


@np.errstate(invalid="ignore", over="ignore")
def columns_by_block(recipe: str, pair: Pair) -> dict[str, dict[Any, float]]:
    """The engine's columns of blocks, by a loop over them: places -> columns by their names."""
    low, high = LIMITS[recipe]
    x, quantized = pair
    results: dict[str, dict[Any, float]] = {
        "limits": dict.fromkeys(("blocks", "saturated", "flushed", "zero_blocks"), 0.0),
        "losses": dict.fromkeys(("blocks", "underflow_blocks", "overflow_blocks"), 0.0),
        "loss_maxima": {"underflow_share": 0.0},
    }
    factors, ranges = [], []
    for block, limit in zip(quantized.blocks, limits(quantized), strict=True):
        y = quantized.number_format.decode(block.codes) * block.factor
        kept = np.isfinite(x[block.where])
        magnitude = np.abs(x[block.where][kept].astype(np.float64))
        lost = (magnitude > 0) & (y[kept] == 0)
        results["limits"]["blocks"] += 1
        results["losses"]["blocks"] += 1
        results["losses"]["underflow_blocks"] += lost.any()
        results["losses"]["overflow_blocks"] += (magnitude > limit).any()
        share = results["loss_maxima"]["underflow_share"]
        results["loss_maxima"]["underflow_share"] = max(share, lost.sum() / max(len(lost), 1))
        nonzero = magnitude[magnitude > 0]
        if not len(nonzero):
            results["limits"]["zero_blocks"] += 1
            continue
        results["limits"]["flushed"] += block.stored_scale <= low
        results["limits"]["saturated"] += block.stored_scale <= low or not block.stored_scale < high
        ranges.append(math.log2(nonzero.max() / nonzero.min()))
        if 0 <= block.factor < INF:
            factors.append(float(block.factor))
    for kind, values in (("scale", factors), ("range", ranges)):
        extremes = {f"{kind}_max": max(values, default=-INF), f"negated_{kind}_min": -min(values, default=INF)}
        results[f"{kind}_maxima"] = extremes
    results["scales"] = {
        "scales": len(factors),
        "scale_sum": math.fsum(factors),
        "scale_square_sum": math.fsum(factor**2 for factor in factors),
    }
    results["ranges"] = {"ranges": len(ranges), "range_sum": math.fsum(ranges)}
    return results


def factors_of(recipe: str, pairs: Iterable[Pair]) -> npt.NDArray[np.float64]:
    """The factors of blocks that have an element other than 0; the one of a tensor without blocks in any case."""
    results = [
        block.factor
        for x, quantized in pairs
        for block in quantized.blocks
        if not BLOCKS[recipe][0] or (np.isfinite(x[block.where]) & (x[block.where] != 0)).any()
    ]
    factors = np.array(results, np.float64)
    return factors[np.isfinite(factors)]


def limits(quantized: Quantized) -> list[float]:
    """The largest magnitude that each block can have; none where the factor is 0, so that all of it underflows."""
    with np.errstate(over="ignore"):
        largest = np.float32(quantized.number_format.max * ROUNDING)
        return [block.factor * largest if block.factor else INF for block in quantized.blocks]
