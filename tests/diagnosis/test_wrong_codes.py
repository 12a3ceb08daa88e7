"""Quantizers whose codes and scales do not fit their input, found by the squared error of real layers' tensors."""

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.diagnosis import Verdict
from tests.capability import stand_for
from tests.combinations import half
from tests.conftest import feature
from tests.diagnosis.planted import sgd, trained

pytestmark = pytest.mark.usefixtures("any_gpu")

TENSORS = ["activation", "weight", "gradient"]
STATISTICS = ["mse", "sqnr_db", "overflows%", "scale_inv_min", "scale_inv_max"]
CONFIG = {
    "amax": feature("LogTensorStats", ["all"], tensors=TENSORS, stats=["cur_amax"], freq=1),
    "codes": feature("LogFp8TensorStats", ["all"], tensors=TENSORS, stats=STATISTICS, freq=1),
}
"""Without LogGemmError."""

RECIPES: Mapping[str, tuple[Callable[[], Any], tuple[int, int]]] = {
    "delayed": (recipes.DelayedScaling, (9, 0)),
    "current": (recipes.Float8CurrentScaling, (9, 0)),
    "block": (recipes.Float8BlockScaling, (9, 0)),
    "mxfp8": (recipes.MXFP8BlockScaling, (10, 0)),
    "nvfp4": (recipes.NVFP4BlockScaling, (10, 0)),
}
FUNCTIONS = ("quantize", "bgrad_quantize")


@contextmanager
def quantizing(damage: Callable[[Any], None]) -> Iterator[None]:
    """Change the results of the extension's quantizing functions."""
    upstream = {name: getattr(tex, name) for name in FUNCTIONS}

    def wrap(function: Any) -> Any:
        def quantize(*arguments: Any, **keywords: Any) -> Any:
            result = function(*arguments, **keywords)
            damage(result[-1] if isinstance(result, (tuple, list)) else result)
            return result

        return quantize

    for name, function in upstream.items():
        setattr(tex, name, wrap(function))
    try:
        yield
    finally:
        for name, function in upstream.items():
            setattr(tex, name, function)


def scales_of(tensor: Any) -> Iterator[torch.Tensor]:
    for name in ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv"):
        scales = getattr(tensor, name, None)
        if scales is not None:
            yield scales


def round_up(tensor: Any) -> None:
    """Round scales to powers of two, away from 0; those of MXFP8 are powers of two, and become the next one."""
    for scales in scales_of(tensor):
        if scales.dtype == torch.float32:
            scales.copy_(2.0 ** (torch.log2(scales).floor() + 1))
        else:
            scales.add_(1)


def round_down(tensor: Any) -> None:
    for scales in scales_of(tensor):
        if scales.dtype == torch.float32:
            scales.copy_(2.0 ** torch.log2(0.999 * scales).floor())
        else:
            scales.sub_(1)


def train(
    folder: Path,
    recipe: str,
    net: torch.nn.Module,
    inputs: Callable[[int], torch.Tensor] = lambda step: torch.randn(64, 64),
    *,
    steps: int = 4,
    before: Callable[[int], object] = lambda step: None,
    **keywords: Any,
) -> Verdict:
    make, capability = RECIPES[recipe]
    stand_for(capability)

    def loss(step: int) -> torch.Tensor:
        before(step)
        if "is_first_microbatch" in keywords:
            keywords["is_first_microbatch"] = step == 0
        x = inputs(step).to(next(net.parameters()).dtype).requires_grad_()
        return net(x, **keywords).float().square().mean()

    options: dict[str, Any] = {"around": lambda _: te.autocast(recipe=make()), "logs": False, "strict": True}
    return trained(folder, net, sgd(net, 1e-2), steps=steps, loss=loss, config=CONFIG, **options)


def layers(dtype: torch.dtype = torch.bfloat16) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(te.Linear(64, 64, params_dtype=dtype), te.LayerNormMLP(64, 128, params_dtype=dtype))


def found(verdict: Verdict) -> dict[str, tuple[str, ...]]:
    return {finding.tensor: finding.layers for finding in verdict if finding.rule == "wrong-codes"}


