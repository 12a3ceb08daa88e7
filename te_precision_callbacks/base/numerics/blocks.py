"""Splits matrices into blocks, with padding, and joins them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

Block = tuple[int, int]
"""The numbers of rows and columns of a block."""


def as_matrix(values: torch.Tensor) -> torch.Tensor:
    if values.ndim > 1:
        return values.reshape(-1, values.shape[-1] or 1)
    return values.reshape(1, -1)


def block_counts(shape: Sequence[int], block: Block) -> tuple[int, int]:
    """Return the numbers of rows and columns of blocks, including partial blocks."""
    rows, columns = shape
    height, width = block
    return -(-rows // height), -(-columns // width)


def pad_to_blocks(matrix: torch.Tensor, block: Block, filler: float) -> torch.Tensor:
    below, right = (-side % block_side for side, block_side in zip(matrix.shape, block, strict=True))
    if below or right:
        return torch.nn.functional.pad(matrix, (0, right, 0, below), value=filler)
    return matrix


def as_tiles(matrix: torch.Tensor, block: Block, filler: float = 0.0) -> torch.Tensor:
    """View a matrix as [rows of blocks, rows of a block, columns of blocks, columns of a block]."""
    whole = pad_to_blocks(matrix, block, filler)
    rows, columns = whole.shape
    height, width = block
    return whole.reshape(rows // height, height, columns // width, width)


def split_into_blocks(matrix: torch.Tensor, block: Block, filler: float = math.nan) -> torch.Tensor:
    """Split a matrix into [blocks, elements], in row-major order; ``filler`` pads partial blocks."""
    height, width = block
    return as_tiles(matrix, block, filler).transpose(1, 2).reshape(-1, height * width)


def join_blocks(blocks: torch.Tensor, block: Block, shape: tuple[int, int]) -> torch.Tensor:
    """Join blocks into a matrix of a given shape, the inverse of :func:`split_into_blocks`."""
    tiles = blocks.view(*block_counts(shape, block), *block).transpose(1, 2)
    return _join_tiles(tiles, shape)


def multiply_by_blocks(matrix: torch.Tensor, block_values: torch.Tensor, block: Block) -> torch.Tensor:
    """Multiply each element by the value of its block, [rows of blocks, columns of blocks]."""
    return _join_tiles(as_tiles(matrix, block) * block_values[:, None, :, None], matrix.shape)


def _join_tiles(tiles: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    rows, columns = shape
    return tiles.flatten(2).flatten(0, 1)[:rows, :columns]
