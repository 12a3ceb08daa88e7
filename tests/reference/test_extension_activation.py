"""Activations of the reference extension, against float64 and torch's autograd."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from te_precision_callbacks.reference import extension as tex

Function = Callable[[torch.Tensor], torch.Tensor]


def _gate(act: Function) -> Function:
    def gated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return act(first) * second

    return gated


def _gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: torch.Tensor) -> torch.Tensor:
    return F.relu(x) ** 2


def _clamped_swiglu(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    first = first.clamp(max=7.0)
    return first * torch.sigmoid(1.702 * first) * (second.clamp(-7.0, 7.0) + 1.0)


# name in the extension, name of the gradient, the function in torch
ACTIVATIONS: list[tuple[str, str, Function]] = [
    ("gelu", "dgelu", _gelu),
    ("qgelu", "dqgelu", _quick_gelu),
    ("relu", "drelu", F.relu),
    ("srelu", "dsrelu", _squared_relu),
    ("silu", "dsilu", F.silu),
    ("glu", "dglu", _gate(torch.sigmoid)),
    ("geglu", "dgeglu", _gate(_gelu)),
    ("qgeglu", "dqgeglu", _gate(_quick_gelu)),
    ("reglu", "dreglu", _gate(F.relu)),
    ("sreglu", "dsreglu", _gate(_squared_relu)),
    ("swiglu", "dswiglu", _gate(F.silu)),
    ("clamped_swiglu", "clamped_dswiglu", _clamped_swiglu),
]
TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}


def _expected(function: Function, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    exact = x.double().requires_grad_()
    value = function(exact)
    value.backward(grad.double())
    assert exact.grad is not None
    return value.detach(), exact.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "gradient", "function"), ACTIVATIONS, ids=[name for name, _, _ in ACTIVATIONS])
def test_value_and_gradient(name: str, gradient: str, function: Function, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 8, 64) * 4).to(dtype)
    value = getattr(tex, name)(x, None)
    grad = torch.randn(value.shape).to(dtype)
    dx = getattr(tex, gradient)(grad, x, None)

    expected, expected_dx = _expected(function, x, grad)
    tolerance = TOLERANCE[dtype]
    assert value.dtype == dx.dtype == dtype
    assert dx.shape == x.shape
    torch.testing.assert_close(value.double(), expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(dx.double(), expected_dx, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ["gelu", "silu", "relu", "qgelu", "srelu"])
def test_bias_gradient_is_the_sum_over_rows(name: str) -> None:
    torch.manual_seed(0)
    x, grad = torch.randn(3, 8, 64), torch.randn(3, 8, 64)
    bias_grad, dx = getattr(tex, f"dbias_d{name}")(grad, x, None)
    assert torch.equal(dx, getattr(tex, f"d{name}")(grad, x, None))
    torch.testing.assert_close(bias_grad.double(), dx.double().sum(dim=(0, 1)), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("name", ["relu", "srelu", "reglu", "sreglu", "clamped_swiglu"])
def test_nan_and_infinity_are_what_upstreams_comparisons_make_of_them(name: str) -> None:
    """common/util/math.h: NaN is not above 0, so it becomes 0; 0 times an infinite gradient is NaN."""
    nan, inf = float("nan"), float("inf")
    backward = {"clamped_swiglu": "clamped_dswiglu"}.get(name, f"d{name}")
    gated = name.endswith("glu")
    activated = torch.tensor([nan, -1.0, -1.0, 2.0])
    x = torch.cat([activated, torch.ones(4)])[None] if gated else activated[None]
    value = getattr(tex, name)(x, None)
    grad = getattr(tex, backward)(torch.tensor([[1.0, inf, 1.0, 1.0]]), x, None)[..., :4]
    if name == "clamped_swiglu":
        assert value.isfinite().all(), "NaN becomes the limit"
        assert grad[0, 0] == 0
    else:
        assert value[0, 0] == 0
        assert grad[0, 0] == 0
        assert grad[0, 1].isnan()
        assert grad[0, 2] == 0
