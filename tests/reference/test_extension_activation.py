"""Activations of the reference extension, against float64 and torch's autograd."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from transformer_engine.pytorch import jit

from te_precision_callbacks.reference import extension as tex

Function = Callable[[torch.Tensor], torch.Tensor]


def _gate(act: Function) -> Function:
    def gated(x: torch.Tensor) -> torch.Tensor:
        first, second = x.chunk(2, dim=-1)
        return act(first) * second

    return gated


_gelu = partial(F.gelu, approximate="tanh")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("name", "gradient", "function"), ACTIVATIONS, ids=[name for name, _, _ in ACTIVATIONS])
def test_value_and_gradient(name: str, gradient: str, function: Function, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = (torch.randn(3, 8, 64) * 4).to(dtype)
    value = getattr(tex, name)(x, None)
    grad = torch.randn(value.shape).to(dtype)
    dx = getattr(tex, gradient)(grad, x, None)

    exact = x.double().requires_grad_()
    expected = function(exact)
    (expected_dx,) = torch.autograd.grad(expected, exact, grad.double())
    tolerance = TOLERANCE[dtype]
    assert value.dtype == dx.dtype == dtype
    assert dx.shape == x.shape
    torch.testing.assert_close(value.double(), expected.detach(), rtol=tolerance, atol=tolerance)
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
    backward = {"clamped_swiglu": "clamped_dswiglu"}.get(name, f"d{name}")
    x = torch.tensor([[torch.nan, -1.0, -1.0, 2.0, *[1.0] * 4 * name.endswith("glu")]])
    value = getattr(tex, name)(x, None)
    grad = getattr(tex, backward)(torch.tensor([[1.0, torch.inf, 1.0, 1.0]]), x, None)
    assert grad[0, 0] == 0
    if name == "clamped_swiglu":
        assert value.isfinite().all(), "NaN becomes the limit"
    else:
        assert value[0, 0] == 0
        assert grad[0, 1].isnan()
        assert grad[0, 2] == 0


# --- what a GPU runs as one kernel is rounded once, at the end --------------------------------------------------------


def _at_most_one_rounding(actual: torch.Tensor, exact: torch.Tensor) -> None:
    """``actual`` is off by half a unit in its last place, and by what float32 loses before that."""
    _, exponent = torch.frexp(exact.abs().clamp(min=torch.finfo(actual.dtype).tiny))
    half_a_unit = torch.ldexp(torch.full_like(exact, torch.finfo(actual.dtype).eps / 2), exponent - 1)
    assert bool(((actual.double() - exact).abs() <= half_a_unit + 1e-5).all())


def _x(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_gelu_and_its_gradient(dtype: torch.dtype) -> None:
    x, bias, grad = _x(dtype, 64, 96), _x(dtype, 96), _x(dtype, 65, 96)[1:]
    out = jit.bias_gelu_fused(x, bias)
    before = (x.double() + bias.double()).requires_grad_()
    expected = _gelu(before)
    expected.backward(grad.double())
    assert out.dtype == dtype
    _at_most_one_rounding(out, expected.detach())
    of_bias, of_x = jit.bgrad_dgelu_fused(grad, x, bias)
    _at_most_one_rounding(of_x, before.grad)
    _at_most_one_rounding(of_bias, before.grad.sum(dim=0))
    _at_most_one_rounding(jit.bias_gelu_fused(x, None), _gelu(x.double()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_dropout_add(dtype: torch.dtype) -> None:
    x, bias, residual = (_x(dtype, rows, 96)[-32:] for rows in (33, 34, 35))
    x.requires_grad_()
    out = jit.bias_dropout_add_fused_train(x, bias[0], residual, 0.0)
    _at_most_one_rounding(out.detach(), x.detach().double() + bias[0].double() + residual.double())
    out.sum().backward()
    assert x.grad.dtype == dtype
