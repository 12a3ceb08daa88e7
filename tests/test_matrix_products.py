"""The sizes of the matrix products that torch's operators compute, against torch's own counter and by hand."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from te_precision_callbacks.matrix_products import MatrixProduct, is_product, products_of


class Products(TorchDispatchMode):
    """The products of all operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[MatrixProduct] = []

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Sequence[Any] = (), keywords: Any = None) -> Any:
        result = operator(*arguments, **(keywords or {}))
        self.found += products_of(operator._schema.name.rpartition("::")[2], arguments, result)
        return result


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
    "transposed": lambda: functional.conv_transpose2d(ones(2, 4, 5, 5), ones(4, 6, 3, 3), stride=2),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_the_multiply_adds_are_those_of_torchs_own_counter(name: str) -> None:
    products, counted = run(COMPUTED[name])
    assert sum(product.macs for product in products) == counted > 0
    assert len(products) == 3, "the forward, and a product for each of two gradients"


def test_the_sizes_of_a_linear_layer_and_of_its_gradients() -> None:
    products, _ = run(COMPUTED["linear"])
    assert [product[2:6] for product in products] == [(8, 3, 7, 1), (8, 7, 3, 1), (3, 7, 8, 1)]


def test_a_convolution_in_groups() -> None:
    """By its definition: each of the results is a sum over a kernel and the channels of its group."""
    results, kernel, channels = 2 * 6 * 7 * 7, 3 * 3, 4 // 2
    products, _ = run(lambda: functional.conv2d(ones(2, 4, 9, 9), ones(6, 2, 3, 3), groups=2))
    assert [product.macs for product in products] == 3 * [results * kernel * channels]
    assert [product.role for product in products] == ["fprop", "dgrad", "wgrad"]


def test_a_frozen_weight_has_no_wgrad() -> None:
    frozen = torch.ones(6, 4, 3, 3)
    products, _ = run(lambda: functional.conv2d(ones(2, 4, 9, 9), frozen))
    assert [product.role for product in products] == ["fprop", "dgrad"]


@pytest.mark.parametrize("causal", [False, True])
def test_fused_attention(causal: bool) -> None:
    """What its definition multiplies: two products forward, two for each of them backward."""
    batch, heads, rows, columns, size = 2, 3, 5, 5 if causal else 7, 8

    def compute() -> torch.Tensor:
        query, key = ones(batch, heads, rows, size), ones(batch, heads, columns, size)
        return functional.scaled_dot_product_attention(query, key, ones(batch, heads, columns, size), is_causal=causal)

    products, _ = run(compute)
    one = batch * heads * rows * columns * size
    assert [(product.role, product.macs) for product in products] == [
        ("qk", one), ("pv", one), ("pv", one), ("pv", one), ("qk", one), ("qk", one)
    ]  # fmt: skip
    assert products[0][2:6] == (rows, columns, size, batch * heads)
    assert products[1][2:6] == (rows, size, columns, batch * heads)


def test_attention_over_sequences_of_different_lengths() -> None:
    query, bounds = torch.zeros(1, 9, 3, 8), torch.tensor([0, 4, 9])
    given = (query, query, query, None, bounds, bounds, 5, 5, 0.0, 0)
    products = products_of("_efficient_attention_forward", given, query)
    assert [product[2:6] for product in products] == [(9, 9, 8, 3), (9, 8, 9, 3)], "the lengths are on the device"
    found = [sizes for product in products for sizes in product.bounds.sizes(product[2:6], [0, 4, 9], [0, 3, 9])]
    assert found == [(4, 3, 8, 3), (5, 6, 8, 3), (4, 8, 3, 3), (5, 8, 6, 3)]


def test_the_backward_of_attention_over_sequences_of_different_lengths() -> None:
    query, bounds = torch.zeros(1, 9, 3, 8), torch.tensor([0, 4, 9])
    given = (query, query, query, query, None, query, bounds, bounds)
    of_first = [
        product.bounds.sizes(product[2:6], [0, 4, 9], [0, 3, 9])[0]
        for product in products_of("_efficient_attention_backward", given, None)
    ]
    assert of_first == [(4, 3, 8, 3), (3, 8, 4, 3), (4, 8, 3, 3), (3, 8, 4, 3)]


@pytest.mark.parametrize(
    ("left", "right", "multiply_adds"),
    [((10, 4), (3, 4, 6), 10 * 4 * 6), ((4, 10), (10, 6), 4 * 10 * 6), ((3, 5, 4), (3, 4, 6), 3 * 5 * 4 * 6)],
    ids=["rows in groups", "sums in groups", "a matrix for each"],
)
def test_grouped_products(left: tuple[int, ...], right: tuple[int, ...], multiply_adds: int) -> None:
    [product] = products_of("_grouped_mm", (torch.zeros(left), torch.zeros(right)), None)
    assert product.macs == multiply_adds


def test_what_multiplies_no_matrices() -> None:
    assert not is_product("mul")
    assert products_of("mul", (ones(2, 2), ones(2, 2)), ones(2, 2)) == []
    [lookup] = products_of("embedding", (torch.zeros(9, 4), torch.zeros(2, 3, dtype=torch.int64)), None)
    assert (lookup.role, lookup.macs, lookup.n, lookup.m) == ("lookup", 0, 6, 4)


def test_vectors() -> None:
    [product] = products_of("mv", (torch.zeros(5, 7), torch.zeros(7)), None)
    assert product[2:6] == (5, 1, 7, math.prod(()))
