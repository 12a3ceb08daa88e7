"""The operands of a GEMM as matrices, decoded in pieces for products with a few vectors.

A sweep decodes each element once; only one decoded piece is in memory at a time.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.layouts import Stored, is_quantized, read_stored
from te_precision_callbacks.base.vocabulary import direction_name

PIECE_BYTES = 64 << 20
"""The default memory of a decoded piece."""

_CPU_PIECE_BYTES = 2 << 20
"""The maximum on a CPU: temporaries stay in the cache. With larger ones a sweep takes up to twice as long."""

_ROWS_TOGETHER = 128
"""The rows of the largest block of a format: a piece has whole blocks."""


class FactorError(PrecisionDebugError, ValueError):
    """An operand of a GEMM cannot be read as a matrix."""


class Swept(NamedTuple):
    """Products of a matrix M, [rows, k], with a few vectors; None if not requested.

    Attributes:
        to_rows: ``M @ from_k``, [rows, vectors].
        to_k: ``M^T @ from_rows``, [k, vectors].
        squares_to_rows: ``M^2 @ squares_from_k``, [rows]; M^2 is elementwise.
        squares_to_k: the sums of squares of the columns of M, [k].
    """

    to_rows: torch.Tensor | None
    to_k: torch.Tensor | None
    squares_to_rows: torch.Tensor | None
    squares_to_k: torch.Tensor | None


@dataclass(frozen=True)
class Factor:
    """A matrix M, [rows, k].

    Attributes:
        memory: a plain matrix in any float dtype, or one direction of a quantized tensor.
        is_transposed: whether the rows in memory are the columns of M.
        piece_bytes: the maximum memory of a decoded piece, which has at least 128 rows.
    """

    memory: torch.Tensor | Stored
    is_transposed: bool
    piece_bytes: int = PIECE_BYTES

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self._memory_shape
        if self.is_transposed:
            return (columns, rows)
        return (rows, columns)

    @property
    def device(self) -> torch.device:
        if isinstance(self.memory, Stored):
            return self.memory.codes.device
        return self.memory.device

    @property
    def needs(self) -> int:
        """The bytes of the smallest piece, in float32."""
        rows, columns = self._memory_shape
        return min(rows, _ROWS_TOGETHER) * columns * torch.float32.itemsize

    @property
    def is_quantized(self) -> bool:
        return isinstance(self.memory, Stored)

    @property
    def _memory_shape(self) -> tuple[int, int]:
        if isinstance(self.memory, Stored):
            return self.memory.matrix_shape
        rows, columns = self.memory.shape
        return rows, columns

    def pieces(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        rows, columns = self._memory_shape
        most = min(self.piece_bytes, _CPU_PIECE_BYTES) if self.device.type == "cpu" else self.piece_bytes
        step = max(1, most // (dtype.itemsize * max(1, columns) * _ROWS_TOGETHER)) * _ROWS_TOGETHER
        factors = self.memory.factors() if isinstance(self.memory, Stored) else None
        for first in range(0, rows, step):
            place = slice(first, min(first + step, rows))
            if isinstance(self.memory, Stored) and factors is not None:
                yield place, _decode(self.memory, factors, place).to(dtype)
            else:
                yield place, self.memory[place].to(dtype)  # type: ignore[index]

    def matrix(self) -> torch.Tensor:
        if not self._memory_shape[0]:
            return torch.empty(self.shape, dtype=torch.float64, device=self.device)
        whole = torch.cat([piece for _, piece in self.pieces(torch.float64)])
        if self.is_transposed:
            return whole.t()
        return whole

    def sweep(
        self,
        *,
        from_k: torch.Tensor | None = None,
        from_rows: torch.Tensor | None = None,
        squares_from_k: torch.Tensor | None = None,
        squares: bool = False,
    ) -> Swept:
        """Multiply with a few vectors, in one pass.

        Args:
            from_k: [k, vectors], float32 or float64, the dtype of the products.
            from_rows: [rows, vectors], in the same dtype.
            squares_from_k: [k].
            squares: compute the sums of squares of the columns.
        """
        given = next((v for v in (from_k, from_rows, squares_from_k) if v is not None), None)
        dtype = torch.float32 if given is None else given.dtype
        along, across = (from_k, from_rows) if self.is_transposed else (from_rows, from_k)
        ones = torch.ones(self.shape[0], dtype=dtype, device=self.device) if squares else None
        squares_along, squares_across = (squares_from_k, ones) if self.is_transposed else (ones, squares_from_k)
        by_row: list[torch.Tensor] = []
        squares_by_row: list[torch.Tensor] = []
        total: torch.Tensor | None = None
        squares_total: torch.Tensor | None = None
        for place, piece in self.pieces(dtype):
            if across is not None:
                by_row.append(piece @ across)
            if along is not None:
                part = piece.t() @ along[place]
                total = part if total is None else total.add_(part)
            if squares_along is not None or squares_across is not None:
                piece = piece.square()
            if squares_across is not None:
                squares_by_row.append(piece @ squares_across)
            if squares_along is not None:
                part = piece.t() @ squares_along[place]
                squares_total = part if squares_total is None else squares_total.add_(part)
        rows = torch.cat(by_row) if by_row else None
        squares_rows = torch.cat(squares_by_row) if squares_by_row else None
        if self.is_transposed:
            return Swept(total, rows, squares_total, squares_rows)
        return Swept(rows, total, squares_rows, squares_total)


def factor_of(tensor: Any, *, columnwise: bool, piece_bytes: int = PIECE_BYTES) -> Factor:
    """Return an operand of a GEMM.

    Args:
        tensor: a plain tensor, or a quantized tensor of Transformer Engine; leading dimensions are merged.
        columnwise: whether the GEMM reads the columnwise data: it then sums over the rows of the tensor, else over its
            last dimension.

    Raises:
        FactorError: the tensor has no data of this direction, or is of an unknown kind.
    """
    if isinstance(tensor, Stored):
        part: Stored | None = tensor
    elif is_quantized(tensor):
        part = read_stored(tensor, columnwise=columnwise)
    elif type(tensor) in (torch.Tensor, torch.nn.Parameter):
        matrix = tensor.detach()
        return Factor(matrix.reshape(math.prod(matrix.shape[:-1]), matrix.shape[-1]), columnwise, piece_bytes)
    else:
        raise FactorError(f"{type(tensor).__name__} is not a known kind of operand.")
    if part is None:
        raise FactorError(f"The {type(tensor).__name__} has no {direction_name(columnwise)} data.")
    return Factor(part, columnwise != part.transposed, piece_bytes)


def _decode(part: Stored, factors: torch.Tensor, place: slice) -> torch.Tensor:
    elements = part.elements(place)
    if factors.numel() == 1:
        return elements.mul_(factors.view(()))
    height = part.block[0]
    return blocks.multiply_by_blocks(elements, factors[place.start // height : -(-place.stop // height)], part.block)
