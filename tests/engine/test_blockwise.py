"""The dynamic range inside blocks, against a loop over them, and against Transformer Engine's where that works."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from te_precision_callbacks.engine.kernels.eager_blocks import largest_range
from te_precision_callbacks.statistics.names import Blocks
from tests.engine import exact

INF, NAN = math.inf, math.nan


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) * torch.exp(3 * torch.randn(shape, generator=generator))


def chosen(*shape: int, share: float, seed: int = 5) -> torch.Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < share


def by_loop(values: torch.Tensor, blocks: Blocks) -> float:
    matrix = exact.as_array(values).reshape(-1, values.shape[-1] if values.ndim else 1)
    result = -INF
    for oriented in [matrix, matrix.T] if blocks.both else [matrix]:
        height = blocks.size if blocks.dims == 2 else 1
        for top in range(0, oriented.shape[0], height):
            for left in range(0, oriented.shape[1], blocks.size):
                block = np.abs(oriented[top : top + height, left : left + blocks.size])
                block = block[np.isfinite(block) & (block > 0)]
                if len(block):
                    result = max(result, math.log2(block.max()) - math.log2(block.min()))
    return result


TENSORS = {
    "whole blocks": normal(16, 32),
    "partial blocks": normal(13, 37),
    "smaller than a block": normal(3, 5),
    "bfloat16": normal(13, 37).bfloat16(),
    "float16": normal(13, 37).half(),
    "float8": normal(13, 37).to(torch.float8_e5m2),
    "3-D": normal(3, 5, 19),
    "1-D": normal(77),
    "0-d": torch.tensor(-3.0),
    "transposed": normal(13, 37).t(),
    "expanded": normal(1, 37).expand(13, 37),
    "not finite": normal(13, 37).where(chosen(13, 37, share=0.9), NAN).where(chosen(13, 37, share=0.9, seed=6), -INF),
    "with zeros": normal(13, 37).where(chosen(13, 37, share=0.3), 0.0),
    "zero blocks": normal(13, 37).where(torch.arange(37) > 16, 0.0),
    "all of float32": torch.tensor([[1.4e-45, 1.0, -3.4e38, 0.0]]),
}


@pytest.mark.parametrize("both", [False, True], ids=["as it is", "both orientations"])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("size", [1, 8, 16, 10**6])
@pytest.mark.parametrize("name", TENSORS)
def test_blocks(name: str, size: int, dims: int, both: bool) -> None:
    blocks = Blocks(size, dims, both)
    result = largest_range(TENSORS[name], blocks)
    assert (result.dtype, result.shape) == (torch.float64, (1,))
    assert result.item() == pytest.approx(by_loop(TENSORS[name], blocks), rel=1e-12, abs=1e-12)


@pytest.mark.parametrize("values", [torch.zeros(8, 8), torch.full((8, 8), NAN), torch.empty(0), torch.empty(3, 0)])
@pytest.mark.parametrize("dims", [1, 2])
def test_nothing_to_take_a_range_of(values: torch.Tensor, dims: int) -> None:
    result = largest_range(values, Blocks(4, dims, both=True))
    assert (result.dtype, result.tolist()) == (torch.float64, [-INF])


@pytest.mark.parametrize("both", [False, True], ids=["as it is", "both orientations"])
@pytest.mark.parametrize("dims", [1, 2])
@pytest.mark.parametrize("size", [4, 32])
def test_transformer_engines(size: int, dims: int, both: bool) -> None:
    """Of whole blocks of finite numbers theirs is the same, in float32."""
    from transformer_engine.debug.features.utils import stats_computation

    theirs: Any = stats_computation.compute_max_blockwise_dynamic_range
    for values in (normal(64, 96), normal(2, 32, 64).where(chosen(2, 32, 64, share=0.5), 0.0), torch.zeros(32, 32)):
        expected = float(theirs(values, stats_computation.BlockwiseDynamicRangeStat(size, dims, both)))
        result = max(largest_range(values, Blocks(size, dims, both)).item(), 0.0)
        assert result == pytest.approx(expected, rel=1e-6)
