"""Activations, normalization, attention, scaling and lists of tensors of the reference extension, against float64,
torch, and Transformer Engine's own Python."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformer_engine.pytorch as te
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import jit
from transformer_engine.pytorch.attention.rope import RotaryPositionEmbedding, apply_rotary_pos_emb
from transformer_engine.pytorch.quantization import _amax_and_scale_update

from te_precision_callbacks.base.numerics.scaling import amax_of, fp8_scale
from te_precision_callbacks.reference import extension as tex
from te_precision_callbacks.reference.errors import MissingFunctionError
from tests.combinations import pairs

# --- activations ------------------------------------------------------------------------------------------------------


Function = Callable[[torch.Tensor], torch.Tensor]


def _gate(act: Function) -> Function:
    return lambda x: act(x.chunk(2, dim=-1)[0]) * x.chunk(2, dim=-1)[1]


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


@pytest.mark.parametrize(("name", "gradient", "function"), ACTIVATIONS, ids=[name for name, _, _ in ACTIVATIONS])
def test_value_and_gradient(name: str, gradient: str, function: Function) -> None:
    for dtype in [torch.float32, torch.bfloat16, torch.float16]:
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


def test_bias_gradient_is_the_sum_over_rows() -> None:
    for name in ["gelu", "silu", "relu", "qgelu", "srelu"]:
        torch.manual_seed(0)
        x, grad = torch.randn(3, 8, 64), torch.randn(3, 8, 64)
        bias_grad, dx = getattr(tex, f"dbias_d{name}")(grad, x, None)
        assert torch.equal(dx, getattr(tex, f"d{name}")(grad, x, None))
        torch.testing.assert_close(bias_grad.double(), dx.double().sum(dim=(0, 1)), rtol=1e-6, atol=1e-5)


def test_nan_and_infinity_are_what_upstreams_comparisons_make_of_them() -> None:
    """common/util/math.h: NaN is not above 0, so it becomes 0; 0 times an infinite gradient is NaN."""
    for name in ["relu", "srelu", "reglu", "sreglu", "clamped_swiglu"]:
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


# --- fused functions: one kernel on a GPU, rounded once, at the end ---------------------------------------------------


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


# --- normalization ----------------------------------------------------------------------------------------------------


NORM_ROUNDING = {torch.float32: 1e-5, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-9}
KIND = {torch.float32: tex.DType.kFloat32, torch.bfloat16: tex.DType.kBFloat16, torch.float16: tex.DType.kFloat16}
NORM_EPS = 1e-5


def _close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    torch.testing.assert_close(actual.double(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max()))


@pytest.mark.parametrize("kind", ["layernorm", "rmsnorm"])
def test_norms_and_their_gradients_equal_float64(kind: str) -> None:
    for zero_centered in [False, True]:
        for dtype in NORM_ROUNDING:
            torch.manual_seed(0)
            x = (torch.randn(4, 6, 96) * 3 + 1).to(dtype)
            weight, bias, grad = (torch.randn(shape).to(dtype) for shape in (96, 96, (4, 6, 96)))
            exact = [tensor.double().requires_grad_() for tensor in (x, weight, bias)]
            gamma = exact[1] + zero_centered
            rows = x.view(-1, 96)
            options: tuple[Any, ...] = (NORM_EPS, None, None, KIND[dtype], 0, zero_centered)
            if kind == "layernorm":
                out, mean, rsigma = tex.layernorm_fwd(x, weight, bias, *options)
                gradients = tex.layernorm_bwd(grad.view(-1, 96), rows, mean, rsigma, weight, 0, zero_centered)
                expected, variance = (
                    F.layer_norm(exact[0], (96,), gamma, exact[2], NORM_EPS),
                    rows.double().var(dim=1, unbiased=False),
                )
                assert mean.dtype == torch.float32
                _close(mean, rows.double().mean(dim=1), 1e-6)
            else:
                out, mean, rsigma = tex.rmsnorm_fwd(x, weight, *options)
                gradients = tex.rmsnorm_bwd(grad, x, rsigma, weight, 0, zero_centered)
                expected, variance = F.rms_norm(exact[0], (96,), gamma, NORM_EPS), rows.double().square().mean(dim=1)
                assert mean is None
            assert out.shape == x.shape
            expected.backward(grad.double())
            assert rsigma.dtype == torch.float32
            _close(rsigma, torch.rsqrt(variance + NORM_EPS), 1e-6)
            wanted = [expected.detach(), *(tensor.grad for tensor in exact)]
            for result, value in zip((out, *gradients), wanted, strict=False):  # RMSNorm has no bias
                assert result.dtype == dtype
                _close(result.view(value.shape), value, NORM_ROUNDING[dtype])
            if kind == "rmsnorm":
                added, _ = tex.rmsnorm_bwd_add(grad, x, grad * 2, rsigma, weight, 0, zero_centered)
                _close(added, exact[0].grad + grad.double() * 2, NORM_ROUNDING[dtype])


# --- softmax, padding -------------------------------------------------------------------------------------------------


ROUNDING = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
SCALE = 0.3


GENERATOR = torch.Generator().manual_seed(0)
MASK = (torch.rand(2, 1, 8, 16, generator=GENERATOR) > 0.5).index_fill(2, torch.tensor(2), True)  # all of some rows
CAUSAL = torch.ones(16, 16).triu(1).bool()
SOFTMAX: dict[str, tuple[str, tuple[int, ...], torch.Tensor | None, tuple[Any, ...]]] = {
    # name in the extension, shape, masked elements, arguments
    "plain": ("scaled_softmax", (2, 3, 8, 16), None, ()),
    "masked": ("scaled_masked_softmax", (2, 3, 8, 16), MASK, (MASK.to(torch.uint8),)),
    "masked alike": ("scaled_masked_softmax", (2, 3, 8, 16), MASK[:1], (MASK[:1].to(torch.uint8),)),
    "causal": ("scaled_upper_triang_masked_softmax", (6, 16, 16), CAUSAL, ()),
}


@pytest.mark.parametrize("name", SOFTMAX)
def test_softmax_and_its_gradient_equal_float64(name: str) -> None:
    for dtype in ROUNDING:
        kind, shape, masked, arguments = SOFTMAX[name]
        torch.manual_seed(0)
        scores = torch.randn(shape).to(dtype)
        value = getattr(tex, f"{kind}_forward")(scores, *arguments, SCALE)
        exact = scores.double() * SCALE
        if masked is not None:
            exact = exact.masked_fill(masked.expand(shape), float("-inf"))
        expected = torch.softmax(exact, dim=-1).nan_to_num(0.0)
        assert value.dtype == dtype
        torch.testing.assert_close(value.double(), expected, rtol=ROUNDING[dtype], atol=1e-6)

        grad = torch.randn(value.shape).to(dtype)
        y, dy = value.double(), grad.double()
        expected = SCALE * y * (dy - (dy * y).sum(dim=-1, keepdim=True))
        result = getattr(tex, f"{kind}_backward")(grad, value, SCALE)
        torch.testing.assert_close(result.double(), expected, rtol=ROUNDING[dtype], atol=1e-5)


@pytest.mark.parametrize("kind", ["p2p", "a2a", "all_gather"])
def test_context_parallelism_says_that_it_is_missing_and_what_to_use(kind: str) -> None:
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        attention = te.DotProductAttention(2, 16, qkv_format="bshd")
        attention.set_context_parallel_group(torch.distributed.new_group([0, 1]), [0, 1], None, kind)
        inputs = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
        with pytest.raises(MissingFunctionError, match=r"context parallelism.* data or tensor parallelism"):
            attention(inputs, inputs, inputs)
    finally:
        torch.distributed.destroy_process_group()


def test_tokens_to_padded_sequences_and_back() -> None:
    cu_seqlens = torch.tensor([0, 3, 3, 8], dtype=torch.int32)
    tokens = torch.randn(8, 2, 4)
    padded = tex.convert_thd_to_bshd(tokens, cu_seqlens, 3, 6)
    expected = torch.stack([F.pad(part, (0, 0, 0, 0, 0, 6 - len(part))) for part in tokens.split([3, 0, 5])])
    assert torch.equal(padded, expected)
    assert torch.equal(tex.convert_bshd_to_thd(padded, cu_seqlens, 8), tokens)
    assert not tex.convert_bshd_to_thd(padded, cu_seqlens, 10)[8:].any()


def test_padding_of_rows_and_back() -> None:
    rows, padded_rows = [3, 0, 5], [4, 0, 8]
    x = torch.randn(8, 6)
    padded = torch.full((12, 6), float("nan"))
    tex.fused_multi_row_padding(x, padded, rows, padded_rows)
    assert torch.equal(padded, torch.cat([x[:3], torch.zeros(1, 6), x[3:], torch.zeros(3, 6)]))
    back = torch.empty(8, 6)
    tex.fused_multi_row_unpadding(padded, back, padded_rows, rows)
    assert torch.equal(back, x)


# --- rotary position embedding ---------------------------------------------------------------------------------------

ROTATED = {torch.float32: 1e-6, torch.bfloat16: 2.0**-8}


def test_each_pair_is_multiplied_by_a_complex_number() -> None:
    x, freqs = torch.randn(6, 2, 3, 8), RotaryPositionEmbedding(8, interleaved=True)(6)
    out = tex.fused_rope_forward(x, freqs, None, tex.NVTE_QKV_Format.NVTE_SBHD, True, None, 1, 0)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (4, 2)))
    turn = torch.polar(torch.ones(6, 1, 1, 4, dtype=torch.float64), freqs.double()[..., ::2])
    torch.testing.assert_close(out.double(), torch.view_as_real(pairs * turn).flatten(-2), rtol=1e-6, atol=1e-6)


def test_like_transformer_engines_own_torch() -> None:
    for dtype, interleaved, rotated, layout, started in pairs(
        [torch.float32, torch.bfloat16], [False, True], [8, 16], ["sbhd", "bshd", "thd"], [False, True]
    ):
        torch.manual_seed(0)
        freqs = RotaryPositionEmbedding(rotated, interleaved=interleaved)(64)
        shape = {"sbhd": (8, 2, 3, 16), "bshd": (2, 8, 3, 16), "thd": (20, 3, 16)}[layout]
        cu_seqlens = torch.tensor([0, 8, 20]) if layout == "thd" else None
        starts = torch.tensor([3, 7]) if started else None
        grad = torch.randn(shape)
        results = []
        for fused, kind in [(True, dtype), (False, torch.float64)]:
            torch.manual_seed(1)
            x = torch.randn(shape).to(dtype).to(kind).requires_grad_()
            out = apply_rotary_pos_emb(
                x, freqs, layout, start_positions=starts, interleaved=interleaved, fused=fused, cu_seqlens=cu_seqlens
            )  # fmt: skip
            (of_x,) = torch.autograd.grad(out, x, grad.to(dtype).to(kind))
            results.append((out.detach().double(), of_x.double()))
        torch.testing.assert_close(*results, rtol=ROTATED[dtype], atol=ROTATED[dtype])


# --- amax and scale ---------------------------------------------------------------------------------------------------


INF, NAN = math.inf, math.nan


def test_amax_of_special_values() -> None:
    for values, expected in [
        ([1.0, -3.0, 2.0], 3.0),
        ([0.0, -0.0], 0.0),
        ([1.0, NAN, -2.0], 2.0),
        ([NAN, NAN], 0.0),
        ([1.0, -INF], INF),
        ([NAN, INF], INF),
        ([], 0.0),
    ]:
        for dtype in [torch.float32, torch.bfloat16, torch.float16]:
            amax = amax_of(torch.tensor(values, dtype=dtype))
            assert (amax.dtype, amax.tolist()) == (torch.float32, [expected])
            given = torch.full((1,), 9.0)
            tex.compute_amax(torch.tensor(values, dtype=dtype), given)
            assert given.item() == expected


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
def test_scale_is_the_rounded_quotient(fp8_max: float) -> None:
    amax = torch.cat([torch.rand(2000) * 10, torch.rand(500) * 1e-20, torch.rand(500) * 1e30])
    # A quotient of two 24-bit numbers is never so near the middle between two that rounding to float64 first does harm.
    assert torch.equal(fp8_scale(amax, fp8_max), (fp8_max / amax.double()).float())


def test_epsilon_is_a_floor_of_amax() -> None:
    scale = fp8_scale(torch.tensor([0.0, 1e-3, 2.0, NAN]), 448.0, epsilon=0.5)
    assert scale.tolist() == [896.0, 896.0, 224.0, 1.0]


def _update(
    history: torch.Tensor, scale: torch.Tensor, reduced: list[float], algorithm: str = "max", margin: float = 0.0
) -> None:
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor(reduced), [history], [scale], algorithm, tex.DType.kFloat8E4M3, margin
    )


@pytest.mark.parametrize(
    ("before", "reduced", "after", "scales"),
    [
        # Row 0 is emptied for the next step, the newest amax goes to the end, and the old row 1 is what falls out next.
        (
            [[5.0, 0.5], [4.0, 1.0], [3.0, 2.0]],
            [2.0, 0.25],
            [[0.0, 0.0], [3.0, 2.0], [2.0, 0.25]],
            [448.0 / 4.0, 448.0 / 2.0],
        ),
        # Without a reduced amax, row 0 counts.
        ([[2.0], [1.0]], [0.0], [[0.0], [2.0]], [224.0]),
    ],
)
def test_history_rolls_and_the_scale_follows_its_maximum(
    before: list[list[float]], reduced: list[float], after: list[list[float]], scales: list[float]
) -> None:
    history, scale = torch.tensor(before), torch.ones(len(scales))
    _update(history, scale, reduced)
    assert (history.tolist(), scale.tolist()) == (after, scales)


@pytest.mark.parametrize("amax", [INF, NAN])
def test_an_amax_that_is_not_finite_keeps_the_scale(amax: float) -> None:
    history, scale = torch.zeros(2, 1), torch.full((1,), 3.0)
    _update(history, scale, [amax], "most_recent")
    assert scale.tolist() == [3.0]
    assert history[1].item() == pytest.approx(amax, nan_ok=True)


def test_ten_steps_like_transformer_engines_own_python() -> None:
    for length in [1, 2, 5, 16]:
        for algorithm in ["max", "most_recent"]:
            torch.manual_seed(0)
            history, scale = torch.zeros(length, 3), torch.ones(3)
            other_history, other_scale = history.clone(), scale.clone()
            recipe = DelayedScaling(amax_compute_algo=algorithm)
            for _ in range(10):
                amaxes = torch.rand(3) * 10
                history[0] = other_history[0] = amaxes
                _update(history, scale, amaxes.tolist(), algorithm)
                _amax_and_scale_update(other_history, other_scale, 448.0, recipe)
                assert torch.equal(history, other_history)
                # Transformer Engine's Python divides by way of a reciprocal: one unit in the last place.
                torch.testing.assert_close(scale, other_scale, rtol=2.0**-23, atol=0)


# --- lists of tensors, optimizers -------------------------------------------------------------------------------------


LR, BETA1, BETA2, EPS, DECAY = 1e-2, 0.9, 0.99, 1e-8, 0.1
SHAPES = [(7,), (3, 5), (2, 3, 4)]
CHUNK, FLAG = 2048, torch.zeros(1, dtype=torch.int32)


def _tensors(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    return [torch.randn(shape).to(dtype) for shape in SHAPES]


def _zeros(dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.zeros(shape, dtype=dtype) for shape in SHAPES]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_scaled_tensors(dtype: torch.dtype) -> None:
    source, target, flag = _tensors(0, dtype), _zeros(), FLAG.clone()
    tex.multi_tensor_scale(CHUNK, flag, [source, target], 0.3)
    assert all(torch.equal(a.float() * 0.3, b) for a, b in zip(source, target, strict=True))
    assert flag.item() == 0
    source[1][0, 0] = float("inf")
    tex.multi_tensor_scale(CHUNK, flag, [source, target], 0.3)
    assert flag.item() == 1
    assert target[1][0, 0] == float("inf")


def test_norms_of_tensors() -> None:
    tensors = _tensors(0)
    item = torch.stack([tensor.double().norm() for tensor in tensors])
    norm, norms = tex.multi_tensor_l2norm(CHUNK, FLAG, [tensors], True)
    torch.testing.assert_close((norm.double(), norms.double()), (item.norm().reshape(1), item), rtol=1e-6, atol=0)
    assert tex.multi_tensor_l2norm(CHUNK, FLAG, [tensors])[1].numel() == 0


@pytest.mark.parametrize("mode", [0, 1])
def test_adam_steps_equal_torchs(mode: int) -> None:
    params = _tensors(0)
    expected = [torch.nn.Parameter(param.clone()) for param in params]
    optimizer = (torch.optim.Adam, torch.optim.AdamW)[mode](expected, LR, (BETA1, BETA2), EPS, DECAY)
    first, second = _zeros(), _zeros()
    for step in range(1, 6):
        grads = _tensors(step)
        for parameter, grad in zip(expected, grads, strict=True):
            parameter.grad = grad.clone()
        optimizer.step()
        tex.multi_tensor_adam(CHUNK, FLAG, [grads, params, first, second], LR, BETA1, BETA2, EPS, step, mode, 1, DECAY)
        torch.testing.assert_close(params, [parameter.detach() for parameter in expected], rtol=1e-6, atol=1e-6)


def test_adam_with_master_weights() -> None:
    master = _tensors(0)
    params, plain = [tensor.bfloat16() for tensor in master], [tensor.clone() for tensor in master]
    moments, plain_moments = (_zeros(), _zeros()), (_zeros(), _zeros())
    grads = _tensors(1)
    tex.multi_tensor_adam(CHUNK, FLAG, [grads, params, *moments, master], LR, BETA1, BETA2, EPS, 1, 1, 1, DECAY)
    tex.multi_tensor_adam(CHUNK, FLAG, [grads, plain, *plain_moments], LR, BETA1, BETA2, EPS, 1, 1, 1, DECAY)
    assert all(map(torch.equal, [*master, *params], [*plain, *(expected.bfloat16() for expected in plain)]))


def test_adam_of_fp8_parameters() -> None:
    master, plain = _tensors(0), _tensors(0)
    codes = [torch.zeros(shape, dtype=torch.uint8) for shape in SHAPES]
    scales, amaxes, inverses = ([torch.full((1,), value) for _ in SHAPES] for value in (16.0, 0.0, 0.0))
    grads = _tensors(1)
    tex.multi_tensor_adam_fp8(
        CHUNK, FLAG, [grads, codes, _zeros(), _zeros(), master, scales, amaxes, inverses],
        LR, BETA1, BETA2, EPS, 1, 1, 1, DECAY, tex.DType.kFloat8E4M3,
    )  # fmt: skip
    tex.multi_tensor_adam(CHUNK, FLAG, [grads, plain, _zeros(), _zeros()], LR, BETA1, BETA2, EPS, 1, 1, 1, DECAY)
    for index, expected in enumerate(plain):
        assert torch.equal(master[index], expected)
        assert torch.equal(codes[index], (expected * 16).to(torch.float8_e4m3fn).view(torch.uint8))
        assert amaxes[index].item() == expected.abs().max().item()
        assert inverses[index].item() == 1 / 16


def test_sgd_steps_equal_torchs() -> None:
    """Weight decay after the momentum is not in the momentum's sum."""
    for momentum, nesterov in [(0.0, False), (0.9, False), (0.9, True)]:
        for decays_after in [False, True]:
            params, velocity = _tensors(0), _zeros()
            copies = _zeros(torch.float16)
            expected = [torch.nn.Parameter(param.clone()) for param in params]
            decay = 0.0 if decays_after else DECAY
            optimizer = torch.optim.SGD(expected, LR, momentum, weight_decay=decay, nesterov=nesterov)
            for step in range(4):
                grads = _tensors(step + 1)
                for parameter, grad in zip(expected, grads, strict=True):
                    parameter.grad = grad.clone()
                before = [parameter.detach().clone() for parameter in expected]
                optimizer.step()
                if decays_after:
                    torch._foreach_add_([parameter.data for parameter in expected], before, alpha=-LR * DECAY)
                tex.multi_tensor_sgd(
                    CHUNK, FLAG, [[g * 8 for g in grads], params, velocity, copies], DECAY, momentum, 0.0, LR, nesterov,
                    step == 0, decays_after, 0.125,
                )  # fmt: skip
                torch.testing.assert_close(params, [parameter.detach() for parameter in expected], rtol=1e-6, atol=1e-6)
                assert all(map(torch.equal, copies, [parameter.half() for parameter in params]))


def test_indices_of_scales_are_those_of_the_headers() -> None:
    """``common/include/transformer_engine/transformer_engine.h`` numbers input, weight and output of three GEMMs."""
    assert list(tex.FP8FwdTensors.__members__.values()) == list(range(9))
    assert list(tex.FP8BwdTensors.__members__.values()) == list(range(6))
