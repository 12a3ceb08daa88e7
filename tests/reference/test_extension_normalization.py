"""Normalization of the reference extension, against float64 and torch's autograd."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from te_precision_callbacks.reference import extension as tex

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
KIND = {torch.float32: tex.DType.kFloat32, torch.bfloat16: tex.DType.kBFloat16, torch.float16: tex.DType.kFloat16}
EPS = 1e-5


def _inputs(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    x = (torch.randn(4, 6, 96) * 3 + 1).to(dtype)
    return x, torch.randn(96).to(dtype), torch.randn(96).to(dtype), torch.randn(4, 6, 96).to(dtype)


def _close(actual: torch.Tensor, expected: torch.Tensor | None, tolerance: float) -> None:
    assert expected is not None
    scale = float(expected.abs().max())
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_layernorm(dtype: torch.dtype, zero_centered: bool) -> None:
    x, weight, bias, grad = _inputs(dtype)
    out, mu, rsigma = tex.layernorm_fwd(x, weight, bias, EPS, None, None, KIND[dtype], 0, zero_centered)
    dx, dweight, dbias = tex.layernorm_bwd(grad.view(-1, 96), x.view(-1, 96), mu, rsigma, weight, 0, zero_centered)

    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    gamma = exact[1] + 1 if zero_centered else exact[1]
    expected = F.layer_norm(exact[0], (96,), gamma, exact[2], EPS)
    expected.backward(grad.double())
    rows = x.double().view(-1, 96)
    tolerance = TOLERANCE[dtype]
    assert out.dtype == dx.dtype == dweight.dtype == dbias.dtype == dtype
    assert mu.dtype == rsigma.dtype == torch.float32
    _close(out, expected.detach(), tolerance)
    _close(mu, rows.mean(dim=1), 1e-6)
    _close(rsigma, torch.rsqrt(rows.var(dim=1, unbiased=False) + EPS), 1e-6)
    _close(dx.view_as(x), exact[0].grad, tolerance)
    _close(dweight, exact[1].grad, tolerance)
    _close(dbias, exact[2].grad, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("zero_centered", [False, True])
def test_rmsnorm(dtype: torch.dtype, zero_centered: bool) -> None:
    x, weight, add, grad = *_inputs(dtype)[:2], _inputs(dtype)[3] * 2, _inputs(dtype)[3]
    out, none, rsigma = tex.rmsnorm_fwd(x, weight, EPS, None, None, KIND[dtype], 0, zero_centered)
    dx, dweight = tex.rmsnorm_bwd(grad, x, rsigma, weight, 0, zero_centered)
    dx_added, _ = tex.rmsnorm_bwd_add(grad, x, add, rsigma, weight, 0, zero_centered)

    exact = [tensor.double().requires_grad_() for tensor in (x, weight)]
    gamma = exact[1] + 1 if zero_centered else exact[1]
    expected = F.rms_norm(exact[0], (96,), gamma, EPS)
    expected.backward(grad.double())
    tolerance = TOLERANCE[dtype]
    assert none is None
    assert out.dtype == dx.dtype == dweight.dtype == dtype
    _close(out, expected.detach(), tolerance)
    _close(rsigma, torch.rsqrt(x.double().view(-1, 96).square().mean(dim=1) + EPS), 1e-6)
    _close(dx, exact[0].grad, tolerance)
    _close(dweight, exact[1].grad, tolerance)
    assert exact[0].grad is not None
    _close(dx_added, exact[0].grad + add.double(), tolerance)
