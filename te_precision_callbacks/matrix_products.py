"""The matrix products that an operator of torch computes, and their sizes.

    for product in products_of("addmm", (bias, activation, weight), result):
        product.n, product.m, product.k, product.macs

A product is counted as its definition has it: a causal mask leaves no multiply-add out, and what a fused backward of
attention computes again counts once. The operators are those of torch 2.13
(``aten/src/ATen/native/native_functions.yaml``).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

Role = Literal["", "fprop", "dgrad", "wgrad", "qk", "pv", "lookup"]
"""What a product is for, where its operator tells it: attention multiplies the queries by the keys (``qk``), and the
probabilities by the values (``pv``)."""


Sizes = tuple[int, int, int, int]
"""n, m, k and batch."""


class Bounds(NamedTuple):
    """Where the sequences begin and end that a call of attention takes together, on the device.

    Attributes:
        queries, keys: whole numbers, one more than there are sequences.
        rows, columns: which of n, m and k is the length of a sequence's queries, and which that of its keys.
    """

    queries: torch.Tensor
    keys: torch.Tensor
    rows: int
    columns: int

    def sizes(self, together: Sizes, queries: Sequence[int], keys: Sequence[int]) -> list[Sizes]:
        """The sizes of the product of each sequence.

        Args:
            together: those of all sequences as one.
            queries, keys: the bounds as numbers.
        """
        found = []
        for rows, columns in zip(_lengths(queries), _lengths(keys), strict=True):
            sizes = list(together)
            sizes[self.rows], sizes[self.columns] = rows, columns
            found.append((sizes[0], sizes[1], sizes[2], sizes[3]))
        return found


def _lengths(bounds: Sequence[int]) -> list[int]:
    return [end - begin for begin, end in itertools.pairwise(bounds)]


class MatrixProduct(NamedTuple):
    """A product of two matrices, or several of the same sizes.

    Attributes:
        a, b: the operands.
        n, m, k: the result has n rows of m elements, each a sum of k products.
        batch: the number of products.
        role: see :data:`Role`.
        bounds: those of several sequences, whose lengths only the device knows: the sizes are then those of all
            sequences as one, and :meth:`Bounds.sizes` gives those of each.
    """

    a: torch.Tensor
    b: torch.Tensor
    n: int
    m: int
    k: int
    batch: int = 1
    role: Role = ""
    bounds: Bounds | None = None

    @property
    def macs(self) -> int:
        """The number of multiply-adds."""
        return self.n * self.m * self.k * self.batch


def is_product(operator: str) -> bool:
    """Whether an operator multiplies matrices, or looks up rows of one."""
    return operator in _OPERATORS


def products_of(operator: str, arguments: Sequence[Any], result: Any) -> list[MatrixProduct]:
    """The matrix products of a call of an operator.

    Args:
        operator: its name without namespace and overload: ``addmm``.
        arguments: its positional arguments.
        result: what it has returned.

    Returns:
        Nothing for an operator that multiplies no matrices.
    """
    find = _OPERATORS.get(operator)
    return [] if find is None else list(find(arguments, result))


_N, _M, _K = range(3)

_Find = Callable[[Sequence[Any], Any], Iterator[MatrixProduct]]


def _matrices(a: int, b: int) -> _Find:
    """``[..., n, k] @ [..., k, m]``, or a vector in place of either; the arguments of these numbers."""

    def find(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
        left, right = arguments[a], arguments[b]
        n = 1 if left.dim() == 1 else left.shape[-2]
        m = 1 if right.dim() == 1 else right.shape[-1]
        yield MatrixProduct(left, right, n, m, left.shape[-1], math.prod(left.shape[:-2]))

    return find


def _linear(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    activation, weight = arguments[:2]
    m, k = math.prod(weight.shape[:-1]), weight.shape[-1]
    yield MatrixProduct(activation, weight, math.prod(activation.shape[:-1]), m, k)


def _grouped(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    """A matrix for each group where an operand has three dimensions; one with two is cut into groups."""
    left, right = arguments[:2]
    groups = left.shape[0] if left.dim() == right.dim() == 3 else 1
    yield MatrixProduct(left, right, left.shape[-2], right.shape[-1], left.shape[-1], groups)


def _convolution(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    activation, weight = arguments[:2]
    transposed, groups = arguments[6], arguments[8]
    yield _convolved(activation, weight, weight, activation if transposed else result, groups)


def _convolution_backward(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    gradient, activation, weight = arguments[:3]
    transposed, groups, (of_input, of_weight, _) = arguments[7], arguments[9], arguments[10]
    moved = activation if transposed else gradient
    if of_input:
        yield _convolved(gradient, weight, weight, moved, groups)._replace(role="dgrad")
    if of_weight:
        yield _convolved(gradient, activation, weight, moved, groups)._replace(role="wgrad")


def _convolved(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, moved: torch.Tensor, groups: int
) -> MatrixProduct:
    """A convolution as products with its weight, one for each place in ``moved``: [batch, channels, places, ...].

    A gradient has the sizes of its forward, and as many multiply-adds.
    """
    places = moved.numel() // moved.shape[1]
    return MatrixProduct(a, b, places, weight.shape[0] // groups, weight[0].numel(), groups, "fprop")


def _lookup(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    weight, indices = arguments[:2]
    yield MatrixProduct(indices, weight, indices.numel(), weight.shape[-1], 0, role="lookup")


def _attention(*, backward: bool, heads_first: bool, bounds: int | None = None) -> _Find:
    """Fused attention: of a backward the first argument is the gradient, followed by query, key and value.

    Args:
        backward: whether it is one.
        heads_first: whether operands are [batch, heads, length, size], or [..., length, heads, size].
        bounds: the number of the argument with the bounds of several sequences of queries, followed by that of keys.
    """
    heads, length = (-3, -2) if heads_first else (-2, -3)

    def find(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
        query, key, value = arguments[backward : backward + 3]
        size, size_v = query.shape[-1], value.shape[-1]
        rows, columns, batch = query.shape[length], key.shape[length], query.numel() // (query.shape[length] * size)
        several = bounds is not None and arguments[bounds] is not None

        def of_sequences(of_rows: int, of_columns: int) -> Bounds | None:
            if bounds is None or not several:
                return None
            return Bounds(arguments[bounds], arguments[bounds + 1], of_rows, of_columns)

        if several:
            batch = query.shape[heads]
        if not backward:
            yield MatrixProduct(query, key, rows, columns, size, batch, "qk", of_sequences(_N, _M))
            yield MatrixProduct(query, value, rows, size_v, columns, batch, "pv", of_sequences(_N, _K))
            return
        gradient = arguments[0]
        # Of the probabilities, and of each operand.
        yield MatrixProduct(gradient, value, rows, columns, size_v, batch, "pv", of_sequences(_N, _M))
        yield MatrixProduct(gradient, value, columns, size_v, rows, batch, "pv", of_sequences(_K, _N))
        yield MatrixProduct(gradient, key, rows, size, columns, batch, "qk", of_sequences(_N, _K))
        yield MatrixProduct(gradient, query, columns, size, rows, batch, "qk", of_sequences(_K, _N))

    return find


_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_fused_attention_overrideable",
)

_OPERATORS: Mapping[str, _Find] = {
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_scaled_mm", "_int_mm"), _matrices(0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), _matrices(1, 2)),
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm"), _grouped),
    **dict.fromkeys(("linear", "mkldnn_linear", "_linear_pointwise"), _linear),
    "convolution": _convolution,
    "convolution_backward": _convolution_backward,
    "embedding": _lookup,
    **dict.fromkeys(_FUSED, _attention(backward=False, heads_first=True)),
    **{f"{name}_backward": _attention(backward=True, heads_first=True) for name in _FUSED},
    "_flash_attention_forward": _attention(backward=False, heads_first=False, bounds=3),
    "_flash_attention_backward": _attention(backward=True, heads_first=False, bounds=6),
    "_efficient_attention_forward": _attention(backward=False, heads_first=False, bounds=4),
    "_efficient_attention_backward": _attention(backward=True, heads_first=False, bounds=6),
}
