"""Splits a matrix into blocks, padding the last ones, and joins the blocks again.

Usage::

    blocks = in_blocks(as_matrix(tensor), (1, 32))  # [blocks, elements]
    from_blocks(blocks, (1, 32), (rows, columns))  # the matrix again
    spread(factors, (128, 128), matrix.shape)  # [rows / 128, columns / 128], rounded up: one for each element
    times_blocks(matrix, factors, (128, 128))  # each element times its block's

A block is given by its rows and columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch


def as_matrix(values: torch.Tensor) -> torch.Tensor:
    """A tensor as rows of its last dimension."""
    return values.reshape(-1, values.shape[-1] or 1) if values.ndim > 1 else values.reshape(1, -1)


def number(shape: Sequence[int], block: tuple[int, int]) -> tuple[int, int]:
    """Rows and columns of the blocks of a matrix, the last ones of which may be partial."""
    (rows, columns), (height, width) = shape, block
    return -(-rows // height), -(-columns // width)


def padded(matrix: torch.Tensor, block: tuple[int, int], filler: float) -> torch.Tensor:
    """A matrix padded so that its sides are multiples of the block's; the matrix itself if they already are."""
    below, right = (-side % of_block for side, of_block in zip(matrix.shape, block, strict=True))
    return torch.nn.functional.pad(matrix, (0, right, 0, below), value=filler) if below or right else matrix


def tiled(matrix: torch.Tensor, block: tuple[int, int], filler: float = 0.0) -> torch.Tensor:
    """A matrix as [rows of blocks, rows of a block, columns of blocks, columns of a block]."""
    whole = padded(matrix, block, filler)
    (rows, columns), (height, width) = whole.shape, block
    return whole.reshape(rows // height, height, columns // width, width)


def in_blocks(matrix: torch.Tensor, block: tuple[int, int], filler: float = math.nan) -> torch.Tensor:
    """A matrix block by block, along a row of blocks first: [blocks, elements of a block].

    Args:
        matrix: [rows, columns].
        block: rows and columns of a block.
        filler: fills a partial block at an edge; by default nan, which no statistic counts.
    """
    height, width = block
    return tiled(matrix, block, filler).transpose(1, 2).reshape(-1, height * width)


def from_blocks(blocks: torch.Tensor, block: tuple[int, int], shape: tuple[int, int]) -> torch.Tensor:
    """The matrix that :func:`in_blocks` split, without the filler.

    Args:
        blocks: [blocks, elements of a block].
        block: rows and columns of a block.
        shape: the shape of the matrix.
    """
    (rows, columns), (height, width) = shape, block
    tiles = blocks.view(*number(shape, block), height, width).transpose(1, 2)
    return tiles.reshape(tiles.shape[0] * height, tiles.shape[2] * width)[:rows, :columns]


def spread(of_blocks: torch.Tensor, block: tuple[int, int], shape: tuple[int, ...]) -> torch.Tensor:
    """A number per block, [rows of blocks, columns of blocks], repeated for each element: ``shape``."""
    (height, width), (rows, columns) = block, shape
    if height > 1:
        of_blocks = of_blocks.repeat_interleave(height, 0)[:rows]
    return of_blocks.repeat_interleave(width, 1)[:, :columns] if width > 1 else of_blocks


def times_blocks(matrix: torch.Tensor, of_blocks: torch.Tensor, block: tuple[int, int]) -> torch.Tensor:
    """A matrix times the number of each element's block: a new tensor of the matrix's shape.

    Args:
        matrix: [rows, columns].
        of_blocks: [rows of blocks, columns of blocks], the last ones of which may be partial.
        block: rows and columns of a block.
    """
    (height, width), (rows, columns) = block, matrix.shape
    if rows % height or columns % width:
        return matrix * spread(of_blocks, block, matrix.shape)
    tiles = matrix.reshape(rows // height, height, columns // width, width)
    return (tiles * of_blocks[:, None, :, None]).view(matrix.shape)
