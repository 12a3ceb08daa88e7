"""Names of the scaling modes of quantized tensors, without torch."""

from __future__ import annotations

PER_TENSOR = "per_tensor"
MXFP8 = "mxfp8"
BLOCK_1D = "fp8_block_1d"
BLOCK_2D = "fp8_block_2d"
NVFP4 = "nvfp4"
