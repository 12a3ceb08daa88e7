"""The pass in plain torch, in pieces small enough for the CPU cache.

Runs on any device, without a compiler. Squares and sums are float64: the square of a float32 is exact and cannot
overflow, and a sum of raw squares resolves a standard deviation of 1e-5 of the mean.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence

import torch

from te_precision_callbacks.base.devices import is_lost
from te_precision_callbacks.base.numerics.formats import E4M3, E5M2
from te_precision_callbacks.engine.kernels.columns import (
    EXPONENT_BINS,
    NOTHING,
    ROUNDING,
    ColumnPlaces,
    Pending,
)

logger = logging.getLogger(__name__)

PIECE = 65_536
"""Elements of a piece on a CPU: a float64 temporary is 512 KiB. Larger pieces were several times slower: their
temporaries do not fit the cache, and are allocated again each time.
"""

PIECE_ELSEWHERE = 2**22
"""Elements of a piece on another device, where each piece takes some 30 kernel launches."""


def replace_triton(what: str, error: Exception) -> None:
    """Log that plain torch replaces a Triton kernel that failed; raise an error that the kernel has not caused."""
    if isinstance(error, torch.OutOfMemoryError) or is_lost(error):
        raise error
    logger.warning(
        "%s on the GPU: plain torch operations are used, which are slower but give the same results, because the Triton"
        " kernel failed (%s: %s).",
        what,
        type(error).__name__,
        error,
    )


def piece_size(values: torch.Tensor) -> int:
    if values.device.type == "cpu":
        return PIECE
    return PIECE_ELSEWHERE


def split_rows(matrix: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Split a matrix into pieces of whole rows."""
    return torch.split(matrix, max(1, piece_size(matrix) // matrix.shape[1]))


def flatten(values: torch.Tensor) -> torch.Tensor:
    """Flatten in any order, so that a dense tensor such as a transpose is not copied."""
    if not values.is_contiguous() and torch.ops.aten.is_non_overlapping_and_dense(values):
        return values.as_strided((values.numel(),), (1,))
    return values.reshape(-1)


def widen(values: torch.Tensor) -> torch.Tensor:
    """Convert to float32; float64 stays."""
    if values.dtype == torch.float64:
        return values
    return values.to(torch.float32)


def moments(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """MOMENT_SUMS and MAXIMA of rows.

    Args:
        values: [rows, columns], any float dtype; at most 2^24 columns.

    Returns:
        float64, [6, rows] and [3, rows].
    """
    x = widen(values)
    zeroed = _finite_or(0.0, x)
    magnitude = zeroed.abs()
    wide = zeroed.to(torch.float64)
    number = _count(x.abs() < math.inf)
    sums = torch.stack(
        [
            number,
            values.shape[1] - number,
            number - _count(magnitude > 0),
            wide.sum(1),
            (wide * wide).sum(1),
            wide.abs().sum(1),
        ]
    )
    maxima = torch.stack(
        [
            _finite_or(NOTHING, x).amax(1),
            _finite_or(NOTHING, -x).amax(1),
            torch.where(magnitude > 0, -magnitude, NOTHING).amax(1),
        ]
    )
    return sums, maxima.to(torch.float64)


def _finite_or(otherwise: float, x: torch.Tensor) -> torch.Tensor:
    return torch.nan_to_num(x, nan=otherwise, posinf=otherwise, neginf=otherwise)  # faster than a mask


def _count(mask: torch.Tensor) -> torch.Tensor:
    """Count true elements per row: float64, [rows]; exact to 2^24."""
    return mask.view(torch.int8).sum(1, dtype=torch.int32).to(torch.float64)


def comparison(values: torch.Tensor, quantized: torch.Tensor, limit: torch.Tensor) -> torch.Tensor:
    """COMPARISON_SUMS of rows.

    Args:
        values: [rows, columns], any float dtype; at most 2^24 columns.
        quantized: float32, the same shape: the quantized values.
        limit: float32, broadcastable: the largest magnitude of the quantized form.

    Returns:
        float64, [6, rows].
    """
    x = widen(values)
    magnitude = x.abs()
    finite = magnitude < math.inf
    signal = torch.where(finite, x, 0.0).to(torch.float64)
    error = torch.where(finite, x.to(torch.float64) - quantized.to(torch.float64), 0.0)
    underflow = finite & (magnitude > 0) & (quantized == 0)
    return torch.stack(
        [
            _count(finite),
            _count(underflow),
            _count(finite & (magnitude > limit)),
            (error * error).sum(1),
            (signal * signal).sum(1),
            torch.where(underflow, signal * signal, 0.0).sum(1),
        ]
    )


def scale_columns(scales: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """SCALE_SUMS and SCALE_MAXIMA of factors from code to value, without inf and nan."""
    wide = scales.reshape(-1).to(torch.float64)
    real = (wide >= 0) & (wide < math.inf)
    factors = torch.where(real, wide, 0.0)
    sums = torch.stack([real.sum(dtype=torch.float64), factors.sum(), (factors * factors).sum()])
    nothing = torch.full((2,), NOTHING, dtype=torch.float64, device=wide.device)
    if not wide.numel():
        return sums, nothing
    maxima = torch.stack([torch.where(real, wide, NOTHING).amax(), torch.where(real, -wide, NOTHING).amax()])
    return sums, maxima


def exponents(values: torch.Tensor) -> torch.Tensor:
    """EXPONENT_BINS counts of a tensor of any shape and float dtype: float64, [256]."""
    x = widen(values.reshape(-1))
    if x.dtype == torch.float64:
        bits = x.view(torch.int64) & 0x7FFFFFFFFFFFFFFF
        exponent = ((bits >> 52) - 1023 + 127).clamp(0, EXPONENT_BINS - 1).to(torch.int32)
        counted = (bits > 0) & (bits < 0x7FF0000000000000)
    else:
        bits = x.view(torch.int32) & 0x7FFFFFFF
        exponent = bits >> 23
        counted = (bits > 0) & (bits < 0x7F800000)
    # Excluded elements go to an extra bin, which is cut off.
    return _counts(torch.where(counted, exponent, EXPONENT_BINS), EXPONENT_BINS)


def _counts(bins: torch.Tensor, number: int) -> torch.Tensor:
    """Count the integers 0 to ``number`` - 1, as float64; ``number`` itself is dropped."""
    counts = torch.zeros(number + 1, dtype=torch.float64, device=bins.device)
    if bins.device.type == "cpu":
        counts += torch.bincount(bins, minlength=number + 1)
    else:  # bincount would wait for the device to find the largest bin
        counts.index_add_(0, bins, torch.ones_like(bins, dtype=torch.float64))
    return counts[:number]


def add(pending: Sequence[Pending], sums: torch.Tensor, maxima: torch.Tensor) -> None:
    for tensor in pending:
        add_columns(_columns(tensor), tensor.places, sums, maxima)


def add_columns(
    columns: Mapping[str, torch.Tensor], offsets: ColumnPlaces, sums: torch.Tensor, maxima: torch.Tensor
) -> None:
    """Merge columns, by the names of their places, into vectors."""
    for name, part in columns.items():
        offset = getattr(offsets, name)
        if offset >= 0:
            _merge(name, (maxima if name.endswith("maxima") else sums).narrow(0, offset, len(part)), part)


def accumulate(merged: dict[str, torch.Tensor], parts: Mapping[str, torch.Tensor]) -> None:
    for name, part in parts.items():
        merged[name] = _merge(name, merged[name], part) if name in merged else part


def _merge(name: str, merged: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    if name.endswith("maxima"):
        return torch.maximum(merged, part, out=merged)
    return merged.add_(part)


def _columns(pending: Pending) -> dict[str, torch.Tensor]:
    codes = pending.codes
    flat = flatten(pending.values) if codes is None else pending.values.reshape(-1)
    number_format = E5M2 if pending.e5m2 else E4M3
    flat_codes = None if codes is None else codes.reshape(-1)
    scale = None if pending.scale_inv is None else pending.scale_inv.reshape(())
    merged: dict[str, torch.Tensor] = {}
    step = piece_size(flat)
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step]
        row = piece.unsqueeze(0)
        piece_sums, piece_maxima = moments(row)
        piece_columns = {"moments": piece_sums[:, 0], "maxima": piece_maxima[:, 0]}
        if flat_codes is not None and scale is not None:
            quantized = number_format.decode(flat_codes[start : start + step]) * scale
            limit = number_format.max * ROUNDING * scale
            piece_columns["compared"] = comparison(row, quantized, limit)[:, 0]
        if pending.places.exponents >= 0:
            piece_columns["exponents"] = exponents(piece)
        accumulate(merged, piece_columns)
    if scale is not None:
        merged["scales"], merged["scale_maxima"] = scale_columns(scale)
    return merged
