"""Small trainings under a session: one with a defect, the gradient of one block being far too small; and any model, for
the verdict that a replay of the records gives too.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.diagnosis import Verdict, diagnose
from te_precision_callbacks.session import InspectSession

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
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    with InspectSession(config, model=net, log_dir=folder, **keywords) as session:
        for _ in range(steps):
            with te.autocast(recipe=Float8CurrentScaling()):
                loss = (net(torch.randn(16, 32)) - 1).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss})
            session.step()
    return session


Loss = Callable[[int], torch.Tensor]
Around = Callable[[int], AbstractContextManager[Any]]


def in_fp8(step: int) -> AbstractContextManager[Any]:
    return te.autocast(recipe=Float8CurrentScaling())


def outside(step: int) -> AbstractContextManager[None]:
    return nullcontext()


def trained(
    folder: Path,
    model: torch.nn.Module,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    steps: int = 12,
    loss: Loss | None = None,
    around: Around = in_fp8,
    micro_batches: int = 1,
    after: Callable[[], object] = lambda: None,
    logs: bool = True,
    config: Any = None,
) -> Verdict:
    """The verdict on a training.

    Args:
        loss: the loss of a micro-batch, which is numbered; None: the mean square of what 16 rows of 32 numbers give.
        around: what surrounds the forward of a micro-batch.
        after: called behind the optimizers, before ``session.step()``.
        logs: whether the loop logs its loss.
    """
    loss = loss or (lambda step: model(torch.randn(16, 32)).square().mean())
    stepped = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    with InspectSession(config, model=model, log_dir=folder) as session:
        for step in range(steps):
            for micro_batch in range(step * micro_batches, (step + 1) * micro_batches):
                with around(micro_batch):
                    value = loss(micro_batch)
                value.backward()
            for optimizer in stepped:
                optimizer.step()
                optimizer.zero_grad()
            after()
            session.log({"loss": value.detach()} if logs else {})
            session.step()
    assert diagnose(folder) == session.findings
    return session.findings


def sgd(model: torch.nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=lr)
