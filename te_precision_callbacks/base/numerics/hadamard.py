"""The random Hadamard transform, which spreads an outlier over 16 elements before they are quantized to NVFP4.

Usage::

    transformed = random_hadamard_transform(tensor.t(), quantizer.rht_matrix_random_sign_mask_t)

Both operands of a GEMM are transformed along the dimension that is summed, so the transform cancels in the product and
is never undone. Sources: ``common/hadamard_transform/*.cu`` and ``pytorch/tensor/nvfp4_tensor.py`` (TE 2.20).
"""

from __future__ import annotations

import functools

import torch

from te_precision_callbacks.base.numerics.conversions import transformed

SIZE = 16
"""Elements that are transformed together."""


def random_hadamard_transform(matrix: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """Each group of 16 along the last dimension, as a row, times ``diag(signs) @ H / 4``.

    H is the Hadamard matrix of size 16 in Sylvester's order; bit r of the mask gives the sign of its row r. The kernels
    sum on the tensor cores, in float32, and round the sum to bfloat16. Here the sum is taken in float64 first: the
    order of the terms then does not matter, and the result is the exact sum, rounded to float32 and to bfloat16. With
    ``NVTE_USE_FAST_MATH=1`` upstream's fused kernel skips the rounding to bfloat16; this function always rounds.

    Args:
        matrix: bfloat16, [rows, a multiple of 16].
        sign_mask: 1 in bit r for a row of H with changed sign; 0 for no random signs.

    Returns:
        bfloat16, contiguous, same shape.
    """
    return transformed(matrix, _matrix(sign_mask, matrix.device)) if matrix.numel() else matrix.contiguous()


def rotated(vectors: torch.Tensor, sign_mask: int) -> torch.Tensor:
    """The vectors that a transformed matrix takes in place of ``vectors``, for the same product.

    With M the matrix of :func:`random_hadamard_transform`, ``transformed @ rotated(v) = matrix @ M @ M^T @ v``, and M
    is orthogonal. So a thin product needs no transform of the matrix.

    Args:
        vectors: float32 or float64, [a multiple of 16, vectors].
        sign_mask: as of the transform.

    Returns:
        the same type and shape.
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
