"""LogGemmError in a session, against whole products in float64 of what the extension was handed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.reference.extension.operands import operand
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.conftest import Keeper, feature
from tests.instrumentation.gemm_spy import GEMM_OF

BF16 = torch.bfloat16
RESULT = {"fprop": "output", "dgrad": "dgrad", "wgrad": "wgrad"}
RECIPES: Mapping[str, Callable[[], Any]] = {
    "delayed": recipes.DelayedScaling,
    "current": recipes.Float8CurrentScaling,
    "block": recipes.Float8BlockScaling,
    "mxfp8": recipes.MXFP8BlockScaling,
    "nvfp4": recipes.NVFP4BlockScaling,
    "nvfp4 without": lambda: recipes.NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True),
}
ROWS, INPUTS, OUTPUTS = 128, 192, 256


@pytest.fixture(autouse=True)
def any_gpu() -> Iterator[None]:
    with any_capability():
        yield


@contextmanager
def gemms() -> Iterator[list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]]:
    """The GEMMs that the extension was handed: the GEMM, decoded operands [n, k] and [m, k] and the result, float64."""
    found: list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]] = []
    upstream = tex.generic_gemm

    def decoded(tensor: Any, *, rowwise: bool) -> torch.Tensor:
        read = operand(tensor, rowwise=rowwise, name="A")
        whole = read.values.double()
        if read.part is not None:
            factors = read.part.factors() if read.part.amax is not None else None
            if factors is not None:
                whole = read.part.matrix().double()
                whole = whole.t() if read.part.transposed else whole
            elif read.scale_inv is not None:
                whole = whole * read.scale_inv
        return whole if rowwise else whole.t()

    def generic_gemm(a: Any, transa: bool, b: Any, transb: bool, *more: Any, **keywords: Any) -> Any:
        left, right = decoded(b, rowwise=not transb), decoded(a, rowwise=transa)
        result = upstream(a, transa, b, transb, *more, **keywords)
        found.append((GEMM_OF[transa, transb], left, right, result[0].double().reshape(left.shape[0], -1)))
        return result

    tex.generic_gemm = generic_gemm
    try:
        yield found
    finally:
        tex.generic_gemm = upstream


def config(**options: Any) -> dict[str, Any]:
    return {"s": feature("LogGemmError", ["all"], **{"gemms": ["fprop", "dgrad", "wgrad"], "freq": 1, **options})}


def session(net: torch.nn.Module, folder: Path, keeper: Keeper, observe: str, **options: Any) -> InspectSession:
    return InspectSession(
        config(**options),
        model=net,
        log_dir=folder,
        sinks=[keeper],
        observe=observe,
        strict=True,  # type: ignore[arg-type]
    )


def inputs(rows: int = ROWS, seed: int = 7) -> torch.Tensor:
    return torch.randn(rows, INPUTS, generator=torch.Generator().manual_seed(seed)).to(BF16).requires_grad_()


@pytest.mark.parametrize("observe", ["fused", "debug"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_each_cause_against_whole_products(recipe: str, observe: str, tmp_path: Path, keeper: Keeper) -> None:
    """The statistics are within the stated deviation of the numbers that they estimate."""
    stand_for((9, 0) if recipe in ("delayed", "current", "block") else (10, 0))
    torch.manual_seed(0)
    net = te.Linear(INPUTS, OUTPUTS, params_dtype=BF16, bias=False)
    x, grad = inputs(), torch.randn(ROWS, OUTPUTS, generator=torch.Generator().manual_seed(1)).to(BF16)
    with session(net, tmp_path, keeper, observe) as running, gemms() as seen:
        with te.autocast(enabled=True, recipe=RECIPES[recipe]()):
            out = net(x)
        out.backward(grad)
        running.step()
    weight = net.weight.detach().double()
    high = {
        "fprop": (x.detach().double(), weight),
        "dgrad": (grad.double(), weight.t()),
        "wgrad": (grad.double().t(), x.detach().double().t()),
    }
    assert [gemm for gemm, *_ in seen] == ["fprop", "dgrad", "wgrad"]
    for gemm, left, right, out in seen:
        value = {row.statistic: row.value for row in keeper.steps[0] if row.tensor == RESULT[gemm]}
        decoded, exact = left @ right.t(), high[gemm][0] @ high[gemm][1].t()
        assert value["gemm_kernel_ratio"] < 0.6
        assert value["gemm_kernel_rank_first"] == -1
        assert value["gemm_gain"] == pytest.approx(1, abs=2e-3)
        expected = {
            "gemm_kernel_error": (out - decoded).norm() / decoded.norm(),
            "gemm_format_error": (decoded - exact).norm() / exact.norm(),
            "gemm_error": (out - exact).norm() / exact.norm(),
        }
        transformed = recipe == "nvfp4" and gemm == "wgrad"
        if not transformed:
            expected["gemm_format_error_a"] = (right - high[gemm][1]).norm() / high[gemm][1].norm()
            expected["gemm_format_error_b"] = (left - high[gemm][0]).norm() / high[gemm][0].norm()
        for name, number in expected.items():
            assert value[name] == pytest.approx(number.item(), rel=0.15), name
        if transformed:
            for name in "ab":
                assert 0.08 < value[f"gemm_format_error_{name}"] < 0.16
        assert value["gemm_excess"] == pytest.approx(1, rel=0.15)
        for name in "ab":
            assert value[f"gemm_wrong_codes_{name}%"] == 0
            assert value[f"gemm_wrong_scales_{name}%"] == 0
            assert abs(value[f"gemm_rounding_bias_{name}"]) < 0.02
