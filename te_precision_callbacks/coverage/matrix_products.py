"""The matrix products that an operator of torch computes, and their sizes.

Multiply-adds are counted at full size: a causal mask does not reduce them, and products that a fused backward of
attention recomputes are not counted again. Operators of torch 2.13 (``aten/src/ATen/native/native_functions.yaml``,
``torch/nn/attention``, ``torch/_higher_order_ops/flex_attention.py``), flash-attn 2.8, and flash-attn 3 for Hopper
(``flash_attn_interface.py``).
"""

from __future__ import annotations

import functools
import logging
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.coverage.marks import tensors_in

logger = logging.getLogger(__name__)

Role = Literal["", "fprop", "dgrad", "wgrad", "qk", "pv", "lookup"]
"""The purpose of a product, if its operator shows it."""

Sizes = tuple[int, int, int, int]


class MatrixProduct(NamedTuple):
    """One or several products ``[n, k] @ [k, m]`` of the same sizes.

    Attributes:
        a, b: the operands.
        sizes: n, m, k, and the number of products.
        sequences: the sizes of packed sequences; ``sizes`` are then the sizes of the packed tensors.
    """

    a: torch.Tensor
    b: torch.Tensor
    sizes: Sizes
    role: Role = ""
    sequences: tuple[Sizes, ...] | None = None


def products_of(operator: str, arguments: Sequence[Any], result: Any) -> list[MatrixProduct]:
    """The matrix products of a call of an operator; empty for an operator that is not counted.

    Args:
        operator: its name with its namespace, without overload: ``aten::addmm``, or ``higher_order::flex_attention``.
        arguments: its positional arguments.
        result: its result.
    """
    find = OPERATORS.get(operator)
    if find is None:
        return []
    return list(find(arguments, result))


def why_not_counted(operator: str, arguments: Sequence[Any]) -> str:
    """The reason if an operator may multiply matrices and is not counted; else empty.

    An unknown operator of torch may multiply by its name, another one if it receives two matrices of numbers.

    Args:
        operator: as in :func:`products_of`.
        arguments: its arguments, including keyword arguments.
    """
    if operator in OPERATORS:
        return ""
    namespace, _, name = operator.partition("::")
    if namespace == "aten":
        if _NAME_OF_PRODUCT.search(name) and not _NAME_WITHOUT_PRODUCT.search(name):
            return "may multiply matrices"
        return ""
    if namespace in _NO_PRODUCTS:
        return ""
    matrices = [tensor for tensor in tensors_in(arguments) if tensor.dim() > 1]
    # The elements are numbers or quantized numbers, rather than indices or a mask.
    if sum(matrix.is_floating_point() or matrix.dtype in (torch.int8, torch.uint8) for matrix in matrices) > 1:
        return "takes several matrices and may multiply them"
    return ""


_NAME_OF_PRODUCT = re.compile(
    r"mm(_|$)|mv_?$|matmul|(^|_|tri)linear|conv(?!ert)|attention|rnn|lstm|gru|addr|linalg|solve|cholesky|ormqr"
    r"|(p|c|euclidean_)dist"
)

_NAME_WITHOUT_PRODUCT = re.compile(r"fused_\w+_cell|linear\dd|reorder|flatten|search|cross|vector_norm|powsum|check")


_Find = Callable[[Sequence[Any], Any], Iterator[MatrixProduct]]


