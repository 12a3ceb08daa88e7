"""Attention of packed sequences is counted by their lengths, which only the device has."""

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from te_precision_callbacks.coverage import matrix_products
from te_precision_callbacks.coverage.seen_products import ModelProducts
from tests.coverage.test_coverage import Net

HEADS, SIZE = 3, 8


@pytest.fixture(scope="module", autouse=True)
def _a_kernel_for_the_cpu() -> Iterator[None]:
    """torch has this operator on a GPU alone."""

    def forward(query: torch.Tensor, *given: Any, **keywords: Any) -> tuple[Any, ...]:
        number = torch.zeros((), dtype=torch.int64)
        return query.clone(), torch.zeros(1), number, number, 5, 5

    library = torch.library.Library("aten", "IMPL")
    library.impl("_efficient_attention_forward", forward, "CPU")
    yield
    library._destroy()


def counted(micro_batches: list[list[int]]) -> list[int]:
    bounds = torch.tensor([0, 4, 9], dtype=torch.int32)
    attend = torch.ops.aten._efficient_attention_forward
    model = Net(lambda _, query: attend(query, query, query, None, bounds, bounds, 5, 5, 0.0, 0)[0])
    products = ModelProducts(lambda *told: pytest.fail(str(told)), lambda: False, lambda: False)
    products.watch_model(model, {id(model): "model"}, ())
    with torch.enable_grad():
        for places in micro_batches:
            bounds.copy_(torch.tensor(places))  # as where a loader fills the same tensor again
            model(torch.zeros(1, places[-1], HEADS, SIZE))
    result = products.take_step()
    products.close()
    return [product.macs for product in result.kinds.products(result.parts)]  # type: ignore[union-attr]


def test_each_sequence_counts_with_its_length() -> None:
    assert counted([[0, 4, 9], [0, 1, 9]]) == [(4 * 4 + 5 * 5 + 1 * 1 + 8 * 8) * HEADS * SIZE] * 2


def test_in_a_capture_sequences_count_as_one_with_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Reading the lengths would end the capture."""
    monkeypatch.setattr(matrix_products, "is_capturing", lambda: True)
    matrix_products._warn_of_capture.cache_clear()
    with caplog.at_level(logging.WARNING):
        assert counted([[0, 4, 9], [0, 4, 9]]) == [2 * 9 * 9 * HEADS * SIZE] * 2
    assert caplog.text.count("count as one") == 1
