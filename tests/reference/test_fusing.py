"""Rounding of what a GPU runs as one kernel: once, at the end."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from transformer_engine.pytorch import jit

from te_precision_callbacks.reference import extension as tex

KIND = {torch.bfloat16: tex.DType.kBFloat16, torch.float16: tex.DType.kFloat16}


def _at_most_one_rounding(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """``actual`` is off by half a unit in its last place, and by what float32 loses before that."""
    _, exponent = torch.frexp(exact.abs().clamp(min=torch.finfo(actual.dtype).tiny))
    half_a_unit = torch.ldexp(torch.full_like(exact, torch.finfo(actual.dtype).eps / 2), exponent - 1)
    assert bool(((actual.double() - exact).abs() <= half_a_unit + 1e-5).all())


def _x(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", KIND)
def test_bias_gelu_and_its_gradient(dtype: torch.dtype) -> None:
    x, bias, grad = _x(dtype, 64, 96), _x(dtype, 96), _x(dtype, 65, 96)[1:]
    out = jit.bias_gelu_fused(x, bias)
    before = (x.double() + bias.double()).requires_grad_()
    expected = F.gelu(before, approximate="tanh")
    expected.backward(grad.double())
    assert before.grad is not None
    assert out.dtype == dtype
    _at_most_one_rounding(out, expected.detach())
    of_bias, of_x = jit.bgrad_dgelu_fused(grad, x, bias)
    _at_most_one_rounding(of_x, before.grad)
    _at_most_one_rounding(of_bias, before.grad.sum(dim=0))
    _at_most_one_rounding(jit.bias_gelu_fused(x, None), F.gelu(x.double(), approximate="tanh"))


@pytest.mark.parametrize("dtype", KIND)
def test_bias_dropout_add(dtype: torch.dtype) -> None:
    x, bias, residual = (_x(dtype, rows, 96)[-32:] for rows in (33, 34, 35))
    x.requires_grad_()
    out = jit.bias_dropout_add_fused_train(x, bias[0], residual, 0.0)
    _at_most_one_rounding(out.detach(), x.detach().double() + bias[0].double() + residual.double())
    out.sum().backward()
    assert x.grad is not None
    assert x.grad.dtype == dtype
