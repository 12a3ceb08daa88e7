"""Shared by the tests of modules in each recipe: a step, inputs, and the products of a linear layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import transformer_engine.pytorch as te

ROWS = 320  # unlike any dimension of a weight


def run(module: Any, x: torch.Tensor, **keywords: Any) -> torch.Tensor:
    """The forward of any module: of half of the rows each, for two experts, or for sequences in a batch of two."""
    rows, columns = x.shape
    if isinstance(module, te.GroupedLinear):
        return module(x, [rows // 2, rows // 2], **keywords)
    in_sequence = isinstance(module, te.TransformerLayer | te.MultiheadAttention)
    return module(x.view(rows // 2, 2, columns) if in_sequence else x, **keywords)


def inputs(steps: int, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Inputs whose blocks are of very different sizes."""
    for index in range(steps):
        torch.manual_seed(index)
        sizes = 2.0 ** torch.randint(-8, 3, (ROWS, 1))
        yield (torch.randn(ROWS, 64) * sizes).to(dtype).requires_grad_()


def check_linear(recipe: Any, dtype: torch.dtype, writes: Sequence[Any], tolerance: float) -> None:
    """A linear layer multiplies what was quantized, up to the order of float32 sums and the rounding of the result.

    Args:
        recipe, dtype: of the layer.
        writes: receives what is quantized: input, weight and gradient, with ``source`` and ``numbers(columnwise)``,
            float64, the matrix or its transpose.
        tolerance: the error of sums, relative to the sum of magnitudes.
    """
    torch.manual_seed(0)
    module = te.Linear(64, 96, params_dtype=dtype)
    (x,) = inputs(1, dtype)
    with te.autocast(enabled=True, recipe=recipe):
        out = module(x)
    grad = torch.randn(ROWS, 96).to(dtype) * (2.0 ** torch.randint(-8, 3, (ROWS, 1))).to(dtype)
    out.backward(grad)
    for write, source in zip(writes, (x, module.weight, grad), strict=True):
        assert torch.equal(write.source, source)
    rows, weight, dy = (write.numbers(False) for write in writes)
    rows_t, weight_t, dy_t = (write.numbers(True) for write in writes)
    bias, wide = module.bias.detach().double(), grad.double()
    for actual, expected, bound in (
        (out, rows @ weight.t() + bias, rows.abs() @ weight.abs().t() + bias.abs()),
        (x.grad, dy @ weight_t.t(), dy.abs() @ weight_t.abs().t()),
        # Transforms along the rows that are summed over cancel.
        (module.weight.grad, dy_t @ rows_t.t(), dy_t.abs() @ rows_t.abs().t()),
        (module.bias.grad, wide.sum(0), wide.abs().sum(0)),
    ):
        rounding = torch.finfo(dtype).eps if dtype != torch.float32 else 0.0
        error = (actual.double() - expected).abs()
        assert bool((error <= tolerance * bound + rounding * expected.abs()).all()), error.max()
