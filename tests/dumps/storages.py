"""Quantized tensors with known bytes."""

from typing import Any

import torch
import transformer_engine_torch as tex
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage
from transformer_engine.pytorch.tensor.storage.mxfp8_tensor_storage import MXFP8TensorStorage
from transformer_engine.pytorch.tensor.storage.nvfp4_tensor_storage import NVFP4TensorStorage

E4M3 = tex.DType.kFloat8E4M3


def random_bytes(*shape: int, seed: int, below: int = 0x7E) -> torch.Tensor:
    """E4M3 codes of numbers above zero, or below it with ``below``."""
    return torch.randint(1, below, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def mxfp8(codes: torch.Tensor, scales: torch.Tensor) -> Any:
    """Rowwise only; the scales, one for each 1 x 32, get padded with bytes that would show."""
    padded = torch.full((-(-scales.shape[0] // 128) * 128, -(-scales.shape[1] // 4) * 4), 200, dtype=torch.uint8)
    padded[: scales.shape[0], : scales.shape[1]] = scales
    return MXFP8TensorStorage(
        codes, padded, None, None, E4M3, None, with_gemm_swizzled_scales=False, fake_dtype=torch.bfloat16
    )


def some_mxfp8(rows: int = 40, columns: int = 96, seed: int = 0) -> Any:
    return mxfp8(
        random_bytes(rows, columns, seed=seed), 120 + random_bytes(rows, columns // 32, seed=seed + 1, below=10)
    )


def float8(codes: torch.Tensor, scale_inv: float) -> Any:
    return Float8TensorStorage(
        data=codes, fp8_scale_inv=torch.tensor([scale_inv]), fp8_dtype=E4M3, fake_dtype=torch.bfloat16
    )


def some_nvfp4(rows: int = 16, columns: int = 32) -> Any:
    """Rowwise only."""
    scales = torch.zeros(128, 4, dtype=torch.uint8)
    scales[:rows, : columns // 16] = random_bytes(rows, columns // 16, seed=3)
    return NVFP4TensorStorage(
        rowwise_data=random_bytes(rows, columns // 2, seed=4, below=256),
        rowwise_scale_inv=scales,
        columnwise_data=None,
        columnwise_scale_inv=None,
        amax_rowwise=torch.tensor([3.0]),
        amax_columnwise=None,
        fp4_dtype=tex.DType.kFloat4E2M1,
        quantizer=None,
        with_gemm_swizzled_scales=False,
        fake_dtype=torch.bfloat16,
    )
