"""Observed forwards: training ones, once each, whatever evaluation or recomputation comes in between."""

import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper, feature, statistics
from tests.training import train


def model() -> te.Linear:
    torch.manual_seed(0)
    return te.Linear(32, 32)


def batch(seed: int, scale: float = 1.0) -> torch.Tensor:
    return scale * torch.randn(16, 32, generator=torch.Generator().manual_seed(seed))


def test_forwards_that_do_not_train_are_not_observed(tmp_path: Path, keeper: Keeper) -> None:
    net = model()
    with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        with torch.no_grad():
            net(batch(9, 100.0))
        net(batch(0)).sum().backward()
        net.eval()
        net(batch(9, 100.0)).sum().backward()
        net.train()
        session.observing = False
        net(batch(9, 100.0)).sum().backward()
        session.observing = True
        net(batch(1)).sum().backward()
        with torch.inference_mode():
            net(batch(9, 100.0))
        session.step()
    seen = torch.cat([batch(0), batch(1)]).double()
    assert keeper.values("max") == {0: seen.max().item()}
    assert keeper.values("l1_norm")[0] == pytest.approx(seen.abs().sum().item(), rel=1e-6)


def test_gradients_are_observed_as_their_forward_was(tmp_path: Path, keeper: Keeper) -> None:
    net = model()
    config = statistics(tensors=["gradient", "dgrad", "wgrad"])
    with InspectSession(config, model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        observed = net(batch(0).requires_grad_())
        net.eval()
        unobserved = net(batch(1).requires_grad_())
        (100 * unobserved).sum().backward()
        net.train()
        observed.sum().backward()
        session.step()
    assert keeper.values("max", tensor="gradient") == {0: 1.0}
    assert keeper.values("l1_norm", tensor="gradient") == {0: 16 * 32}
    expected = net.weight.detach().double().sum(0).max().item()
    assert keeper.values("max", tensor="dgrad")[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("precision_features_in_eval", [True, False])
def test_precision_features_in_evaluation(tmp_path: Path, precision_features_in_eval: bool) -> None:
    net = model()
    config = {"fake": feature("FakeQuant", ["all"], gemms=["fprop"], tensors=["weight"], quant_format="FP8E5M2")}
    with torch.no_grad():
        plain = net(batch(0))
    with InspectSession(
        config, model=net, log_dir=tmp_path, precision_features_in_eval=precision_features_in_eval
    ) as session:
        training = net(batch(0)).detach()
        with torch.no_grad():
            evaluation = net(batch(0))
        session.step()
    assert not torch.equal(training, plain)
    assert torch.equal(evaluation, training if precision_features_in_eval else plain)
    with torch.no_grad():
        assert torch.equal(net(batch(0)), plain), "after the session the layer is as before"


Run = Callable[[Callable[..., torch.Tensor], torch.Tensor], torch.Tensor]

CHECKPOINTS: dict[str, Run] = {
    "none": lambda net, x: net(x),
    "torch reentrant": lambda net, x: torch_checkpoint(net, x, use_reentrant=True),
    "torch non-reentrant": lambda net, x: torch_checkpoint(net, x, use_reentrant=False),
    "te reentrant": lambda net, x: te.checkpoint(net, x, use_reentrant=True),
    "te non-reentrant": lambda net, x: te.checkpoint(net, x, use_reentrant=False),
}


def train_block(
    kind: str, config: Any, log_dir: Path, dtype: torch.dtype = torch.float32, fp8: bool = False, **keywords: Any
) -> tuple[Keeper, list[torch.Tensor]]:
    net, keeper, results = block().to(dtype), Keeper(), []
    with InspectSession(config, model=net, log_dir=log_dir, sinks=[keeper], **keywords) as session:
        for step in range(3):
            x = batch(step).to(dtype).requires_grad_()
            with te.autocast(enabled=fp8):
                out = CHECKPOINTS[kind](net, x)
            out.float().pow(2).mean().backward()
            session.step()
            results += [out.detach(), x.grad, *(parameter.grad.clone() for parameter in net.parameters())]
    return keeper, results


@pytest.mark.few
@pytest.mark.parametrize(
    ("kind", "fp8", "dtype", "keywords"),
    [
        ("torch reentrant", False, torch.float32, {}),
        ("torch reentrant", False, torch.float32, {"precision_features_in_eval": False}),
        ("torch non-reentrant", False, torch.bfloat16, {}),
        ("te reentrant", False, torch.bfloat16, {}),
        ("te non-reentrant", False, torch.float32, {}),
        # Delayed scaling needs te.checkpoint, which keeps the amax history of the first forward.
        ("te reentrant", True, torch.float32, {}),
        ("te non-reentrant", True, torch.bfloat16, {}),
    ],
)
def test_a_recomputed_forward_is_observed_once_and_keeps_its_precision(
    tmp_path: Path, kind: str, fp8: bool, dtype: torch.dtype, keywords: dict[str, bool]
) -> None:
    config = {
        **statistics(tensors=["activation", "weight", "gradient", "output", "wgrad", "dgrad"], layers=["linear"]),
        "precision": feature("FakeQuant", ["fc1"], gemms=["fprop"], tensors=["activation"], quant_format="FP8E4M3"),
    }
    plain, expected = train_block("none", config, tmp_path / "plain", dtype, fp8, **keywords)
    keeper, results = train_block(kind, config, tmp_path / "recomputed", dtype, fp8, **keywords)
    assert all(map(torch.equal, results, expected))
    assert [list(records) for records in keeper.steps] == [list(records) for records in plain.steps]
    assert keeper.iterations == [0, 1, 2]


def test_a_layer_that_recomputes_by_itself_is_observed_once(tmp_path: Path) -> None:
    seen = []
    for own in (False, True):
        torch.manual_seed(0)
        net, keeper = te.LayerNormMLP(32, 64, checkpoint=own), Keeper()
        with InspectSession(statistics(), model=net, log_dir=tmp_path, sinks=[keeper]) as session:
            train(session, net, 1, x=batch(0).requires_grad_())
        seen.append([keeper.values("l1_norm", f"layernorm_mlp.{layer}") for layer in ("fc1", "fc2")])
    assert seen[0] == seen[1] != [{}, {}]


@pytest.mark.parametrize(
    ("config", "fp8"),
    [
        (statistics(tensors=["activation", "gradient", "output"]), False),
        (statistics(tensors=["activation", "gradient", "output"]), True),
        ({"s": feature("FakeQuant", ["all"], gemms=["fprop"], tensors=["activation"], quant_format="FP8E4M3")}, True),
        ({"s": feature("DisableFP8GEMM", ["all"], gemms=["fprop"])}, True),
    ],
)
def test_an_input_of_another_type_than_autocasts_is_taken(tmp_path: Path, config: Any, fp8: bool) -> None:
    """float32 weights and input under bfloat16 autocast, where upstream's debug path hands the GEMM two types."""
    results = []
    for inspected in (False, True):
        te.quantization.FP8GlobalStateManager.reset()
        net = model()
        with InspectSession(config, model=net, log_dir=tmp_path) if inspected else nullcontext():
            with torch.autocast("cpu", dtype=torch.bfloat16), te.autocast(enabled=fp8):
                out = net(batch(0).requires_grad_())
            out.float().sum().backward()
        results.append(out.detach())
    assert results[0].dtype is results[1].dtype is torch.bfloat16
    if "stats" in config:
        assert torch.equal(*results), "observing changes nothing"


def test_a_layer_without_features_runs_transformer_engines_own_path(tmp_path: Path) -> None:
    """Bit for bit under bf16 and delayed scaling, where TE's debug path differs from its fused one."""
    outputs = []
    for inspected in (False, True):
        net = block().bfloat16()
        with (
            InspectSession(statistics(layers=["mlp"]), model=net, log_dir=tmp_path) if inspected else nullcontext() as s
        ):
            for step in range(3):
                with te.autocast():
                    outputs.append(net.linear(batch(step).bfloat16()).detach())
                if s is not None:
                    s.step()
    assert all(map(torch.equal, outputs[:3], outputs[3:]))


def block() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(OrderedDict(linear=te.LayerNormLinear(32, 32), mlp=te.LayerNormMLP(32, 64)))


def test_micro_batches_of_a_step_are_one_row(tmp_path: Path, keeper: Keeper) -> None:
    net = model()
    with InspectSession(statistics(tensors=["activation", "weight"]), model=net, log_dir=tmp_path, sinks=[keeper]) as s:
        for first in (True, False, False):
            with te.autocast(enabled=True):
                net(batch(int(first)), is_first_microbatch=first).sum().backward()
        s.step()
    assert keeper.iterations == [0]
    parts = torch.cat([batch(1), batch(0), batch(0)]).double()
    assert keeper.values("l1_norm")[0] == pytest.approx(parts.abs().sum().item(), rel=1e-6)
    weight = net.weight.detach().double().abs().sum().item()
    assert keeper.values("l1_norm", tensor="weight")[0] == pytest.approx(weight, rel=1e-6)


def test_the_dgrads_of_an_mlp_are_told_apart(tmp_path: Path, keeper: Keeper) -> None:
    """Transformer Engine 2.20.2 shows both as fc1's."""
    net, x = te.LayerNormMLP(32, 128), torch.randn(16, 32, requires_grad=True)
    config = statistics(tensors=["dgrad"], stats=["numel", "l1_norm"])
    with InspectSession(config, model=net, log_dir=tmp_path, sinks=[keeper]) as session:
        for _ in range(2):
            net(x).sum().backward()
            train(session, net, 1, x=x)
    for layer, width in (("fc1", 32), ("fc2", 128)):
        assert keeper.values("numel", f"layernorm_mlp.{layer}", "dgrad") == dict.fromkeys((0, 1), 2 * 16 * width)
    of_fc2 = pytest.approx(2 * (torch.ones(16, 32) @ net.fc2_weight.detach()).abs().sum().item(), rel=1e-5)
    assert keeper.values("l1_norm", "layernorm_mlp.fc2", "dgrad")[0] == of_fc2


def test_what_leaves_the_fused_path_under_the_default_config_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A GELU that is fused into its GEMM has no separate function that could run once more."""
    caplog.set_level(logging.INFO)
    net = torch.nn.Sequential(te.Linear(128, 128), te.LayerNormMLP(128, 128))
    net[1].gemm_gelu_fusion = True  # as NVTE_GEMM_GELU_FUSION=1 makes it where Userbuffers are initialized
    InspectSession(None, model=net, log_dir=tmp_path).start().stop()
    (text,) = [text for text in caplog.messages if "debug path" in text]
    assert "1 of 2 modules" in text
    assert "1: LogTensorStats: activation of LayerNormMLP never exists in high precision" in text
