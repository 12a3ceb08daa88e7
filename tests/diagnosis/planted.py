"""Small trainings under a session: one with a defect, the gradient of one block being far too small; and any model, for
the verdict that a replay of the records gives too.
"""

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.diagnosis import Verdict, diagnose
from te_precision_callbacks.session import InspectSession
from tests.training import observed

ODD, FACTOR = 4, 2.0**-18


class Block(torch.nn.Module):
    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.fc = te.Linear(width, width)
        self.factor = 1.0

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        change: torch.Tensor = self.fc(tensor)
        change.register_hook(lambda gradient: gradient * self.factor)
        return tensor + change


def blocks(*, defect: bool = True, width: int = 32) -> torch.nn.Sequential:
    torch.manual_seed(0)
    net = torch.nn.Sequential(*(Block(width) for _ in range(10)))
    net[ODD].factor = FACTOR if defect else 1.0
    return net


def train(folder: Path, steps: int = 12, *, config: Any = None, defect: bool = True, **keywords: Any) -> InspectSession:
    net = blocks(defect=defect)

    def loss(step: int) -> torch.Tensor:
        return (net(torch.randn(16, 32)) - 1).pow(2).mean()

    options: dict[str, Any] = {"loss": loss, "around": in_fp8, "logs": True, **keywords}
    return observed(folder, config, net=net, steps=steps, optimizers=sgd(net), **options)


def in_fp8(step: int) -> AbstractContextManager[Any]:
    return te.autocast(recipe=Float8CurrentScaling())


def outside(step: int) -> AbstractContextManager[None]:
    return nullcontext()


def trained(folder: Path, model: Any, optimizers: Any = (), *, config: Any = None, **keywords: Any) -> Verdict:
    """The verdict on a training with a loss that is logged; by default in FP8, of 12 steps and with the mean square of
    what 16 rows of 32 numbers give.
    """

    def loss(step: int) -> torch.Tensor:
        return model(torch.randn(16, 32)).square().mean()

    options: dict[str, Any] = {"steps": 12, "around": in_fp8, "logs": True, **keywords}
    session = observed(folder, config, net=model, optimizers=optimizers, **{"loss": loss, **options})
    assert diagnose(folder) == session.findings
    return session.findings


def sgd(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)
