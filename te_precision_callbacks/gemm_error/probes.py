"""Random vectors, reproducible and apart from the random state of training.

    x = probes(columns, PROBES, seed_of(iteration, layer, gemm, "x"), device)    # [columns, PROBES]

How many of them it takes is in :mod:`te_precision_callbacks.gemm_error.chances`.
"""

from __future__ import annotations

import hashlib

import torch


def seed_of(*parts: object) -> int:
    """A seed that follows from the parts alone, the same in each process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def probes(rows: int, number: int, seed: int, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Standard Gaussian vectors, [rows, number], from a generator of their own.

    Args:
        rows, number: the shape.
        seed: as of :func:`seed_of`.
        device: where they are drawn; the same seed gives the same numbers on the same kind of device.
        dtype: None for :func:`thin_dtype`.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    drawn = torch.randn(rows, number, generator=generator, device=device, dtype=torch.float32)
    return drawn.to(thin_dtype() if dtype is None else dtype)


def thin_dtype() -> torch.dtype:
    """The type of thin products: float32, or float64 where torch may run products of float32 in TF32 or bfloat16."""
    return torch.float32 if torch.get_float32_matmul_precision() == "highest" else torch.float64
