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
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.statistics.names import BELOW_EPS, UNCHANGED

LEAST_RATE = 0.01
"""The share of the largest learning rate so far below which a step does not count: at the end of a decay all updates
vanish."""

_SAMPLE = 1024
"""About so many elements of a weight are looked at."""

_ROUNDED = (torch.bfloat16, torch.float16)

_KEEPERS = ("master", "kahan", "compensation")
"""Parts of the names under which optimizers keep what a weight has lost in rounding."""


class UpdateWatch:
    """Looks at optimizer steps, from :meth:`begin` to :meth:`remove`.

    Args:
        is_due: whether statistics are due in this step.
        is_trained_by: whether an optimizer steps parameters of the model.
        take: receives a name, and a number on its device.
        note_eps: called with whether an optimizer is of Adam's kind, once for each that has stepped the model.
        report: receives failures.
    """

    def __init__(
        self,
        is_due: Callable[[], bool],
        is_trained_by: Callable[[torch.optim.Optimizer], bool],
        take: Callable[[str, torch.Tensor], None],
        note_eps: Callable[[bool], None],
        report: Callable[[str, str, Exception], None],
    ) -> None:
        self._is_due = is_due
        self._is_trained_by = is_trained_by
        self._take = take
        self._note_eps = note_eps
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._report = report
        self._largest_rates: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._hook: RemovableHandle | None = None

    def begin(self) -> None:
        """Begin to look, if that was not done yet."""
        if self._hook is None:
            self._hook = register_optimizer_step_pre_hook(_before_step(weakref.ref(self)))

    def remove(self) -> None:
        """Look no longer."""
        if self._hook is not None:
            self._hook.remove()
        self._before.clear()

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at the gradients, and keep the elements that are compared."""
        self._before.clear()
        try:
            rate = max((float(group.get("lr") or 0.0) for group in optimizer.param_groups), default=0.0)
            largest = self._largest_rates[optimizer] = max(rate, self._largest_rates.get(optimizer, 0.0))
            if not self._is_due() or rate < LEAST_RATE * largest or not self._is_trained_by(optimizer):
                return
            self._look_at_gradients(optimizer)
            weights = (weight for group in optimizer.param_groups for weight in group["params"])
            for weight, gradient in _usable(weights):
                if weight.dtype in _ROUNDED and weight.dim() > 1 and not _keeps_more(optimizer, weight):
                    view = _some(weight)
                    self._before.append((view, view.clone(), _some(gradient) != 0))
        except Exception as error:
            self._before.clear()
            self._report("looking at a step of", type(optimizer).__name__, error)

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Compare what the step has left of the elements."""
        before, self._before = self._before, []
        try:
            if optimizer not in self._known:
                self._known.add(optimizer)
                if self._is_trained_by(optimizer):
                    self._note_eps(any(map(_adds_eps, optimizer.param_groups)))
            if not before:
                return
            asked = torch.cat([has_gradient for _, _, has_gradient in before])
            same = torch.cat([now == then for now, then, _ in before])
            self._take(UNCHANGED, 100 * (same & asked).sum() / asked.sum().clamp(min=1))
        except Exception as error:
            self._report("looking at a step of", type(optimizer).__name__, error)

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
            self._take(BELOW_EPS, 100 * torch.cat(found).float().mean())


def _adds_eps(group: Mapping[str, Any]) -> bool:
    """Whether the optimizer of a group of parameters adds ``eps`` as Adam does."""
    return "betas" in group and bool(group.get("eps"))


def _before_step(watch: weakref.ref[UpdateWatch]) -> Callable[..., None]:
    @outside_of_dynamo
    def look(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = watch()
        if found is not None:
            found.before_step(optimizer)

    return look


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
