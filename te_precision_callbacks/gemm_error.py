"""The error of a GEMM's result: of the kernel, and of the format of its operands.

This module does not use Transformer Engine, a session, or global random state.

    left, right, result = (factor_of(tensor, columnwise=False) for tensor in (b, a, out))  # out = left @ right^T
    x = probes(m, 16, seed, device)
    check = check_kernel(thin(result, x), left, right, x, GemmCall(torch.bfloat16))    # against the stored operands
    high = high_left.multiply(high_right.t.multiply(x).product).product
    check_format(check.stored, high)                                                   # before quantization

A product is not computed again. Operands and result are multiplied with a few Gaussian vectors, the *probes*, which
costs as much as a few columns of the result: for a Gaussian x and any matrix E, the mean of |E x|^2 is |E|_F^2.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.numerics import blocks
from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.base.vocabulary import direction_name
from te_precision_callbacks.te.tensors import is_quantized, read_stored

PIECE_BYTES = 64 << 20
"""The default memory of a decoded piece."""

_CPU_PIECE_BYTES = 2 << 20
"""The maximum on a CPU: temporaries stay in the cache. With larger ones a product takes up to twice as long."""

_PIECE_ROWS = 128
"""The rows of the largest block of a format: a piece has whole blocks."""

KERNEL_SUMS = ("gain_dot", "stored_square")
KERNEL_MAXIMA = ("kernel_error", "kernel_ratio", "wrong_rank", "negated_wrong_rank")
FORMAT_SUMS = ("format_error_square", "high_square")
"""The columns of a GEMM's error over a step."""

MARGIN = 3.0
"""The tolerated error in units of its bound. An error of one element within its bound is above the margin in 16 probes
with a probability of 1.2e-22 (chi^2 with 16 degrees of freedom)."""


class FactorError(PrecisionDebugError, ValueError):
    """An operand of a GEMM cannot be read as a matrix."""


