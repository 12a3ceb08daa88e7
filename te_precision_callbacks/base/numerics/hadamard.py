"""The random Hadamard transform, which spreads an outlier over 16 elements before they are quantized to NVFP4.

Both operands of a GEMM are transformed along the summed dimension, so the transform cancels in the product and is never
undone. Sources: ``common/hadamard_transform/*.cu`` and ``pytorch/tensor/nvfp4_tensor.py`` (TE 2.20).
"""

from __future__ import annotations

import functools

import torch

from te_precision_callbacks.base.numerics.conversions import transformed

SIZE = 16


def random_hadamard_transform(matrix: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """Multiply each group of 16 along the last dimension by ``diag(signs) @ H / 4``: bfloat16, same shape.

    H is the Hadamard matrix of size 16 in Sylvester's order; bit r of the mask is the sign of its row r. The kernels
    sum in float32 on the tensor cores, and round to bfloat16. This function sums in float64, so that the order of terms
    does not matter, and rounds to float32 and bfloat16. With ``NVTE_USE_FAST_MATH=1`` upstream's fused kernel skips the
    rounding to bfloat16; this function always rounds.
    """
    return transformed(matrix, _matrix(sign_mask, matrix.device)) if matrix.numel() else matrix.contiguous()


def rotated(vectors: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """Rotate vectors, [a multiple of 16, vectors], so that their product with a transformed matrix is the original
    product.

    With M the matrix of :func:`random_hadamard_transform`, ``transformed @ rotated(v) = matrix @ M @ M^T @ v``, and M
    is orthogonal. So a thin product needs no transform of the matrix.
    """
    groups = vectors.reshape(-1, SIZE, vectors.shape[-1])
    return torch.matmul(_matrix(sign_mask, vectors.device).to(vectors.dtype).t(), groups).view(vectors.shape)


@functools.cache
def _matrix(sign_mask: int, device: torch.device) -> torch.Tensor:
    rows = [
        [(-1.0) ** (row & column).bit_count() * (-1.0) ** (sign_mask >> row & 1) / 4.0 for column in range(SIZE)]
        for row in range(SIZE)
    ]
    return torch.tensor(rows, dtype=torch.float64, device=device)
