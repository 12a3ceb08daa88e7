"""The dynamic range inside the user's own blocks of a tensor.

    largest_range(tensor, Blocks(32, 1))                       # max_blockwise_dynamic_range

``max_blockwise_dynamic_range`` is as in Transformer Engine 2.20.2 (``debug/features/utils/stats_computation.py``),
except that a block at the edge may be partial, and non-finite elements are ignored.
"""

from __future__ import annotations

import torch

from te_precision_callbacks.base.numerics.blocks import as_matrix, padded
from te_precision_callbacks.engine.kernels import compiled
from te_precision_callbacks.engine.kernels.columns import NOTHING
from te_precision_callbacks.engine.kernels.eager_blocks import extremes, log2_of_ratio
from te_precision_callbacks.statistics.names import Blocks


def largest_range(values: torch.Tensor, blocks: Blocks) -> torch.Tensor:
    """Largest log2(max(abs(x)) / min(abs(x))) over the non-zero finite elements of any block.

    Args:
        values: any shape, any float dtype; the last dimension is a row.

    Returns:
        float64, [1]; :data:`NOTHING` where no block has a non-zero finite element.
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
    whole = padded(matrix, (height, width), 0.0)
    pieces = [compiled.run(extremes, piece) for piece in compiled.pieces(whole.reshape(-1, width))]
    # Reduce rows first, without a transposed copy; then the rows of a tile.
    tiles = (whole.shape[0] // height, height, whole.shape[1] // width)
    largest = torch.cat([largest for largest, _ in pieces]).view(tiles).amax(1)
    smallest = torch.cat([smallest for _, smallest in pieces]).view(tiles).amin(1)
    return torch.where(largest > 0, log2_of_ratio(largest, smallest), NOTHING).amax()
