"""Small trainings under a session."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession

Loss = Callable[[int], torch.Tensor]
Around = Callable[[int], AbstractContextManager[Any]]


def train(
    session: InspectSession,
    net: torch.nn.Module,
    steps: int = 3,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    *,
    x: torch.Tensor | None = None,
    recipe: Any = None,
    around: Around | None = None,
    loss: Loss | None = None,
    micro_batches: int = 1,
    before: Callable[[], object] = lambda: None,
    after: Callable[[], object] = lambda: None,
    logs: bool = False,
) -> None:
    """Train on random batches, or in each step on ``x``.

    Args:
        around: what surrounds the forward of a micro-batch, which is numbered.
        loss: the loss of a micro-batch; None: the sum of what 16 rows of 32 numbers give.
        before: called before the optimizers.
        after: called behind the optimizers, before ``session.step()``.
        logs: whether the loop logs its loss.
    """
    stepped = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    around = around or (lambda _: nullcontext() if recipe is None else te.autocast(recipe=recipe))
    loss = loss or (lambda _: net(torch.randn(16, 32) if x is None else x).sum())
    for step in range(steps):
        for micro_batch in range(step * micro_batches, (step + 1) * micro_batches):
            with around(micro_batch):
                value = loss(micro_batch)
            value.backward()
        before()
        for optimizer in stepped:
            optimizer.step()
            optimizer.zero_grad()
        after()
        if logs:
            session.log({"loss": value.detach()})
        session.step()


KEYWORDS = ("x", "recipe", "around", "loss", "micro_batches", "before", "after", "logs")
"""Keywords of :func:`train`."""


def observed(
    folder: Path,
    config: Any = None,
    *,
    net: Any = None,
    steps: int = 3,
    optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] = (),
    **keywords: Any,
) -> InspectSession:
    """The session of a whole training, by default of one layer; with keywords of both."""
    net = te.Linear(32, 32) if net is None else net
    of_training = {name: keywords.pop(name) for name in KEYWORDS if name in keywords}
    with InspectSession(config, model=net, log_dir=folder, **keywords) as session:
        train(session, net, steps, optimizers, **of_training)
    return session


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, "nothing has happened"
        time.sleep(0.005)
