"""Products of a backward's backward, and of a backward that computes its forward again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.coverage.coverage import Coverage
from te_precision_callbacks.session import InspectSession

ROWS, INPUTS, INNER, OUTPUTS = 16, 64, 32, 8
FIRST, SECOND = ROWS * INPUTS * INNER, ROWS * INNER * OUTPUTS
"""The multiply-adds of a product of each layer."""


def coverage_of(net: torch.nn.Module, loss: Callable[[Any, torch.Tensor], torch.Tensor], folder: Path) -> Coverage:
    with InspectSession(None, model=net, log_dir=folder, records="off", strict=True) as session:
        loss(net, torch.randn(ROWS, INPUTS, requires_grad=True)).backward()
        session.step()
    return session.coverage()


def macs(coverage: Coverage) -> dict[tuple[str, str], int]:
    found: Counter[tuple[str, str]] = Counter()
    for product in coverage:
        found[product.layer, product.gemm] += product.macs
    return dict(found)


def with_penalty(net: Any, x: torch.Tensor) -> torch.Tensor:
    result = net(x).sum()
    (gradient,) = torch.autograd.grad(result, x, create_graph=True)
    total: torch.Tensor = result + gradient.pow(2).sum()
    return total


def test_a_gradient_penalty(tmp_path: Path) -> None:
    """By hand: the inner gradient has a dgrad of each layer. Its backward has two products for the first layer's, and
    one for the second layer's, whose gradient is a constant. The backward of the forward has a dgrad and a wgrad each.
    """
    net = torch.nn.Sequential(
        torch.nn.Linear(INPUTS, INNER), torch.nn.Tanh(), torch.nn.Linear(INNER, OUTPUTS, bias=False)
    )
    assert macs(coverage_of(net, with_penalty, tmp_path)) == {
        ("0", "fprop"): FIRST,
        ("0", "dgrad"): 3 * FIRST,
        ("0", "wgrad"): 2 * FIRST,
        ("2", "fprop"): SECOND,
        ("2", "dgrad"): 2 * SECOND,
        ("2", "wgrad"): 2 * SECOND,
    }


class Recomputing(torch.autograd.Function):
    """A linear layer and its activation, which is computed again in the backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.relu(x @ weight.t())

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        gradient = gradient * (x @ weight.t() > 0)
        return gradient @ weight, gradient.t() @ x


class Mine(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(INPUTS, INNER, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = Recomputing.apply(x, self.layer.weight)
        return result


def test_a_function_that_computes_its_product_again_in_its_backward(tmp_path: Path) -> None:
    coverage = coverage_of(Mine(), lambda net, x: net(x).sum(), tmp_path)
    assert macs(coverage) == {("layer", gemm): FIRST for gemm in ("fprop", "dgrad", "wgrad")}
    assert {product.why for product in coverage} == {"not a TE layer: Mine"}


def test_the_reason_of_a_compiled_model_names_the_class_of_the_layer(tmp_path: Path) -> None:
    net = torch.compile(torch.nn.Sequential(torch.nn.Linear(INPUTS, INNER), torch.nn.ReLU()), backend="aot_eager")
    coverage = coverage_of(net, lambda net, x: net(x).sum(), tmp_path)  # type: ignore[arg-type]
    assert {product.why for product in coverage if product.macs} == {"not a TE layer: torch.nn.Linear"}
