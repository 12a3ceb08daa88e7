"""Weights that exist in quantized form only, that modules gather themselves, or that have quantizers of other kinds."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from transformer_engine.pytorch import DType
from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer
from transformer_engine.pytorch.tensor.hybrid_tensor import HybridQuantizer
from transformer_engine.pytorch.tensor.identity_tensor import IdentityQuantizer

from te_precision_callbacks.diagnosis import Finding, Verdict
from te_precision_callbacks.session import InspectSession
from tests.capability import any_capability, stand_for
from tests.combinations import half
from tests.conftest import Keeper, feature, statistics
from tests.diagnosis.planted import trained
from tests.diagnosis.test_parameters import Masters
from tests.instrumentation.steps import stepped

RECIPES = {
    "current": Float8CurrentScaling,
    "delayed": DelayedScaling,
    "block": Float8BlockScaling,
    "mxfp8": MXFP8BlockScaling,
    "nvfp4": NVFP4BlockScaling,
}
WIDTH = 32


@pytest.fixture(autouse=True)
def blackwell() -> Iterator[None]:
    with any_capability():
        stand_for((10, 0))
        yield


class ShardedMasters(Masters):
    """Masters with a wrong gather into the weights: a shard arrives as zeros, or at another rank's place."""

    @torch.no_grad()
    def copy(self) -> None:
        super().copy()
        for weight, value in zip(self.weights, self.masters, strict=True):
            if self.copies == "zeroed":
                weight.copy_(torch.cat([value[: len(value) // 2], torch.zeros_like(value[len(value) // 2 :])]))
            elif self.copies == "wrong shard":
                weight.copy_(value.roll(len(value) // 2, 0))


def model(recipe: Any, *, quantized: bool = True) -> torch.nn.Sequential:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        return torch.nn.Sequential(
            *(te.Linear(WIDTH, WIDTH, bias=False, params_dtype=torch.bfloat16) for _ in range(2))
        )


def loss_of(net: torch.nn.Module) -> torch.Tensor:
    return net(torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16)).float().square().mean()


def frozen(folder: Path, net: torch.nn.Module, recipe: Any, **keywords: Any) -> tuple[Verdict, list[Finding]]:
    verdict = trained(
        folder,
        net,
        steps=10,
        loss=lambda step: loss_of(net),
        around=lambda step: te.autocast(enabled=True, recipe=recipe),
        config=statistics(tensors=["weight"], freq=100),
        **keywords,
    )
    return verdict, [finding for finding in verdict if finding.rule == "frozen-weight"]


COPIES = ("at once", "late", "never", "zeroed", "wrong shard")


@pytest.mark.few
@pytest.mark.parametrize(("name", "copies"), half(RECIPES, COPIES))
def test_planted_defects(tmp_path: Path, name: str, copies: str) -> None:
    recipe = RECIPES[name]()
    net = model(recipe)
    verdict, findings = frozen(tmp_path, net, recipe, optimizers=ShardedMasters(net, copies, lr=1e-3).optimizer)
    assert [(finding.severity, sorted(finding.layers)) for finding in findings] == (
        [("error", ["0", "1"])] * (copies != "at once")
    )
    assert all("by more than rounding" in finding.seen for finding in findings)
    assert "frozen-weight" in verdict.checked
    missing = "underflow and overflow in the weights of 2 layers, which exist only in quantized form"
    assert f"not observed: {missing}" in verdict.summary


class DistributedOptimizer:
    """The parts of Megatron's distributed optimizer that hold masters: each rank has a part of the flat weights."""

    def __init__(self, model: torch.nn.Module, copies: str) -> None:
        self.model_param_gbuf_map: dict[Any, range] = {}
        self.copies = copies
        for weight in model.parameters():
            part = range(weight.numel() // 4, 3 * weight.numel() // 4 - 5)
            whole: Any = weight
            flat = weight.detach().float().reshape(-1)
            whole.main_param = torch.nn.Parameter(flat[part.start : part.stop].clone())
            whole.main_param_sharded = True
            self.model_param_gbuf_map[weight] = part
        self.optimizer = torch.optim.Adam([weight.main_param for weight in self.model_param_gbuf_map], lr=1e-2)
        self.values = {weight: weight.detach().float() for weight in self.model_param_gbuf_map}

    def _get_model_param_range_map(self, param: torch.nn.Parameter) -> dict[str, range]:
        return {"param": self.model_param_gbuf_map[param]}

    @torch.no_grad()
    def step(self) -> None:
        for weight, part in self.model_param_gbuf_map.items():
            weight.main_param.grad = weight.grad.float().reshape(-1)[part.start : part.stop].clone()
            weight.grad = None
        before = [weight.main_param.detach().clone() for weight in self.model_param_gbuf_map]
        self.optimizer.step()
        for (weight, part), earlier in zip(self.model_param_gbuf_map.items(), before, strict=True):
            value = {"late": earlier, "zeroed": torch.zeros_like(earlier)}.get(self.copies, weight.main_param)
            value = value.roll(len(value) // 2) if self.copies == "wrong shard" else value
            self.values[weight].view(-1)[part.start : part.stop] = value
            if self.copies != "never":
                weight.copy_(self.values[weight])


@pytest.mark.few
@pytest.mark.parametrize(("name", "copies"), zip([None, *RECIPES], itertools.cycle(COPIES), strict=False))
def test_masters_of_parts_of_weights(tmp_path: Path, name: str | None, copies: str) -> None:
    recipe = RECIPES[name or "current"]()
    net = model(recipe, quantized=name is not None)
    _, findings = frozen(tmp_path, net, recipe, after=DistributedOptimizer(net, copies).step)
    assert [sorted(finding.layers) for finding in findings] == [["0", "1"]] * (copies != "at once")
    assert all("by more than rounding" in finding.seen for finding in findings)


@pytest.mark.few
@pytest.mark.parametrize("name", RECIPES)
@pytest.mark.parametrize("observe", ["fused", "debug"])
def test_statistics_are_of_the_dequantized_values(tmp_path: Path, keeper: Keeper, name: str, observe: Any) -> None:
    recipe = RECIPES[name]()
    net = model(recipe)
    config = {
        "plain": feature("LogTensorStats", ["all"], tensors=["weight"], stats=["max", "std"]),
        "fp8": feature("LogFp8TensorStats", ["all"], tensors=["weight"], stats=["scale_inv_max"]),
    }
    with InspectSession(config, model=net, log_dir=tmp_path, sinks=[keeper], observe=observe) as session:
        with te.autocast(enabled=True, recipe=recipe):
            loss = loss_of(net)
        loss.backward()
        values = net[0].weight.dequantize()
        session.step()
    assert keeper.values("max", "0", "weight")[0] == values.max()
    assert keeper.values("std", "0", "weight")[0] == pytest.approx(values.float().std().item(), rel=1e-5)
    assert keeper.values("scale_inv_max", "0", "weight")[0] > 0


@pytest.mark.parametrize("is_default", [True, False])
def test_statistics_that_they_lack_are_a_warning_unless_the_default_config_asks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_default: bool
) -> None:
    """The summary of the findings names these weights with any config."""
    recipe = Float8CurrentScaling()
    net = model(recipe)
    config = {"s": feature("LogFp8TensorStats", ["all"], tensors=["weight"], stats=["underflows%"], freq=1)}
    with InspectSession(None if is_default else config, model=net, log_dir=tmp_path, strict=is_default) as session:
        with te.autocast(enabled=True, recipe=recipe):
            loss = loss_of(net)
        loss.backward()
        session.step()
    warnings = [text for text in caplog.messages if "cannot be observed" in text]
    text = "underflows% of 0 weight cannot be observed: the tensor exists only in quantized form"
    assert [warning.startswith(text) for warning in warnings] == [True] * (not is_default)
    assert "underflow and overflow in the weights of 2 layers" in session.findings.summary


class Shard(torch.nn.Parameter):
    is_distributed_weight = True
    whole: torch.Tensor

    def materialize_group_for_forward(self) -> torch.Tensor:
        return self.whole

    materialize_group_for_backward = materialize_group_for_forward

    def finalize_group_grads(self, gradients: torch.Tensor) -> torch.Tensor:
        return gradients[: len(self)]

    def grad_buffer(self) -> torch.Tensor | None:
        return self.grad


@pytest.mark.parametrize("observe", ["fused", "debug"])
def test_statistics_are_of_the_gathered_weight(tmp_path: Path, keeper: Keeper, observe: Any) -> None:
    net: Any = te.Linear(WIDTH, WIDTH, bias=False)
    whole = net.weight.detach().clone()
    net.weight = Shard(whole[: WIDTH // 2].clone())
    net.weight.whole = whole
    wanted = {
        **statistics(tensors=["weight"]),
        "fp8": feature("LogFp8TensorStats", ["all"], tensors=["weight"], stats=["mse", "underflows%"], freq=1),
    }
    stepped(net, tmp_path, [Float8CurrentScaling()], wanted, sinks=[keeper], observe=observe)
    assert keeper.values("max", tensor="weight")[0] == whole.max()
    assert 0 < keeper.values("mse", tensor="weight")[0] < 1e-3


def current(dtype: DType) -> Float8CurrentScalingQuantizer:
    return Float8CurrentScalingQuantizer(dtype, device="cuda")


def hybrid(role: Any) -> Any:
    if role is not None and role.tensor_type == "input":
        return HybridQuantizer(rowwise_quantizer=current(DType.kFloat8E5M2), columnwise_quantizer=IdentityQuantizer())
    if role is not None and role.tensor_type == "weight":
        return HybridQuantizer(rowwise_quantizer=current(DType.kFloat8E4M3), columnwise_quantizer=IdentityQuantizer())
    return IdentityQuantizer()


def test_statistics_are_of_what_the_gemm_reads(tmp_path: Path, keeper: Keeper) -> None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) * torch.linspace(-12, 0, 32).exp2()
    stats = ["mse", "scale_inv_max", "underflows%"]
    config = {"s": feature("LogFp8TensorStats", ["all"], tensors=["activation", "gradient"], stats=stats)}
    options: dict[str, Any] = {"inputs": x.clone().requires_grad_, "sinks": [keeper]}
    session = stepped(te.Linear(32, 64, bias=False), tmp_path, [CustomRecipe(qfactory=hybrid)], config, **options)
    scale = torch.finfo(torch.float8_e5m2).max / x.abs().amax()
    rounded = (x * scale).to(torch.float8_e5m2).float() / scale
    assert keeper.values("scale_inv_max")[0] == pytest.approx(1 / scale.item(), rel=1e-6)
    assert keeper.values("mse")[0] == pytest.approx((rounded - x).double().pow(2).mean().item(), rel=1e-5)
    assert {entry.gemm: entry.operands for entry in session.precision} == {
        "fprop": {"activation": "FP8 E5M2", "weight": "FP8 E4M3"},
        "dgrad": {"gradient": "FP32", "weight": "FP32"},
        "wgrad": {"gradient": "FP32", "activation": "FP32"},
    }
    assert all(entry.seen for entry in session.precision)
