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
    below, right = (-side % of_block for side, of_block in zip(matrix.shape, block, strict=True))
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
    rows, columns = shape
    height, width = block
    tiles = blocks.view(*block_counts(shape, block), height, width).transpose(1, 2)
    return tiles.reshape(tiles.shape[0] * height, tiles.shape[2] * width)[:rows, :columns]


def repeat_per_block(block_values: torch.Tensor, block: Block, shape: tuple[int, ...]) -> torch.Tensor:
    """Repeat each block's value, [rows of blocks, columns of blocks], for its elements, up to ``shape``."""
    height, width = block
    rows, columns = shape
    if height > 1:
        block_values = block_values.repeat_interleave(height, 0)[:rows]
    if width > 1:
        return block_values.repeat_interleave(width, 1)[:, :columns]
    return block_values


def multiply_by_blocks(matrix: torch.Tensor, block_values: torch.Tensor, block: Block) -> torch.Tensor:
    """Multiply each element by the value of its block, [rows of blocks, columns of blocks]."""
    height, width = block
    rows, columns = matrix.shape
    if rows % height or columns % width:
        return matrix * repeat_per_block(block_values, block, matrix.shape)
    tiles = matrix.reshape(rows // height, height, columns // width, width)
    return (tiles * block_values[:, None, :, None]).view(matrix.shape)
