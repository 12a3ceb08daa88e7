"""The dynamic range inside blocks of a tensor: ``max_blockwise_dynamic_range``.

As Transformer Engine 2.20.2 (``debug/features/utils/stats_computation.py: compute_max_blockwise_dynamic_range``), but
that a block at the edge may be a partial one, and that what is not finite is left out.
"""

from __future__ import annotations

import math

import torch

from te_precision_callbacks.engine.kernels import compiled
from te_precision_callbacks.engine.kernels.columns import NOTHING
from te_precision_callbacks.engine.quantization import as_matrix, padded
from te_precision_callbacks.engine.statistics import Blocks


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
    found = _largest_ratio(matrix, blocks)
    if blocks.both and blocks.dims != 2:  # square tiles of the transposed tensor are the same tiles
        found = torch.maximum(found, _largest_ratio(matrix.t(), blocks))
    return torch.log2(found).reshape(1)


def _largest_ratio(matrix: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """The largest max(abs(x)) / min(abs(x)) of a block: float64, 0 where no block has a non-zero finite element."""
    height = min(blocks.size, matrix.shape[0]) if blocks.dims == 2 else 1
    width = min(blocks.size, matrix.shape[1])
    # Zeros fill a partial block: they are left out as the zeros of the tensor are.
    whole = padded(matrix, height, width, 0.0)
    found = [compiled.run(_extremes, piece) for piece in compiled.pieces(whole.reshape(-1, width))]
    # Along a row first, so that no transposed copy is made; then over the rows of a tile.
    tiles = (whole.shape[0] // height, height, whole.shape[1] // width)
    largest = torch.cat([largest for largest, _ in found]).view(tiles).amax(1)
    smallest = torch.cat([smallest for _, smallest in found]).view(tiles).amin(1)
    return (largest.to(torch.float64) / smallest).amax()


def _extremes(pieces: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Of each row the largest magnitude, or 0, and the smallest one above 0, or inf."""
    magnitude = pieces.to(torch.float32).abs()
    counted = (magnitude > 0) & (magnitude < math.inf)
    return torch.where(counted, magnitude, 0.0).amax(1), torch.where(counted, magnitude, math.inf).amin(1)
