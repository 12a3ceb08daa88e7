"""The optimizers of this process, and the tensors that they step."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import Optimizer


def optimizers_of_process() -> list[Optimizer]:
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), Optimizer)]


def state_of(optimizer: Any, tensor: torch.Tensor) -> Mapping[str, Any]:
    """Return the state of a tensor; ZeroRedundancyOptimizer has None for tensors of other ranks."""
    return optimizer.state.get(tensor) or {}


def held_ids(optimizer: Any) -> Iterator[int]:
    """Yield the ids of the tensors that an optimizer steps: parameters of a model, or their master weights."""
    return map(id, itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))


def held_ids_of_process() -> set[int]:
    """Return the ids of the tensors that any optimizer of this process steps."""
    return set(itertools.chain.from_iterable(map(held_ids, optimizers_of_process())))


def after_closure(
    args: tuple[Any, ...], keywords: Mapping[str, Any], act: Callable[[], None]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return arguments for ``optimizer.step`` with a closure that also runs ``act``; None without a closure.

    With a closure, as used by Lightning and by LBFGS, forward and backward run inside the step.
    """

    def wrap(closure: Callable[[], Any]) -> Callable[[], Any]:
        def run() -> Any:
            loss = closure()
            act()
            return loss

        return run

    if len(args) > 1 and callable(args[1]):
        return (args[0], wrap(args[1]), *args[2:]), dict(keywords)
    if callable(closure := keywords.get("closure")):
        return args, {**keywords, "closure": wrap(closure)}
    return None