@pytest.mark.parametrize(("recipe", "how"), half(["delayed", "current", "mxfp8"], [round_up, round_down]))
def test_scales_that_are_rounded_after_quantizing(recipe: str, how: Callable[[Any], None], tmp_path: Path) -> None:
    with quantizing(how):
        verdict = train(tmp_path, recipe, layers())
    assert {"weight", "activation"} <= found(verdict).keys()
    assert all(finding.severity == "error" for finding in verdict if finding.rule == "wrong-codes")


@pytest.mark.parametrize("recipe", ["delayed", "current", "mxfp8"])
def test_a_cached_weight_with_a_newer_scale(recipe: str, tmp_path: Path) -> None:
    """An element grows to eight times the amax, and the codes of its block or tensor get its scale."""
    net: Any = te.Linear(64, 64, params_dtype=torch.bfloat16)

    def renew(step: int) -> None:
        if step == 2:
            (cached,) = net._fp8_workspaces.values()
            with torch.no_grad():
                net.weight[0, 0] = 8 * net.weight.abs().amax()
            for scales in scales_of(cached):
                if scales.dtype == torch.float32:
                    scales.mul_(8)
                else:
                    scales[0, 0] += 3

    verdict = train(tmp_path, recipe, net, before=renew, is_first_microbatch=True)
    assert found(verdict) == {"weight": ("linear",)}
    (finding,) = (finding for finding in verdict if finding.rule == "wrong-codes")
    assert finding.since == 2


def zero_codes(tensor: Any) -> None:
    for name in ("_data", "_rowwise_data", "_columnwise_data", "_transpose"):
        codes = getattr(tensor, name, None)
        if codes is not None:
            codes.zero_()


@pytest.mark.parametrize("recipe", ["current", "mxfp8", "nvfp4"])
def test_codes_that_are_zeros(recipe: str, tmp_path: Path) -> None:
    with quantizing(zero_codes):
        verdict = train(tmp_path, recipe, layers(), steps=2)
    assert {"weight", "activation"} <= found(verdict).keys()


def mixed(step: int) -> torch.Tensor:
    """Rows of zeros, of tiny values and of large ones; in step 1 all are 0, and in step 2 all are tiny."""
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
    x[:16] = 0
    x[16:32] *= 1e-30
    x[32:40] *= 1e4
    return x * (1.0, 0.0, 1e-20, 1e-4)[step % 4]


def between_values(step: int) -> torch.Tensor:
    """Equal elements halfway between two values of E4M3, with the largest relative error of rounding."""
    x = torch.full((64, 64), 1.0625)
    x[0] = 448.0
    return x


INPUTS = {
    "normal": lambda step: torch.randn(64, 64),
    "heavy tails": lambda step: torch.randn(64, 64) * torch.randn(64, 64).mul(3).exp(),
    "growing": lambda step: torch.randn(64, 64) * 4.0**step,
    "zeros and tiny values": mixed,
    "halfway": between_values,
}


@pytest.mark.few
@pytest.mark.parametrize(("recipe", "inputs"), itertools.product(RECIPES, INPUTS))
def test_healthy_quantizers(recipe: str, inputs: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    dtype = torch.float32 if recipe in ("current", "block") else torch.bfloat16
    net = torch.nn.Sequential(te.LayerNormLinear(64, 64, params_dtype=dtype), te.Linear(64, 64, params_dtype=dtype))
    if inputs == "halfway":
        net = torch.nn.Sequential(te.Linear(64, 64, params_dtype=dtype))
    verdict = train(tmp_path, recipe, net, INPUTS[inputs])
    assert not found(verdict)
    assert "wrong-codes" in verdict.checked


def test_inf_and_nan_are_no_evidence(tmp_path: Path) -> None:
    def broken(step: int) -> torch.Tensor:
        x = torch.randn(64, 64)
        x[3, step] = (torch.inf, torch.nan, 1.0, 1.0)[step]
        return x

    for recipe in ("current", "mxfp8", "nvfp4"):
        assert not found(train(tmp_path / recipe, recipe, layers(), broken, steps=3))


def test_what_is_not_collected_is_not_checked(tmp_path: Path) -> None:
    verdict = trained(tmp_path, te.Linear(32, 32), steps=4)
    (unchecked,) = (rule for rule in verdict.not_checked if rule.rule == "wrong-codes")
    assert "[mse, sqnr_db," in unchecked.collect
