"""Weights that a module gathers itself, by Transformer Engine's protocol ``DistributedWeight``."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from tests.conftest import Keeper, feature, statistics
from tests.instrumentation.steps import stepped

WIDTH = 32


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
    torch.manual_seed(0)
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
