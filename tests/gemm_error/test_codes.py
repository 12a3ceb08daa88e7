"""Codes and scales of Transformer Engine's quantizers, and of quantizers with a fault."""

import math
from typing import Any

import pytest
import torch

from te_precision_callbacks.base.numerics.formats import E2M1, E4M3
from te_precision_callbacks.base.numerics.layouts import packed, stored, unpacked
from te_precision_callbacks.gemm_error.codes import CodeCheck, check_codes, distance, rules_of
from tests.gemm_error.gemms import BF16, RECIPES, quantizer
from tests.replay.faults import QUANTIZER

ROWS, COLUMNS = 256, 512


def made(recipe: str, **which: bool) -> tuple[Any, torch.Tensor, Any]:
    torch.manual_seed(0)
    high = (torch.randn(ROWS, COLUMNS) * torch.randn(ROWS, COLUMNS).exp()).to(BF16)
    made_by = quantizer(recipe, **which)
    return made_by(high), high, made_by


def check(tensor: Any, high: torch.Tensor, made_by: Any, *, columnwise: bool, seed: int = 0) -> CodeCheck:
    rules = rules_of(made_by, columnwise=columnwise)
    return check_codes(stored(tensor, columnwise=columnwise), high, rules, seed, seed >> 20)


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("which", ["weight", "gradient"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_right_quantizer(recipe: str, which: str, columnwise: bool) -> None:
    tensor, high, made_by = made(recipe, **{which: True})
    for seed in (0, 1, 1 << 20):
        result = check(tensor, high, made_by, columnwise=columnwise, seed=seed)
        assert result.codes >= 32768
        assert (result.wrong, result.wrong_scales) == (0, 0)
        if "rht" not in recipe and recipe != "delayed":
            assert result.scales > 0
        stochastic = "stochastic" in recipe and which == "gradient"
        assert (result.rounded > 0) == stochastic
        if stochastic:
            assert abs(result.rounding_bias / result.rounded) < 0.01
            assert abs(result.rounded_to_0 - result.expected_0) / result.rounded < 0.01


@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("which", ["weight", "gradient"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_inf_and_nan_do_is_not_blamed_on_the_quantizer(
    recipe: str, value: float, which: str, columnwise: bool
) -> None:
    torch.manual_seed(0)
    high = torch.randn(ROWS, COLUMNS).to(BF16)
    high[3, 3] = value
    made_by = quantizer(recipe, **{which: True})
    result = check(made_by(high), high, made_by, columnwise=columnwise)
    assert (result.wrong, result.wrong_scales) == (0, 0)
    whole = check(
        made_by(high.nan_to_num(1.0, 1.0, 1.0)), high.nan_to_num(1.0, 1.0, 1.0), made_by, columnwise=columnwise
    )
    assert result.codes < whole.codes
    if whole.scales:
        assert result.scales < whole.scales
    if "nvfp4" in recipe and not math.isnan(value):
        assert (result.codes, result.scales) == (0, 0), "its amax is inf"
    else:
        assert result.codes > 0.9 * whole.codes
    if recipe in ("block", "mxfp8"):
        assert result.scales > 0.9 * whole.scales or which == "weight"


@pytest.mark.parametrize(
    ("fault", "share"), [("rounding always down", 0.2), ("all-zero codes", 0.4), ("scale off by 2^-1", 0.5)]
)
@pytest.mark.parametrize("recipe", ["current", "block", "mxfp8", "nvfp4", "nvfp4 rht stochastic"])
def test_a_quantizer_with_a_fault(recipe: str, fault: str, share: float) -> None:
    tensor, high, made_by = made(recipe, gradient=True)
    QUANTIZER[fault](tensor, high)
    result = check(tensor, high, made_by, columnwise=False)
    stochastic = "stochastic" in recipe
    if stochastic and fault == "rounding always down":
        assert result.wrong == 0
        assert result.rounding_bias / result.rounded < -0.2
        assert (result.rounded_to_0 - result.expected_0) / result.rounded > 0.05
    else:
        assert result.wrong / result.codes > (0.4 if stochastic else share)
    if fault.startswith("scale"):
        assert result.wrong_scales > 0.9 * result.scales > 0
    if stochastic and fault == "all-zero codes":
        assert result.rounding_bias / result.rounded < -0.5


def test_the_distance_of_neighbours() -> None:
    for number_format in (E2M1, E4M3):
        numbers = torch.tensor([number_format.value(code) for code in range(number_format.max_code + 1)]).double()
        middles = (numbers[1:] + numbers[:-1]) / 2
        assert torch.equal(distance(middles, number_format), numbers[1:] - numbers[:-1])
    assert torch.equal(unpacked(packed(torch.tensor([1, 2, 3, 4], dtype=torch.uint8))), torch.tensor([1, 2, 3, 4]))
