"""Small trainings under a session."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession


def train(
    session: InspectSession, net: torch.nn.Module, steps: int = 3, *, x: torch.Tensor | None = None, recipe: Any = None
) -> None:
    """Train on random batches, or in each step on ``x``."""
    for _ in range(steps):
        with nullcontext() if recipe is None else te.autocast(recipe=recipe):
            out = net(torch.randn(16, 32) if x is None else x)
        out.sum().backward()
        session.step()


def observed(
    folder: Path,
    config: Any = None,
    *,
    net: torch.nn.Module | None = None,
    steps: int = 3,
    recipe: Any = None,
    **keywords: Any,
) -> InspectSession:
    """The session of a whole training, by default of one layer."""
    net = te.Linear(32, 32) if net is None else net
    with InspectSession(config, model=net, log_dir=folder, **keywords) as session:
        train(session, net, steps, recipe=recipe)
    return session


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < until, "nothing has happened"
        time.sleep(0.005)
