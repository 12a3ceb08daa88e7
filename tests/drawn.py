"""Random tensors that are the same in every run."""

import torch


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    """Standard normal elements in float32."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