class Thin(NamedTuple):
    """A matrix M, [n, m], times a few vectors.

    Attributes:
        product: M times the vectors, [n, vectors].
        squares: the sums of squares of its rows, or M^2 times a vector, [n].
    """

    product: torch.Tensor
    squares: torch.Tensor


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
    def _memory_shape(self) -> tuple[int, int]:
        if isinstance(self.memory, Stored):
            return self.memory.matrix_shape
        rows, columns = self.memory.shape
        return rows, columns

    @property
    def t(self) -> Factor:
        return Factor(self.memory, not self.is_transposed, self.piece_bytes)

    def _pieces(self, dtype: torch.dtype) -> Iterator[tuple[slice, torch.Tensor]]:
        rows, columns = self._memory_shape
        most = min(self.piece_bytes, _CPU_PIECE_BYTES) if self.device.type == "cpu" else self.piece_bytes
        step = max(1, most // (dtype.itemsize * max(1, columns) * _PIECE_ROWS)) * _PIECE_ROWS
        factors = self.memory.factors() if isinstance(self.memory, Stored) else None
        for first in range(0, rows, step):
            span = slice(first, min(first + step, rows))
            if isinstance(self.memory, Stored) and factors is not None:
                yield span, _decode(self.memory, factors, span).to(dtype)
            else:
                yield span, self.memory[span].to(dtype)  # type: ignore[index]

    def multiply(self, vectors: torch.Tensor, weights: torch.Tensor | None = None) -> Thin:
        """Return ``M @ vectors``, and with weights ``M^2 @ weights``, where squares are of elements.

        Args:
            vectors: [k, vectors], float32 or float64, the dtype of the products.
            weights: [k], float64, since squares of small gradients are below float32's range.
        """
        products = vectors.new_zeros(self.shape[0], vectors.shape[1])
        squares = vectors.new_zeros(self.shape[0], dtype=torch.float64)
        for span, piece in self._pieces(vectors.dtype):
            if self.is_transposed:
                products += piece.t() @ vectors[span]
            else:
                products[span] = piece @ vectors
            if weights is not None and self.is_transposed:
                squares += piece.double().square_().t() @ weights[span]
            elif weights is not None:
                squares[span] = piece.double().square_() @ weights
        return Thin(products, squares)


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


def _decode(part: Stored, factors: torch.Tensor, rows: slice) -> torch.Tensor:
    elements = part.elements(rows)
    if factors.numel() == 1:
        return elements.mul_(factors.view(()))
    height = part.block[0]
    return blocks.multiply_by_blocks(elements, factors[rows.start // height : -(-rows.stop // height)], part.block)


def seed_of(*parts: object) -> int:
    """Return a seed that depends only on the parts, in any process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def probes(rows: int, number: int, seed: int, device: torch.device) -> torch.Tensor:
    """Return standard Gaussian vectors, [rows, number], from a separate generator.

    They are reproducible on one type of device; float64 if torch may use TF32 or bfloat16 for products in float32.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    drawn = torch.randn(rows, number, generator=generator, device=device, dtype=torch.float32)
    return drawn if torch.get_float32_matmul_precision() == "highest" else drawn.double()


def thin(matrix: Factor, x: torch.Tensor) -> Thin:
    return matrix.multiply(x, x.new_ones(len(x), dtype=torch.float64))


@dataclass(frozen=True)
class GemmCall:
    """The other parameters of a GEMM: ``out = alpha * left @ right^T + bias + beta * before``.

    Attributes:
        dtype: the dtype of the result.
        bias: [m], if any.
        before: the tensor that the product was added to, if any.
        split_accumulator: as in the call.
        capability: the compute capability; None on a CPU, and for the reference backend, which sums in float32.
    """

    dtype: torch.dtype
    alpha: float = 1.0
    beta: float = 1.0
    bias: torch.Tensor | None = None
    before: Thin | None = None
    split_accumulator: bool = False
    capability: tuple[int, int] | None = None


class KernelCheck(NamedTuple):
    """The error of a kernel, over rows without inf and nan: 0-dim float64 tensors on the device of the GEMM.

    Attributes:
        error: |result - product| / |product|, where the product is of the operands as stored.
        ratio: the largest error of a row, relative to what rounding explains; above 1, the kernel is wrong.
        gain_dot: <result, product>; divided by ``stored_square``, the gain.
        stored_square: |product|^2.
        stored: the product times the probes, [n, probes].
    """

    error: torch.Tensor
    ratio: torch.Tensor
    gain_dot: torch.Tensor
    stored_square: torch.Tensor
    stored: torch.Tensor


def check_kernel(
    result: Thin, left_factor: Factor, right_factor: Factor, x: torch.Tensor, call: GemmCall
) -> KernelCheck:
    """Compare the result of a GEMM with the product of its operands, [n, k] and [m, k]; x are probes, [m, probes]."""
    k, m = left_factor.shape[1], right_factor.shape[0]
    stored, terms = left_factor.multiply(*thin(right_factor.t, x))
    stored = stored * call.alpha
    terms = terms * call.alpha**2
    product = result.product
    if call.bias is not None:
        product = product - call.bias.detach().reshape(1, -1).to(x.dtype) @ x
    if call.before is not None:
        product = product - call.beta * call.before.product
    use = product.isfinite().all(1) & stored.isfinite().all(1) & result.squares.isfinite() & terms.isfinite()
    actual, expected = (torch.where(use[:, None], side.double(), 0.0) for side in (product, stored))
    squares = expected.square().sum(1) / x.shape[1]
    rounded = result.squares
    if call.before is not None:  # the product may be rounded before it is added
        rounded = rounded + squares
    variance = _rounding_variance(call.dtype, rounded, m)
    variance = variance + _sum_variance(left_factor, right_factor, call, k, terms, squares)
    probe_variance = torch.finfo(x.dtype).eps ** 2 * (k + m)
    variance = variance + probe_variance * (terms + squares + result.squares)
    errors = (actual - expected).square().sum(1) / x.shape[1]
    ratios = torch.where(use & (errors > 0), (errors / variance).sqrt() / MARGIN, 0.0)
    square = squares.sum()
    error = torch.where(errors.sum() > 0, (errors.sum() / square).sqrt(), 0.0)
    return KernelCheck(error, ratios.amax(), (actual * expected).sum() / x.shape[1], square, stored)


def _rounding_variance(dtype: torch.dtype, squares: torch.Tensor, m: int) -> torch.Tensor:
    """Return the largest squared error of rounding m numbers to nearest: half of the last bit of each.

    A GPU may flush numbers below float32's normal range to 0.
    """
    info = torch.finfo(dtype)
    lowest = max(info.smallest_normal * info.eps / 2, torch.finfo(torch.float32).smallest_normal)
    return (info.eps / 2) ** 2 * squares + m * lowest**2


def _sum_variance(
    left_factor: Factor, right_factor: Factor, call: GemmCall, k: int, terms: torch.Tensor, squares: torch.Tensor
) -> torch.Tensor:
    """Return a bound on the variance of the error of the sums in a row.

    A tensor core aligns groups of products and the sum so far to their largest exponent, and truncates the bits below
    the last one, u: of each product up to u, with its sign, and as much of the sum. Over k products, this is
    ``sqrt(k rho) u / 2`` of the sum, where rho, the squared sum over the sum of squares, is 1 for products of random
    signs and k for equal ones; and ``k / 32`` times ``u / 2`` of the sum itself. As in V-ABFT (arXiv 2602.08043), the
    variance follows from the sizes of the operands. Sums have 24 bits; of FP8 products on Ada and Hopper, 14
    (DeepSeek-V3, arXiv 2412.19437, 3.3; SageAttention2, arXiv 2411.10958). A split accumulator adds them in float32
    outside of the tensor core, after DeepSeek's 128 products.

    Args:
        terms: the sum of the squared products, [n].
        squares: the squared sums, [n].
    """
    is_fp8 = any(
        isinstance(side.memory, Stored) and side.memory.element_format.bits == 8 for side in (left_factor, right_factor)
    )
    last_bit = 2.0**-23
    if is_fp8 and call.capability in ((8, 9), (9, 0)):
        last_bit = 2.0**-13
        k = min(k, 128) if call.split_accumulator else k
    rho = torch.nan_to_num(squares / terms, nan=1.0, posinf=float(k)).clamp(1.0, max(1.0, float(k)))
    return (last_bit / 2) ** 2 * (k * rho + (k / 32) ** 2) * torch.maximum(terms, squares)


def check_format(stored: torch.Tensor, high: torch.Tensor) -> torch.Tensor:
    """Return |stored - high|^2 and |high|^2, [2], over rows of [n, probes] that are finite in both.

    Args:
        stored: the product of the operands as stored, times the probes.
        high: the product of the operands before quantization, times the probes.
    """
    use = (stored.isfinite() & high.isfinite()).all(1, keepdim=True)
    stored, high = (torch.where(use, side.double(), 0.0) for side in (stored, high))
    return torch.stack([(stored - high).square().sum(), high.square().sum()])


def kernel_columns(check: KernelCheck, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the sums and maxima of a kernel's error; the ranks are -inf if the kernel is not wrong."""
    is_wrong = check.ratio > 1
    ranks = [torch.where(is_wrong, sign * float(rank), -math.inf) for sign in (1, -1)]
    maxima = torch.stack([check.error, check.ratio, *ranks]).double()
    return torch.stack([check.gain_dot, check.stored_square]), maxima
