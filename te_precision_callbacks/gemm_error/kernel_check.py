"""Checks the result C of a GEMM by products with random vectors, the probes, without waiting for the device.

Each row of (C - expected) x is the sum of the row's errors times x. It is compared with the standard deviation of its
rounding error; C^T y does the same for columns. Results are merged over micro-batches and ranks by sums and maxima.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import Stored
from te_precision_callbacks.gemm_error.factors import Factor, Swept


@dataclass(frozen=True)
class Accumulator:
    """A model of the accumulator of a GEMM.

    ``group`` products are aligned at once to ``fraction_bits``. After ``interval`` products, if set, the sum is added
    to a separate float32.

    A tensor core aligns a group of products and the sum so far to their largest exponent, truncates the bits below the
    last one, and adds. Hopper keeps about 14 bits of FP8 products (DeepSeek-V3, arXiv 2412.19437, section 3.3: errors
    up to 2 % at K = 4096), which are 13 fraction bits after the leading one (SageAttention2, arXiv 2411.10958: "FP22"
    on Ada and Hopper). With ``split_accumulator=True`` partial sums are added in float32 outside of the tensor core;
    the interval is not documented, and 128 is DeepSeek's.
    """

    name: str
    fraction_bits: int
    group: int
    interval: int | None = None

    def variance(self, k: int, terms: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Return a bound on the variance of the error of a sum of k products.

        With u the last bit, a group truncates at most u |S| of the sum S, and as much of each product, with the sign of
        the truncated value. Over a sum: ``steps`` times u / 2 of the sum itself, all of one sign; and of the products
        ``u / 2 sqrt(k rho)``, where rho, the squared sum over the sum of squares, is 1 for products of random signs and
        k for equal products. As in V-ABFT (arXiv 2602.08043) the bound follows from the sizes of the operands.

        Args:
            k: the number of products.
            terms, squares: the sum of the squared products, and the squared sum; each may be a total over several sums.
        """
        length = k if self.interval is None else min(k, self.interval)
        intervals = -(-k // length) if length else 1
        steps = -(-length // self.group)
        coherence = torch.nan_to_num(squares / terms, nan=1.0, posinf=float(k)).clamp(1.0, max(1.0, float(k)))
        largest = torch.maximum(terms, squares)
        lost = length * (coherence / intervals).clamp(min=1.0) + steps**2
        return lost * largest * 4.0 ** -(self.fraction_bits + 1)


FLOAT32 = Accumulator("float32", 23, 16)
"""All products except FP8 on Hopper and Ada: sums in float32, truncated, not rounded."""

HOPPER_FAST = Accumulator("14 bits", 13, 32)
"""FP8 on Hopper and Ada with ``split_accumulator=False``."""

HOPPER_SPLIT = Accumulator("14 bits, added in float32", 13, 32, 128)
"""FP8 on Hopper and Ada with ``split_accumulator=True``."""


def accumulator_of(*operands: Any, split_accumulator: bool, capability: tuple[int, int] | None) -> Accumulator:
    """Return the accumulator of a GEMM with these operands in memory; it is an FP8 GEMM if one has 8-bit codes.

    ``capability`` is None for the reference backend, which sums in float32.
    """
    is_fp8 = any(isinstance(operand, Stored) and operand.element_format.bits == 8 for operand in operands)
    if not is_fp8 or capability not in ((8, 9), (9, 0)):
        return FLOAT32
    if split_accumulator:
        return HOPPER_SPLIT
    return HOPPER_FAST


MOST_BEFORE = 0.01
"""The maximum rounding error of the previous sum, relative to the product. Beyond it the product is not checked."""

LARGEST_RATIO = float(torch.finfo(torch.float32).max)
"""The ratio of an error without a tolerance: a value that should be 0 or finite is not."""

FALSE_ALARM = 1e-12
"""The probability that a sum of squared Gaussians exceeds its bound. A GEMM of 8,192 x 8,192 has 16,384 rows and
columns, and 100,000 GEMMs have 2e9."""

KERNEL_SUMS = ("kernel_error_square", "expected_square", "gain_dot", "checked", "unchecked")
KERNEL_MAXIMA = (
    "kernel_ratio",
    "ranked_ratio",
    "bad_rows",
    "bad_columns",
    "bad_row_last",
    "negated_bad_row_first",
    "bad_column_last",
    "negated_bad_column_first",
    "bad_rank_last",
    "negated_bad_rank_first",
)
FORMAT_SUMS = (
    "output_error_square",
    "format_error_square",
    "high_square",
    "a_error_square",
    "a_square",
    "b_error_square",
    "b_square",
)
"""The columns of a GEMM's error over a step."""


def seed_of(*parts: object) -> int:
    """Return a seed that depends only on the parts, in any process."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big")


def probes(rows: int, number: int, seed: int, device: torch.device, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return standard Gaussian vectors, [rows, number], from a separate generator.

    They are reproducible on one type of device. ``dtype`` is by default :func:`thin_dtype`.
    """
    generator = torch.Generator(device=device)
    generator.manual_seed(seed)
    drawn = torch.randn(rows, number, generator=generator, device=device, dtype=torch.float32)
    return drawn.to(thin_dtype() if dtype is None else dtype)


def thin_dtype() -> torch.dtype:
    """Return the dtype of products with probes: float32, or float64 if torch may use TF32 or bfloat16 for float32."""
    if torch.get_float32_matmul_precision() == "highest":
        return torch.float32
    return torch.float64


def bound(probes: int) -> float:
    """Return z: |E x| over s probes is above ``z sqrt(s) sigma`` with at most the probability :data:`FALSE_ALARM`.

    ``sigma^2`` is the variance of a healthy E, summed over the elements that x multiplies. Two parts: chi^2_s is below
    ``s + 2 sqrt(s t) + 2 t`` with probability 1 - exp(-t) (Laurent and Massart, Annals of Statistics 28, 2000, lemma
    1), and a rounding error is at most sqrt(3) times its standard deviation: if one element outweighs all others, E x
    has this element's error, which is fixed while x varies.
    """
    t = -math.log(FALSE_ALARM)
    return math.sqrt(3.0 * (1.0 + 2.0 * math.sqrt(t / probes) + 2.0 * t / probes))


class Thin(NamedTuple):
    """A matrix C, [n, m], times probes.

    Attributes:
        right: C x, [n, probes].
        left: C^T y, [m, probes].
        row_squares, column_squares: the sums of squares of the rows and columns of C: [n] and [m]. For a product that
            is not computed, the sums of squares of its terms: for row i, (left_ik right_jk)^2 over j and k.
    """

    right: torch.Tensor
    left: torch.Tensor
    row_squares: torch.Tensor
    column_squares: torch.Tensor


def thin(matrix: Factor, x: torch.Tensor, y: torch.Tensor) -> Thin:
    """Multiply an existing matrix, [n, m], with probes: x is [m, probes] and y is [n, probes]."""
    ones = torch.ones(matrix.shape[1], dtype=x.dtype, device=x.device)
    swept = matrix.sweep(from_k=x, from_rows=y, squares_from_k=ones, squares=True)
    return Thin(*_present(swept.to_rows, swept.to_k, swept.squares_to_rows, swept.squares_to_k))


class ProbedOperands(NamedTuple):
    """Two operands times separate probes: [n, probes] and [m, probes]."""

    left: torch.Tensor
    right: torch.Tensor


def product(left: Factor, right: Factor, x: torch.Tensor, y: torch.Tensor, alpha: float = 1.0) -> Thin:
    """Multiply ``alpha * left @ right^T`` of [n, k] and [m, k] with probes in three sweeps: x is [m, probes], y [n,
    probes]."""
    none = x.new_empty(left.shape[1], 0)
    return product_and_operands(left, right, x, y, ProbedOperands(none, none), alpha)[0]


def product_and_operands(
    left: Factor, right: Factor, x: torch.Tensor, y: torch.Tensor, g: ProbedOperands, alpha: float
) -> tuple[Thin, ProbedOperands]:
    """Return :func:`product`, and from the same sweeps ``left @ g.left`` and ``right @ g.right``; g is [k, probes]."""
    right_swept = right.sweep(from_rows=x, squares=True)
    u, right_squares = _present(right_swept.to_k, right_swept.squares_to_k)
    left_swept = left.sweep(from_k=torch.cat([u, g.left], 1), from_rows=y, squares_from_k=right_squares, squares=True)
    rows, w, row_terms, left_squares = _present(*left_swept)
    again: Swept = right.sweep(from_k=torch.cat([w, g.right], 1), squares_from_k=left_squares)
    columns, column_terms = _present(again.to_rows, again.squares_to_rows)
    rows, left_g = torch.split(rows, [x.shape[1], g.left.shape[1]], 1)
    columns, right_g = torch.split(columns, [y.shape[1], g.right.shape[1]], 1)
    thinned = Thin(rows * alpha, columns * alpha, row_terms * alpha**2, column_terms * alpha**2)
    return thinned, ProbedOperands(left_g, right_g)


def _present(*parts: torch.Tensor | None) -> list[torch.Tensor]:
    return [part for part in parts if part is not None]


@dataclass(frozen=True)
class GemmCall:
    """The other parameters of a GEMM.

    Attributes:
        k: the number of products in a sum.
        x, y: the probes, [m, probes] and [n, probes].
        bias: the bias, [m], if any.
        before: the tensor before the product was added, times the probes, if any; it was multiplied by ``beta``.
    """

    k: int
    dtype: torch.dtype
    x: torch.Tensor
    y: torch.Tensor
    accumulator: Accumulator = FLOAT32
    bias: torch.Tensor | None = None
    before: Thin | None = None
    beta: float = 1.0


class KernelCheck(NamedTuple):
    """The result of a kernel's check: tensors on the device of the GEMM, 0-dim unless noted.

    Attributes:
        error_square: |C x - expected|^2 over all probes, of finite rows.
        expected_square: |expected|^2, of the product alone.
        gain_dot: <the product in C, expected>; divided by ``expected_square``, the gain.
        ratio: the largest ratio of error to tolerance, over the whole, all rows and all columns; above 1 is more than
            rounding.
        rows, columns: the ratio of each row and column, [n] and [m].
        counts: 1 if the product is checked. 0 if the rounding of the previous sum hides it, or no row of the expected
            product is finite; all other values are then 0.
    """

    error_square: torch.Tensor
    expected_square: torch.Tensor
    gain_dot: torch.Tensor
    ratio: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    counts: torch.Tensor


def check_kernel(run: Thin, expected: Thin, call: GemmCall) -> KernelCheck:
    added_right, added_left, before_rows, before_columns = _added_terms(call, expected)
    rows = _side(run.right - added_right, expected.right, run.row_squares, expected.row_squares, before_rows, call, 0)
    columns = _side(
        run.left - added_left, expected.left, run.column_squares, expected.column_squares, before_columns, call, 1
    )
    expected_square = rows.expected.sum()
    before = torch.zeros_like(expected_square) if before_rows is None else before_rows.double().sum()
    hidden = before * rounding_variance(call.dtype) * call.x.shape[1] > MOST_BEFORE**2 * expected_square
    counts = (rows.checked.any() & ~hidden).double()
    total = _ratio(rows.error.sum(), rows.tolerance.sum(), rows.broken.any())
    return KernelCheck(
        rows.error.sum() * counts,
        expected_square * counts,
        rows.dot.sum() * counts,
        torch.stack([total, rows.ratio.amax(), columns.ratio.amax()]).amax() * counts,
        rows.ratio * counts,
        columns.ratio * counts,
        counts,
    )


def remove_added(run: Thin, expected: Thin, call: GemmCall) -> torch.Tensor:
    """Return the device's result times x, [n, probes], without the bias and the previous sum."""
    return run.right - _added_terms(call, expected)[0]


class _Side(NamedTuple):
    """The rows, or the columns, of a checked product: [rows], float64.

    Attributes:
        error, expected, dot: the sums over probes of squared errors, of squared expected values, and of products of
            actual and expected values.
        tolerance: the square of the largest healthy error.
        checked, broken: whether the expected values are finite; whether they are, but not the actual values.
        ratio: the error divided by its tolerance.
    """

    error: torch.Tensor
    expected: torch.Tensor
    dot: torch.Tensor
    tolerance: torch.Tensor
    checked: torch.Tensor
    broken: torch.Tensor
    ratio: torch.Tensor


def _side(
    run: torch.Tensor,
    expected: torch.Tensor,
    run_squares: torch.Tensor,
    terms: torch.Tensor,
    before_squares: torch.Tensor | None,
    call: GemmCall,
    side: int,
) -> _Side:
    run = run.double()
    expected = expected.double()
    probes = run.shape[1]
    checked = expected.isfinite().all(1) & terms.isfinite()
    finite = run.isfinite().all(1) & run_squares.isfinite()
    # In float16, inf is correct for a large result.
    saturates = terms * probes > (torch.finfo(call.dtype).max / 64) ** 2
    broken = checked & ~finite & ~saturates
    use = (checked & finite).unsqueeze(1)
    run = torch.where(use, run, 0.0)
    expected = torch.where(use, expected, 0.0)
    squares = expected.square().sum(1)
    run_squares, terms = (torch.where(use[:, 0], part.double(), 0.0) for part in (run_squares, terms))
    other = (call.x if side == 0 else call.y).shape[0]
    rounded = run_squares
    if before_squares is not None:  # the product may be rounded before it is added: |product| <= |sum| + |before|
        rounded = rounded + 2 * (rounded + before_squares.double())
    tiny = torch.finfo(call.dtype).smallest_normal * torch.finfo(call.dtype).eps
    variance = rounded * rounding_variance(call.dtype) + other * tiny**2
    # Doubled, since |expected|^2 over few probes may be below its mean.
    size = 2 * squares / probes
    variance = variance + call.accumulator.variance(call.k, terms, size)
    own = torch.finfo(call.x.dtype).eps
    variance = variance + own**2 * (call.k + other) * (terms + size + run_squares)
    error = (run - expected).square().sum(1)
    tolerance = variance * (bound(probes) ** 2 * probes)
    ratio = _ratio(error, tolerance, broken)
    return _Side(error, squares, (run * expected).sum(1), tolerance, checked, broken, ratio)


def rounding_variance(dtype: torch.dtype) -> float:
    """Return the largest variance of rounding to nearest, relative to the squared value: the last bit is at most eps
    times the value, and the error is uniform over one bit.
    """
    return float(torch.finfo(dtype).eps) ** 2 / 12


def _ratio(error: torch.Tensor, tolerance: torch.Tensor, broken: torch.Tensor) -> torch.Tensor:
    """The root of squared errors over squared tolerances; :data:`LARGEST_RATIO` without a tolerance, or if broken."""
    ratio = torch.where(tolerance > 0, error / tolerance, torch.where(error > 0, torch.inf, 0.0)).sqrt()
    return torch.where(broken, torch.inf, ratio).clamp(max=LARGEST_RATIO)


def _added_terms(
    call: GemmCall, expected: Thin
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    right = torch.zeros_like(expected.right[:1])
    left = torch.zeros_like(expected.left[:1])
    if call.bias is not None:
        bias = call.bias.detach().reshape(-1).to(call.x.dtype)
        right = right + bias.unsqueeze(0) @ call.x
        left = left + bias.unsqueeze(1) * call.y.sum(0, keepdim=True)
    if call.before is None:
        return right, left, None, None
    before = call.before
    beta = call.beta
    return (
        right + beta * before.right,
        left + beta * before.left,
        beta**2 * before.row_squares,
        beta**2 * before.column_squares,
    )


def squares_of_difference(decoded: torch.Tensor, original: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return |decoded - original|^2 and |original|^2, float64, over rows of [rows, probes] that are finite in both."""
    decoded = decoded.double()
    original = original.double()
    use = (decoded.isfinite() & original.isfinite()).all(1, keepdim=True)
    decoded = torch.where(use, decoded, 0.0)
    original = torch.where(use, original, 0.0)
    return (decoded - original).square().sum(), original.square().sum()


def kernel_columns(kernel: KernelCheck, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the columns of a kernel's error; positions are -inf if nothing is beyond its tolerance."""
    sums = torch.stack(
        [kernel.error_square, kernel.expected_square, kernel.gain_dot, kernel.counts, 1.0 - kernel.counts]
    )
    places: list[torch.Tensor] = []
    for ratios in (kernel.rows, kernel.columns):
        index = torch.arange(len(ratios), device=ratios.device, dtype=torch.float64)
        places += [torch.where(ratios > 1, sign * index, -math.inf).amax() for sign in (1, -1)]
    bad_rank = torch.where(kernel.ratio > 1, torch.full_like(kernel.ratio, rank), -math.inf)
    # A float32 converted to float64 has 29 zero bits, which hold the rank.
    ranked = (kernel.ratio.float().double().view(torch.int64) | rank).view(torch.float64)
    counts = [(ratios > 1).double().sum() for ratios in (kernel.rows, kernel.columns)]
    negated = torch.where(kernel.ratio > 1, torch.full_like(kernel.ratio, -rank), -math.inf)
    return sums, torch.stack([kernel.ratio, ranked, *counts, *places, bad_rank, negated])
