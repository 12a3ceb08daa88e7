"""Names of the scaling modes of quantized tensors, without torch."""

from __future__ import annotations

PER_TENSOR, MXFP8, BLOCK_1D, BLOCK_2D, NVFP4 = "per_tensor", "mxfp8", "fp8_block_1d", "fp8_block_2d", "nvfp4"
