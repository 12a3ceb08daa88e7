"""The sizes of the matrix products that torch's operators compute, against torch's own counter and by hand."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import varlen  # noqa: F401  # registers operators
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from te_precision_callbacks.coverage.matrix_products import (
    OPERATORS,
    MatrixProduct,
    products_of,
    why_not_counted,
)


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[MatrixProduct] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Sequence[Any] = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        self.found += products_of(operator._schema.name, arguments, result)
        return result


def macs_of(product: MatrixProduct) -> int:
    sizes = [product.sizes] if product.sequences is None else product.sequences
    return sum(map(math.prod, sizes))


def run(compute: Callable[[], torch.Tensor]) -> tuple[list[MatrixProduct], int]:
    """The products of a computation and its backward, and the multiply-adds that torch's own counter counts."""
    with Products() as products:
        compute().sum().backward()
    with FlopCounterMode(display=False) as counter:
        compute().sum().backward()
    return products.found, counter.get_total_flops() // 2


def ones(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


COMPUTED: dict[str, Callable[[], torch.Tensor]] = {
    "mm": lambda: ones(5, 7) @ ones(7, 3),
    "bmm": lambda: ones(2, 5, 7) @ ones(2, 7, 3),
    "baddbmm": lambda: torch.baddbmm(ones(2, 5, 3), ones(2, 5, 7), ones(2, 7, 3)),
    "linear": lambda: functional.linear(ones(2, 4, 7), ones(3, 7), ones(3)),
    "einsum": lambda: torch.einsum("bnd,bmd->bnm", ones(2, 5, 7), ones(2, 3, 7)),
    "conv1d": lambda: functional.conv1d(ones(2, 4, 9), ones(6, 4, 3), padding=1),
    "conv2d of a stride": lambda: functional.conv2d(ones(2, 4, 9, 9), ones(6, 4, 3, 3), stride=2),
    "conv2d of a traced model": lambda: torch.ops.aten._convolution(
        ones(2, 4, 9, 9), ones(6, 4, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, False, False, False, True
    ),
    "transposed": lambda: functional.conv_transpose2d(ones(2, 4, 5, 5), ones(4, 6, 3, 3), stride=2),
}


def test_the_multiply_adds_are_those_of_torchs_own_counter() -> None:
    for name in COMPUTED:
        products, counted = run(COMPUTED[name])
        assert sum(macs_of(product) for product in products) == counted > 0
        assert len(products) == 3, "the forward, and a product for each of two gradients"
        if name == "linear":
            assert [product.sizes for product in products] == [(8, 3, 7, 1), (8, 7, 3, 1), (3, 7, 8, 1)]
        if "conv" in name:
            assert [product.role for product in products] == ["fprop", "dgrad", "wgrad"]


def test_convolutions() -> None:
    """In groups, by the definition: each of the results is a sum over a kernel and the channels of its group. A frozen
    weight has no wgrad."""
    results, kernel, channels = 2 * 6 * 7 * 7, 3 * 3, 4 // 2
    products, _ = run(lambda: functional.conv2d(ones(2, 4, 9, 9), ones(6, 2, 3, 3), groups=2))
    assert [(product.role, macs_of(product)) for product in products] == [
        (gemm, results * kernel * channels) for gemm in ("fprop", "dgrad", "wgrad")
    ]
    products, _ = run(lambda: functional.conv2d(ones(2, 4, 9, 9), torch.ones(6, 4, 3, 3)))
    assert [product.role for product in products] == ["fprop", "dgrad"]


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention(causal: bool) -> None:
    """By its definition: two products forward, two for each of them backward."""
    batch, heads, rows, columns, size = 2, 3, 5, 5 if causal else 7, 8

    def compute() -> torch.Tensor:
        query, key = ones(batch, heads, rows, size), ones(batch, heads, columns, size)
        return functional.scaled_dot_product_attention(query, key, ones(batch, heads, columns, size), is_causal=causal)

    products, _ = run(compute)
    first = batch * heads * rows * columns * size
    assert [(product.role, macs_of(product)) for product in products] == [
        ("qk", first), ("pv", first), ("pv", first), ("pv", first), ("qk", first), ("qk", first)
    ]  # fmt: skip
    assert products[0].sizes == (rows, columns, size, batch * heads)
    assert products[1].sizes == (rows, size, columns, batch * heads)


def test_attention_over_sequences_of_different_lengths() -> None:
    query, bounds = torch.zeros(1, 9, 3, 8), (torch.tensor([0, 4, 9]), torch.tensor([0, 3, 9]))
    forward = products_of(
        "aten::_efficient_attention_forward", (query, query, query, None, *bounds, 5, 5, 0.0, 0), query
    )
    results = [sizes for product in forward for sizes in product.sequences or ()]
    assert results == [(4, 3, 8, 3), (5, 6, 8, 3), (4, 8, 3, 3), (5, 8, 6, 3)]
    given = (query, query, query, query, None, query, *bounds)
    backward = products_of("aten::_efficient_attention_backward", given, None)
    of_first = [product.sequences[0] for product in backward if product.sequences]
    assert of_first == [(4, 3, 8, 3), (3, 8, 4, 3), (4, 8, 3, 3), (3, 8, 4, 3)]


def test_operators_without_products() -> None:
    assert "aten::mul" not in OPERATORS
    assert products_of("aten::mul", (ones(2, 2), ones(2, 2)), ones(2, 2)) == []
    [lookup] = products_of("aten::embedding", (torch.zeros(9, 4), torch.zeros(2, 3, dtype=torch.int64)), None)
    assert (lookup.role, macs_of(lookup), *lookup.sizes[:2]) == ("lookup", 0, 6, 4)


SQUARE = torch.ones(4, 4)

ABSENT = {"aten::_scaled_addmm", "aten::_scaled_addmm_"}  # are counted, of torch 2.15, and may be missing in a torch


def test_the_operators_that_are_counted_have_these_names() -> None:
    """Those of torch; flash-attn's are not installed."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    higher = {f"higher_order::{name}" for name in dir(torch.ops.higher_order)}
    counted = {name for name in OPERATORS if not name.startswith("flash_attn")}
    assert counted - names - higher - ABSENT == {
        name for name in counted if name.startswith("higher_order") and name not in higher
    }


LIKE_PRODUCTS = re.compile(
    r"mm(?!a|i)|matmul|linear|conv(?!ert)|atten|attn|dot|rnn|lstm|gru|addr|outer|ger$|dist|mv|linalg|cslt|einsum|chain"
    r"|embedding|solve|cholesky|svd|qr$|^lu_|flash|gemm|kron|inner|encoder|sdp|det$|eig(?!h)|inv|sparse_sparse"
)
"""In the names of operators that multiply matrices."""

MULTIPLY_NOTHING = {
    "adds up rows": {"_embedding_bag_backward", "_embedding_bag_dense_backward", "embedding_dense_backward"},
    "works element by element": {
        *("_thnn_fused_gru_cell", "_thnn_fused_gru_cell_backward", "_thnn_fused_lstm_cell"),
        *("_thnn_fused_lstm_cell_backward_impl", "_embedding_bag_per_sample_weights_backward", "embedding_renorm"),
        *("dist", "linalg_cross"),
    },
    "moves or inspects tensors": {
        *("_cslt_sparse_mm_search", "_cudnn_rnn_flatten_weight", "_fused_sdp_choice", "lu_unpack", "slice_inverse"),
    },
    "is a fast path of inference, without gradients": {"_transformer_encoder_layer_fwd"},
}
"""Why an operator of torch is neither counted nor named as not counted -> operators named like products."""


OF_TRANSFORMER_ENGINE = {"tex", "transformer_engine_compile"}
"""Namespaces of its operators: for ONNX, and in graphs of ``torch.compile``. The tap sees their products."""


def named_like_products() -> set[str]:
    """Torch's operators of several tensors, unless it takes them apart before a dispatch mode sees them."""
    names = set()
    for schema in torch._C._jit_get_all_schemas():
        types = [str(argument.type) for argument in schema.arguments if not argument.is_out]
        tensors = [name for name in types if "Tensor" in name]
        has_several = len(tensors) > 1 or "List" in "".join(tensors)
        namespace, _, name = schema.name.partition("::")
        if not has_several or not LIKE_PRODUCTS.search(name) or namespace in OF_TRANSFORMER_ENGINE:
            continue
        overload = f"{schema.name}.{schema.overload_name}".rstrip(".")
        try:
            is_taken_apart = torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")
        except RuntimeError:  # an operator of TorchScript alone
            is_taken_apart = True
        if not is_taken_apart:
            names.add(schema.name)
    return names


def test_every_operator_that_may_multiply_is_counted_or_has_a_reason() -> None:
    """By their names, and all of torch's own counter. An operator that vanishes would raise the shares of others."""
    counted_by_torch = {str(operator).replace(".", "::") for operator in flop_registry}
    candidates = named_like_products() | {
        name if "::" in name else f"higher_order::{name}" for name in counted_by_torch
    }
    assert len(candidates) > 150
    unknown = {name for name in candidates if name not in OPERATORS and not why_not_counted(name, (SQUARE, SQUARE))}
    excepted = {f"aten::{name}" for names in MULTIPLY_NOTHING.values() for name in names}
    assert {name.removesuffix("_") for name in unknown} <= excepted
    assert not {name for name in excepted if name in OPERATORS or why_not_counted(name, (SQUARE, SQUARE))}


WHY_NOT = [
    ("vendor::mm", (SQUARE, SQUARE), "may multiply them"),
    ("vendor::mm", (SQUARE, torch.ones(4)), ""),  # one matrix alone
    ("vendor::mm", (SQUARE, SQUARE.long()), ""),  # indices
    ("vendor::mm", (SQUARE.char(), SQUARE.char()), "may multiply them"),  # quantized
    ("vendor::grouped", ([SQUARE, SQUARE], 3), "may multiply them"),
    ("c10d::allreduce_", ([SQUARE, SQUARE],), ""),
    ("aten::mm", (SQUARE, SQUARE), ""),
    ("aten::add", (SQUARE, SQUARE), ""),
    ("aten::_next_mm", (SQUARE, SQUARE), "may multiply matrices"),  # of a later torch
    ("aten::_weight_int8pack_mm", (SQUARE, SQUARE.char()), "may multiply matrices"),
    ("aten::_sparse_addmm", (SQUARE, SQUARE), "may multiply matrices"),
    ("aten::upsample_bilinear2d_backward", (SQUARE, SQUARE), ""),
    ("aten::upsample_linear1d", (SQUARE,), ""),
    ("aten::linalg_vector_norm", (SQUARE,), ""),
    ("aten::lgamma", (SQUARE,), ""),
    ("aten::_cdist_forward", (SQUARE, SQUARE), "may multiply matrices"),
    ("aten::_trilinear", (SQUARE, SQUARE), "may multiply matrices"),
]


def test_why_an_operator_is_not_counted() -> None:
    """One of another namespace is not aten's."""
    for operator, arguments, words in WHY_NOT:
        why = why_not_counted(operator, arguments)
        assert words in why if words else not why
        assert operator == "aten::mm" or products_of(operator, arguments, SQUARE) == []


SIZES: dict[str, Callable[[], tuple[str, tuple[Any, ...], Any, int]]] = {
    "vector": lambda: ("aten::mv", (torch.zeros(5, 7), torch.zeros(7)), None, 5 * 7),
    "rows in groups": lambda: ("aten::_grouped_mm", (torch.zeros(10, 4), torch.zeros(3, 4, 6)), None, 10 * 4 * 6),
    "sums in groups": lambda: ("aten::_grouped_mm", (torch.zeros(4, 10), torch.zeros(10, 6)), None, 4 * 10 * 6),
    "a matrix for each": lambda: (
        "aten::_grouped_mm", (torch.zeros(3, 5, 4), torch.zeros(3, 4, 6)), None, 3 * 5 * 4 * 6
    ),
    "_scaled_mm_v2": lambda: ("aten::_scaled_mm_v2", (torch.zeros(5, 7), torch.zeros(7, 3), [], []), None, 5 * 7 * 3),
    "_scaled_grouped_mm_v2": lambda: (
        "aten::_scaled_grouped_mm_v2", (torch.zeros(10, 4), torch.zeros(3, 4, 6), [], []), None, 10 * 4 * 6
    ),
    "flash-attn 3": lambda: (
        "flash_attn_3::_flash_attn_forward", (*[torch.zeros(2, 5, 3, 8)] * 3, None), None, 2 * 2 * 3 * 5 * 5 * 8
    ),
    "a sum of two products, of torch.compile": lambda: (
        "inductor::_mm_plus_mm", (*[torch.zeros(5, 7), torch.zeros(7, 3)] * 2,), None, 2 * 5 * 7 * 3
    ),
    "cuDNN's LSTM": lambda: (
        "aten::_cudnn_rnn",
        (torch.zeros(5, 3, 8), [torch.zeros(16, 8), torch.zeros(16, 4), torch.zeros(16)], 4, None, []),
        None,
        15 * 16 * (8 + 4),
    ),
    "cuDNN's LSTM, backward": lambda: (
        "aten::_cudnn_rnn_backward",
        (torch.zeros(5, 3, 8), [torch.zeros(16, 8), torch.zeros(16, 4)], 2, [True, True, True, True]),
        None,
        2 * 15 * 16 * (8 + 4),
    ),
    "cuDNN's LSTM, backward, frozen": lambda: (
        "aten::_cudnn_rnn_backward",
        (torch.zeros(5, 3, 8), [torch.zeros(16, 8), torch.zeros(16, 4)], 2, [True, True, True, False]),
        None,
        15 * 16 * (8 + 4),
    ),
    "torch's varlen": lambda: (
        "torch_attn::_varlen_attn",
        (*[torch.zeros(9, 3, 8)] * 3, torch.tensor([0, 4, 9]), torch.tensor([0, 4, 9]), 5, 5),
        None,
        2 * (16 + 25) * 3 * 8,
    ),
    "torch's varlen, backward": lambda: (
        "torch_attn::_varlen_attn_backward",
        (*[torch.zeros(9, 3, 8)] * 5, None, torch.tensor([0, 4, 9]), torch.tensor([0, 4, 9]), 5, 5),
        None,
        4 * (16 + 25) * 3 * 8,
    ),
}  # fmt: skip


def test_sizes_by_hand() -> None:
    for name in SIZES:
        operator, arguments, result, macs = SIZES[name]()
        assert sum(macs_of(product) for product in products_of(operator, arguments, result)) == macs