def _matrices(a: int, b: int) -> _Find:
    """``[..., n, k] @ [..., k, m]``, or a vector in place of either, arguments by two argument numbers."""

    def find(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
        left_operand = arguments[a]
        right = arguments[b]
        n = 1 if left_operand.dim() == 1 else left_operand.shape[-2]
        m = 1 if right.dim() == 1 else right.shape[-1]
        yield MatrixProduct(left_operand, right, (n, m, left_operand.shape[-1], math.prod(left_operand.shape[:-2])))

    return find


def _grouped(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    """Grouped GEMM: a 3-D operand has a matrix for each group; a 2-D operand is split into groups."""
    left_operand, right = arguments[:2]
    groups = 1
    if left_operand.dim() == right.dim() == 3:
        groups = left_operand.shape[0]
    yield MatrixProduct(left_operand, right, (left_operand.shape[-2], right.shape[-1], left_operand.shape[-1], groups))


def _sum_of_two(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    yield from _matrices(0, 1)(arguments, result)
    yield from _matrices(2, 3)(arguments, result)


def _convolution(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    activation, weight = arguments[:2]
    transposed = arguments[6]
    groups = arguments[8]
    yield _convolution_product(activation, weight, weight, activation if transposed else result, groups)


def _convolution_backward(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    gradient, activation, weight = arguments[:3]
    groups = arguments[9]
    has_dgrad, has_wgrad, _ = arguments[10]
    moved = activation if arguments[7] else gradient
    if has_dgrad:
        yield _convolution_product(gradient, weight, weight, moved, groups)._replace(role="dgrad")
    if has_wgrad:
        yield _convolution_product(gradient, activation, weight, moved, groups)._replace(role="wgrad")


def _convolution_product(
    a: torch.Tensor, b: torch.Tensor, weight: torch.Tensor, moved: torch.Tensor, groups: int
) -> MatrixProduct:
    """A convolution as products with its weight, one for each position in ``moved``: [batch, channels, positions, ...].
    Each gradient has as many multiply-adds as the forward.
    """
    positions = moved.numel() // moved.shape[1]
    return MatrixProduct(a, b, (positions, weight.shape[0] // groups, weight[0].numel(), groups), "fprop")


def _recurrent(*, backward: bool) -> _Find:
    """A layer and direction of mkldnn's LSTM, or all layers of cuDNN's LSTM, GRU or RNN.

    Its second and third arguments have the weights. The products of all time steps are counted as one per weight.
    """

    def find(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
        activation = arguments[0]
        output_mask = arguments[-1]
        rows = activation.numel() // max(1, activation.shape[-1])
        needs_wgrad = backward and (not isinstance(output_mask, (list, tuple)) or output_mask[-1])  # cuDNN has a mask
        for weight in tensors_in(arguments[1:3]):
            if weight.dim() != 2:
                continue  # a bias
            outputs, inputs = weight.shape
            if not backward:
                yield MatrixProduct(activation, weight, (rows, outputs, inputs, 1), "fprop")
                continue
            yield MatrixProduct(activation, weight, (rows, inputs, outputs, 1), "dgrad")
            if needs_wgrad:
                yield MatrixProduct(activation, weight, (outputs, inputs, rows, 1), "wgrad")

    return find


def _lookup(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
    weight, indices = arguments[:2]
    yield MatrixProduct(indices, weight, (indices.numel(), weight.shape[-1], 0, 1), "lookup")


def _attention(*, heads_first: bool, gradient: int | None = None, bounds: int | None = None) -> _Find:
    """Fused attention, or its backward. The first arguments are query, key and value.

    Args:
        heads_first: operands are [batch, heads, length, size]; else [..., length, heads, size].
        gradient: argument number of the gradient in a backward; the operands follow a first one.
        bounds: argument number of the bounds of packed query sequences; the bounds of the keys follow.
    """
    heads, length = (-3, -2) if heads_first else (-2, -3)

    def find(arguments: Sequence[Any], result: Any) -> Iterator[MatrixProduct]:
        first = int(gradient == 0)
        query, key, value = arguments[first : first + 3]
        batch = query.numel() // (query.shape[length] * query.shape[-1])
        lengths = None
        if bounds is not None and len(arguments) > bounds + 1 and arguments[bounds] is not None:
            batch = query.shape[heads]
            lengths = _lengths(*arguments[bounds : bounds + 2])

        def sizes(letters: str, rows: int, columns: int) -> Sizes:
            by_letter = {"q": rows, "k": columns, "d": query.shape[-1], "v": value.shape[-1]}
            n, m, k = map(by_letter.__getitem__, letters)
            return n, m, k, batch

        for role, letters in _FORWARD if gradient is None else _BACKWARD:
            sequences = None
            if lengths is not None:
                sequences = tuple(sizes(letters, *pair) for pair in lengths)
            yield MatrixProduct(
                query if gradient is None else arguments[gradient],
                key if role == "qk" else value,
                sizes(letters, query.shape[length], key.shape[length]),
                role,
                sequences,
            )

    return find


_FORWARD: tuple[tuple[Role, str], ...] = ("qk", "qkd"), ("pv", "qvk")
_BACKWARD: tuple[tuple[Role, str], ...] = ("pv", "qkv"), ("pv", "kvq"), ("qk", "qdk"), ("qk", "kdq")
"""The products of attention: role and dimensions n, m, k, of queries, keys, and the sizes of a key and of a value."""


def _lengths(queries: torch.Tensor, keys: torch.Tensor | None) -> list[tuple[int, int]] | None:
    """Read the bounds of packed sequences; None in a CUDA graph. Waits for the device, in counted calls only."""
    if is_capturing():
        _warn_of_capture()
        return None
    if keys is None:
        keys = queries
    return list(zip(queries.diff().tolist(), keys.diff().tolist(), strict=True))


@functools.cache
def _warn_of_capture() -> None:
    logger.warning(
        "The first step captures a CUDA graph, so the lengths of packed sequences are unknown and coverage"
        " overestimates the multiply-adds of attention. Capture after the first step."
    )


_FUSED = (
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
)
"""The operators of ``scaled_dot_product_attention``."""


_PRODUCTS = ("mm", "bmm", "mv", "dot", "vdot", "_scaled_mm", "_scaled_mm_v2", "_int_mm")

_OF_ATEN: Mapping[str, _Find] = {
    **dict.fromkeys(_PRODUCTS, _matrices(0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), _matrices(1, 2)),
    **dict.fromkeys(("addmm_", "baddbmm_", "addbmm_", "addmv_"), _matrices(1, 2)),
    **dict.fromkeys(("_scaled_addmm", "_scaled_addmm_"), _matrices(1, 2)),  # torch 2.15
    **dict.fromkeys(("_grouped_mm", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"), _grouped),
    **dict.fromkeys(("convolution", "_convolution"), _convolution),  # the second in a model of torch.jit.trace
    "convolution_backward": _convolution_backward,
    **dict.fromkeys(("_cudnn_rnn", "mkldnn_rnn_layer"), _recurrent(backward=False)),
    **dict.fromkeys(("_cudnn_rnn_backward", "mkldnn_rnn_layer_backward"), _recurrent(backward=True)),
    **dict.fromkeys(("embedding", "_embedding_bag", "_embedding_bag_forward_only"), _lookup),
    **{name: _attention(heads_first=True) for name in _FUSED},
    **{f"{name}_backward": _attention(heads_first=True, gradient=0) for name in _FUSED},
    "_flash_attention_forward": _attention(heads_first=False, bounds=3),
    "_flash_attention_backward": _attention(heads_first=False, gradient=0, bounds=6),
    "_efficient_attention_forward": _attention(heads_first=False, bounds=4),
    "_efficient_attention_backward": _attention(heads_first=False, gradient=0, bounds=6),
    "_cudnn_attention_forward": _attention(heads_first=False, bounds=4),
    "_cudnn_attention_backward": _attention(heads_first=False, gradient=0, bounds=9),
}  # fmt: skip

OPERATORS: Mapping[str, _Find] = {
    **{f"aten::{name}": find for name, find in _OF_ATEN.items()},
    "inductor::_mm_plus_mm": _sum_of_two,
    "torch_attn::_varlen_attn": _attention(heads_first=False, bounds=3),
    "torch_attn::_varlen_attn_backward": _attention(heads_first=False, gradient=0, bounds=6),
    "higher_order::flex_attention": _attention(heads_first=True),
    "higher_order::flex_attention_backward": _attention(heads_first=True, gradient=5),
    "flash_attn::_flash_attn_forward": _attention(heads_first=False),
    "flash_attn::_flash_attn_backward": _attention(heads_first=False, gradient=0),
    "flash_attn::_flash_attn_varlen_forward": _attention(heads_first=False, bounds=3),
    "flash_attn::_flash_attn_varlen_backward": _attention(heads_first=False, gradient=0, bounds=9),
    "flash_attn_3::_flash_attn_forward": _attention(heads_first=False, bounds=7),
    "flash_attn_3::_flash_attn_backward": _attention(heads_first=False, gradient=0, bounds=6),
}

_NO_PRODUCTS = frozenset(
    {
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "fsdp", "_dtensor", "profiler", "prims", "rngprims"),
        *("debugprims", "debug_mode_ops", "inductor", "inductor_prims", "export", "_test", "streams"),
        *("te_kv_cache", "te_attention", "te_softmax", "tex", "transformer_engine", "transformer_engine_compile"),
    }
)
"""Namespaces without products, and Transformer Engine's own, which the tap sees."""
