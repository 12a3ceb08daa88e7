"""Amax, scale, and the update of delayed scaling in the reference extension, against rules worked out in float32."""

import math

import pytest
import torch

from te_precision_callbacks.base.numerics.scaling import amax_of, fp8_scale
from te_precision_callbacks.reference import extension as tex

INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1.0, -3.0, 2.0], 3.0),
        ([0.0, -0.0], 0.0),
        ([1.0, NAN, -2.0], 2.0),
        ([NAN, NAN], 0.0),
        ([1.0, -INF], INF),
        ([NAN, INF], INF),
        ([], 0.0),
    ],
)
def test_amax(values: list[float], expected: float, dtype: torch.dtype) -> None:
    amax = amax_of(torch.tensor(values, dtype=dtype))
    assert amax.dtype == torch.float32
    assert amax.shape == (1,)
    assert amax.item() == expected
    given = torch.full((1,), 9.0)
    tex.compute_amax(torch.tensor(values, dtype=dtype), given)
    assert given.item() == expected


@pytest.mark.parametrize("fp8_max", [448.0, 57344.0])
def test_scale_is_the_rounded_quotient(fp8_max: float) -> None:
    torch.manual_seed(0)
    amax = torch.cat([torch.rand(2000) * 10, torch.rand(500) * 1e-20, torch.rand(500) * 1e30])
    # A quotient of two 24-bit numbers is never so near the middle between two that rounding to float64 first does harm.
    expected = (fp8_max / amax.double()).float()
    assert torch.equal(fp8_scale(amax, fp8_max), expected)


def test_epsilon_is_a_floor_of_amax() -> None:
    amax = torch.tensor([0.0, 1e-3, 2.0, NAN])
    scale = fp8_scale(amax, 448.0, epsilon=0.5)
    assert scale.tolist() == [896.0, 896.0, 224.0, 1.0]


def _update(
    history: torch.Tensor, scale: torch.Tensor, reduced: list[float], algorithm: str = "max", margin: float = 0.0
) -> None:
    tex.fused_amax_and_scale_update_after_reduction(
        torch.tensor(reduced), [history], [scale], algorithm, tex.DType.kFloat8E4M3, margin
    )


def test_history_rolls_and_the_scale_follows_its_maximum() -> None:
    history = torch.tensor([[5.0, 0.5], [4.0, 1.0], [3.0, 2.0]])
    scale = torch.ones(2)
    _update(history, scale, [2.0, 0.25])
    # Row 0 is emptied for the next step, the newest amax goes to the end, and the old row 1 is what falls out next.
    assert history.tolist() == [[0.0, 0.0], [3.0, 2.0], [2.0, 0.25]]
    assert scale.tolist() == [448.0 / 4.0, 448.0 / 2.0]


def test_without_a_reduced_amax_row_0_counts() -> None:
    history, scale = torch.tensor([[2.0], [1.0]]), torch.ones(1)
    _update(history, scale, [0.0])
    assert history.tolist() == [[0.0], [2.0]]
    assert scale.tolist() == [224.0]


@pytest.mark.parametrize("amax", [INF, NAN])
def test_an_amax_that_is_not_finite_keeps_the_scale(amax: float) -> None:
    history, scale = torch.zeros(2, 1), torch.full((1,), 3.0)
    _update(history, scale, [amax], "most_recent")
    assert scale.tolist() == [3.0]
    last = history[1].item()
    assert last == amax or math.isnan(last)


@pytest.mark.parametrize("algorithm", ["max", "most_recent"])
@pytest.mark.parametrize("length", [1, 2, 5, 16])
def test_ten_steps_like_transformer_engines_own_python(algorithm: str, length: int) -> None:
    from transformer_engine.common.recipe import DelayedScaling
    from transformer_engine.pytorch.quantization import _amax_and_scale_update

    torch.manual_seed(0)
    history, scale = torch.zeros(length, 3), torch.ones(3)
    other_history, other_scale = history.clone(), scale.clone()
    recipe = DelayedScaling(amax_compute_algo=algorithm)
    for _ in range(10):
        amaxes = torch.rand(3) * 10
        history[0] = amaxes
        other_history[0] = amaxes
        _update(history, scale, amaxes.tolist(), algorithm)
        _amax_and_scale_update(other_history, other_scale, 448.0, recipe)
        assert torch.equal(history, other_history)
        # Transformer Engine's Python divides by way of a reciprocal: one unit in the last place.
        torch.testing.assert_close(scale, other_scale, rtol=2.0**-23, atol=0)
