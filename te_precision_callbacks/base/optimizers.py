"""The optimizers of this process, and the tensors that they step."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

from torch.optim.optimizer import Optimizer


def optimizers_of_process() -> list[Optimizer]:
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Optimizer)]


def held_ids(optimizer: Any) -> Iterator[int]:
    """Yield the ids of an optimizer's tensors: parameters of a model, or their master weights."""
    return (id(tensor) for group in optimizer.param_groups for tensor in group["params"])
