"""A small training with a defect: the gradient of one block is far too small."""

from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

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


def train(folder: Path, steps: int = 21, *, config: Any = None, defect: bool = True, **keywords: Any) -> InspectSession:
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
