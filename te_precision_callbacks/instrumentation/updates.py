"""Looks at what an optimizer's step does to the weights of a model, in the steps in which statistics are due.

Some elements of each weight are looked at, the same before and after the step. Nothing waits for the device.

- :data:`UNCHANGED`: the percent of elements of bfloat16 or float16 matrices, with a gradient, that the step leaves as
  they are. An update below half a unit in the last place is lost there, unless the optimizer keeps a master weight or
  what it has rounded off.
- :data:`BELOW_EPS`: the percent of weights whose gradient is smaller than the ``eps`` that Adam adds to its root mean
  square, so that the update is almost 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.scalars import ScalarBuffer
from te_precision_callbacks.statistics.names import BELOW_EPS, UNCHANGED

LEAST_RATE = 0.01
"""The share of the largest learning rate so far below which a step does not count: at the end of a decay all updates
vanish."""

_SAMPLE = 1024
"""About so many elements of a weight are looked at."""

_ROUNDED = (torch.bfloat16, torch.float16)

_KEEPERS = ("master", "kahan", "compensation")
"""Parts of the names under which optimizers keep what a weight has lost in rounding."""


class TrainedModel(Protocol):
    """A model, as far as checks of its training read it."""

    @property
    def roots(self) -> list[torch.nn.Module]:
        """The modules that were attached."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module]]:
        """The parameters, each once, with their names and the modules that have them."""

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps a parameter of the model."""


class UpdateWatch:
    """Compares a sample of each weight before and after an optimizer's step.

    Args:
        model: the model whose weights are sampled.
        scalars: receive the results.
        failures: receives failures.

    Attributes:
        adds_eps: whether an optimizer that has stepped the model adds ``eps`` as Adam does; None before the first step.
    """

    def __init__(self, model: TrainedModel, scalars: ScalarBuffer, failures: ObservationFailures) -> None:
        self.adds_eps: bool | None = None
        self._model = model
        self._scalars = scalars
        self._failures = failures
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._largest_rates: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []

    def clear(self) -> None:
        """Forget the samples."""
        self._before.clear()

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, *, is_due: bool) -> None:
        """Look at the gradients, and keep the elements that are compared.

        Args:
            optimizer: the optimizer.
            is_due: whether statistics are due in this step.
        """
        self._before.clear()
        try:
            rate = max((float(group.get("lr") or 0.0) for group in optimizer.param_groups), default=0.0)
            largest = self._largest_rates[optimizer] = max(rate, self._largest_rates.get(optimizer, 0.0))
            if not is_due or rate < LEAST_RATE * largest or not self._model.is_trained_by(optimizer):
                return
            self._look_at_gradients(optimizer)
            weights = (weight for group in optimizer.param_groups for weight in group["params"])
            for weight, gradient in _usable(weights):
                if weight.dtype in _ROUNDED and weight.dim() > 1 and not _keeps_more(optimizer, weight):
                    view = _some(weight)
                    self._before.append((view, view.clone(), _some(gradient) != 0))
        except Exception as error:
            self._before.clear()
            self._failures.report("looking at a step of", type(optimizer).__name__, error)

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what the step has left of the elements."""
        before, self._before = self._before, []
        try:
            if optimizer not in self._known:
                self._known.add(optimizer)
                if self._model.is_trained_by(optimizer):
                    self.adds_eps = bool(self.adds_eps) or any(map(_adds_eps, optimizer.param_groups))
            if not before:
                return
            asked = torch.cat([has_gradient for _, _, has_gradient in before])
            same = torch.cat([now == then for now, then, _ in before])
            self._scalars.add(UNCHANGED, 100 * (same & asked).sum() / asked.sum().clamp(min=1))
        except Exception as error:
            self._failures.report("looking at a step of", type(optimizer).__name__, error)

    def _look_at_gradients(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare gradients with ``eps``, where the optimizer is one of Adam's kind."""
        found: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            if not _adds_eps(group):
                continue
            gradients = [_some(gradient) for _, gradient in _usable(group["params"])]
            if gradients:
                norms = torch.stack(torch._foreach_norm([gradient.float() for gradient in gradients]))
                sizes = torch.tensor([float(gradient.numel()) ** 0.5 for gradient in gradients])
                sizes = sizes.to(norms.device, non_blocking=True)
                found.append((norms > 0) & (norms < float(group["eps"]) * sizes))
        if found:
            self._scalars.add(BELOW_EPS, 100 * torch.cat(found).float().mean())


def _adds_eps(group: Mapping[str, Any]) -> bool:
    """Whether the optimizer of a group of parameters adds ``eps`` as Adam does."""
    return "betas" in group and bool(group.get("eps"))


def _usable(weights: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The weights that can be looked at, each with its gradient."""
    for weight in weights:
        gradient = weight.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        own, of_own = _local(weight), _local(gradient)
        if own.numel() == of_own.numel() > 0 and own.is_contiguous() and of_own.is_contiguous():
            yield weight, gradient


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's part of a DTensor."""
    local: torch.Tensor = getattr(tensor, "_local_tensor", tensor)
    return local.detach()


def _some(tensor: torch.Tensor) -> torch.Tensor:
    """Some elements of a tensor, as a view."""
    flat = _local(tensor).view(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


def _keeps_more(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> bool:
    """Whether an optimizer keeps what a weight loses in rounding, or rounds so that nothing is lost in the mean."""
    state: Mapping[str, Any] = optimizer.state.get(weight, {})
    if any(part in name for name in state for part in _KEEPERS):
        return True
    return bool(getattr(optimizer, "master_weights", False) or getattr(optimizer, "bf16_stochastic_round", False))
