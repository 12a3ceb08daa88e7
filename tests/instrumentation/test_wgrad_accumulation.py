"""wgrad where Transformer Engine's GEMM adds it to ``main_grad`` (``fuse_wgrad_accumulation=True``)."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.module import linear as te_linear

from te_precision_callbacks.session import InspectSession
from tests.conftest import Keeper, statistics
from tests.instrumentation.test_idle import calls

MICRO_BATCHES = 3
MODULES: dict[str, Callable[..., torch.nn.Module]] = {
    "linear": lambda **keywords: te.Linear(32, 48, **keywords),
    "layernorm_linear": lambda **keywords: te.LayerNormLinear(32, 48, **keywords),
    "layernorm_mlp": lambda **keywords: te.LayerNormMLP(32, 48, **keywords),
    "grouped_linear": lambda **keywords: te.GroupedLinear(2, 32, 48, **keywords),
}


def train(
    name: str, log_dir: Path, *, fused: bool, config: Any, fp8: bool = False
) -> tuple[Keeper, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    te.quantization.FP8GlobalStateManager.reset()
    net, keeper = MODULES[name](fuse_wgrad_accumulation=fused), Keeper()
    weights = {key: weight for key, weight in net.named_parameters() if weight.dim() == 2}
    for weight in weights.values():
        weight.main_grad = torch.zeros_like(weight)
    with InspectSession(config, model=net, log_dir=log_dir, sinks=[keeper], observe="debug") as session:
        for _ in range(MICRO_BATCHES):
            x = torch.randn(32, 32, requires_grad=True)
            with te.autocast(enabled=fp8):
                out = net(x, [16, 16]) if name == "grouped_linear" else net(x)
            out.pow(2).sum().backward()
        session.step()
    return keeper, {key: weight.main_grad if fused else weight.grad for key, weight in weights.items()}


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_the_wgrad_of_each_micro_batch_is_measured(tmp_path: Path, name: str, fp8: bool) -> None:
    config = statistics(tensors=["wgrad"], stats=["l1_norm", "max", "numel"])
    plain, gradients = train(name, tmp_path / "plain", fused=False, config=config, fp8=fp8)
    fused, sums = train(name, tmp_path / "fused", fused=True, config=config, fp8=fp8)
    assert {(row.layer, row.statistic): row.value for row in fused.steps[0]} == {
        (row.layer, row.statistic): row.value for row in plain.steps[0]
    }
    for key, gradient in gradients.items():
        torch.testing.assert_close(sums[key], gradient)


@pytest.mark.parametrize("name", MODULES)
def test_measuring_does_not_change_main_grad(tmp_path: Path, name: str) -> None:
    watched = train(name, tmp_path / "a", fused=True, config=statistics(tensors=["wgrad"]))[1]
    # The gradient is watched, so that both take Transformer Engine's debug path.
    alone = train(name, tmp_path / "b", fused=True, config=statistics(tensors=["gradient"]))[1]
    for key, total in watched.items():
        assert torch.equal(total, alone[key])


def test_steps_in_which_nothing_is_due(tmp_path: Path) -> None:
    own = te_linear.general_gemm
    net = te.Linear(32, 48, fuse_wgrad_accumulation=True)
    net.weight.main_grad = torch.zeros_like(net.weight)
    replaced = []
    with InspectSession(statistics(tensors=["wgrad"], freq=2), model=net, log_dir=tmp_path) as session:
        for _ in range(4):
            replaced.append(te_linear.general_gemm is not own)
            with calls() as counted:
                net(torch.randn(16, 32)).sum().backward()
            counted.pop("_note_forward.<locals>.note", None)  # once: a fused wgrad leaves no gradient to be seen
            assert bool(counted) is replaced[-1], counted
            session.step()
    assert replaced == [True, False, True, False]
    assert te_linear.general_gemm is own
