"""Normalization of the reference extension, against float64 and torch's autograd."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from te_precision_callbacks.reference import extension as tex

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
KIND = {torch.float32: tex.DType.kFloat32, torch.bfloat16: tex.DType.kBFloat16, torch.float16: tex.DType.kFloat16}
EPS = 1e-5


def _close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_value_and_gradients(kind: str, dtype: torch.dtype, zero_centered: bool) -> None:
    torch.manual_seed(0)
    x = (torch.randn(4, 6, 96) * 3 + 1).to(dtype)
    weight, bias, grad = (torch.randn(shape).to(dtype) for shape in (96, 96, (4, 6, 96)))
    exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
    gamma = exact[1] + zero_centered
    rows = x.view(-1, 96)
    options: tuple[Any, ...] = (EPS, None, None, KIND[dtype], 0, zero_centered)
    if kind == "layernorm":
        out, mean, rsigma = tex.layernorm_fwd(x, weight, bias, *options)
        gradients = tex.layernorm_bwd(grad.view(-1, 96), rows, mean, rsigma, weight, 0, zero_centered)
        expected, variance = (
            F.layer_norm(exact[0], (96,), gamma, exact[2], EPS),
            rows.double().var(dim=1, unbiased=False),
        )
        assert mean.dtype == torch.float32
        _close(mean, rows.double().mean(dim=1), 1e-6)
    else:
        out, mean, rsigma = tex.rmsnorm_fwd(x, weight, *options)
        gradients = tex.rmsnorm_bwd(grad, x, rsigma, weight, 0, zero_centered)
        expected, variance = F.rms_norm(exact[0], (96,), gamma, EPS), rows.double().square().mean(dim=1)
        assert mean is None
    assert out.shape == x.shape
    expected.backward(grad.double())
    assert rsigma.dtype == torch.float32
    _close(rsigma, torch.rsqrt(variance + EPS), 1e-6)
    wanted = [expected.detach(), *(tensor.grad for tensor in exact)]
    for result, value in zip((out, *gradients), wanted, strict=False):  # RMSNorm has no bias
        assert result.dtype == dtype
        _close(result.view(value.shape), value, TOLERANCE[dtype])
    if kind == "rmsnorm":
        added, _ = tex.rmsnorm_bwd_add(grad, x, grad * 2, rsigma, weight, 0, zero_centered)
        _close(added, exact[0].grad + grad.double() * 2, TOLERANCE[dtype])
