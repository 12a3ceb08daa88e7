"""Steps of a training under a session."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession


def stepped(
    net: torch.nn.Module,
    folder: Path,
    recipes: Iterable[Any] = (None,),
    config: Any = None,
    *,
    inputs: Callable[[], torch.Tensor] = lambda: torch.randn(16, 32, requires_grad=True),
    before: Callable[[int], object] = lambda step: None,
    after: Callable[[InspectSession], object] = lambda session: None,
    **options: Any,
) -> InspectSession:
    """A session with a step in each recipe; None is high precision.

    Args:
        inputs: makes the input of a step.
        before: called before a step, with its number.
        after: called behind ``session.step()``.
    """
    with InspectSession(config, model=net, log_dir=folder, **options) as session:
        for step, recipe in enumerate(recipes):
            before(step)
            with te.autocast(enabled=recipe is not None, recipe=recipe):
                out = net(inputs())
            out.float().sum().backward()
            session.step()
            after(session)
    return session
