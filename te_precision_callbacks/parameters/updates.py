"""Measures the effect of optimizer steps on weights, in collection steps, without waiting for the device.

- :data:`UNCHANGED`: percentage of sampled elements of matrices in 16 bits or fewer, with a gradient, that a step leaves
  unchanged; of a quantized weight those with the same code, whatever its scale. An update below half a unit in the last
  place is lost, unless the optimizer keeps a master weight or the rounding error.
- :data:`BELOW_EPS`: percentage of weights with a gradient below the ``eps`` that Adam adds to its root mean square, so
  the update is almost 0.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

import torch

from te_precision_callbacks.base.devices import current_stream, follow
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.parameters.weight_samples import is_narrow, local_part, raw_codes, sampled_view, stack_equal
from te_precision_callbacks.statistics.names import BELOW_EPS, UNCHANGED

LEAST_RATE = 0.01
"""Share of the largest learning rate below which steps are skipped: at the end of a decay all updates vanish."""

_COMPENSATING_STATE = ("master", "kahan", "compensation")
"""Parts of names of optimizer state that compensates for rounding."""


class TrainedModel(Protocol):
    @property
    def roots(self) -> list[torch.nn.Module]:
        """The attached modules."""

    def named_parameters(self) -> Iterator[tuple[str, torch.nn.Parameter, torch.nn.Module]]:
        """Yield name, parameter and module, once per parameter."""

    def is_trained_by(self, optimizer: torch.optim.Optimizer) -> bool:
        """Return whether an optimizer steps a parameter of the model."""


class UpdateWatch:
    """Compares samples of weights before and after an optimizer's step.

    Attributes:
        adds_eps: whether an optimizer of the model adds ``eps`` as Adam does; None before the first step.
    """

    def __init__(self, model: TrainedModel, scalars: ScalarBuffer, failures: ObservationFailures) -> None:
        self.adds_eps: bool | None = None
        self._model = model
        self._scalars = scalars
        self._failures = failures
        self._known: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        self._largest_rates: weakref.WeakKeyDictionary[torch.optim.Optimizer, float] = weakref.WeakKeyDictionary()
        self._before: list[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        self._counts: dict[str, list[tuple[torch.cuda.Stream | None, torch.Tensor]]] = {}

    def clear(self) -> None:
        self._before.clear()
        self._counts.clear()

    def end_step(self) -> None:
        """Log the shares of the iteration, over all optimizers: some loops have one for each parameter."""
        counts_by_name = self._counts
        self._counts = {}
        for name, counts in counts_by_name.items():
            for stream, tensor in counts:
                follow(stream, [tensor])
            device = counts[0][1].device
            matches, total = torch.stack([tensor.to(device) for _, tensor in counts]).sum(0)
            self._scalars.add(name, 100 * matches / total.clamp(min=1))

    def _count(self, name: str, are_matches: torch.Tensor, are_counted: torch.Tensor) -> None:
        counts = torch.stack([(are_matches & are_counted).sum(), are_counted.sum()])
        self._counts.setdefault(name, []).append((current_stream(counts.device), counts))

    @torch.no_grad()
    def before_step(self, optimizer: torch.optim.Optimizer, *, is_due: bool) -> None:
        self._before.clear()
        try:
            rate = max((float(group.get("lr") or 0.0) for group in optimizer.param_groups), default=0.0)
            largest = max(rate, self._largest_rates.get(optimizer, 0.0))
            self._largest_rates[optimizer] = largest
            if not is_due or rate < LEAST_RATE * largest or not self._model.is_trained_by(optimizer):
                return
            weights: list[torch.Tensor] = []
            values: list[torch.Tensor] = []
            has_gradient: list[torch.Tensor] = []
            below: list[torch.Tensor] = []
            for group in optimizer.param_groups:
                sampled = list(_sampled_gradients(group["params"]))
                if sampled and _adds_eps(group):
                    below.append(_are_below_eps([gradient for _, gradient in sampled], float(group["eps"])))
                for weight, gradient in sampled:
                    if weight.dim() > 1 and is_narrow(weight) and not _compensates_rounding(optimizer, weight):
                        view = sampled_view(raw_codes(weight))
                        weights.append(weight)
                        values.append(view)
                        # Codes may be packed or transposed.
                        has = gradient != 0
                        has_gradient.append(has if has.shape == view.shape else has.any().expand(view.shape))
            if below:
                are_below = torch.cat(below)
                self._count(BELOW_EPS, are_below, torch.ones_like(are_below))
            for places, then in stack_equal(values):
                counted = torch.stack([has_gradient[place] for place in places])
                self._before.append(([weights[place] for place in places], then, counted))
        except Exception as error:
            self._before.clear()
            self._failures.report("checking a step of", type(optimizer).__name__, error)

    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        before = self._before
        self._before = []
        with self._failures.guard("checking a step of", type(optimizer).__name__):
            if optimizer not in self._known:
                self._known.add(optimizer)
                if self._model.is_trained_by(optimizer):
                    self.adds_eps = bool(self.adds_eps) or any(map(_adds_eps, optimizer.param_groups))
            for weights, then, counted in before:
                now = torch.stack([sampled_view(raw_codes(weight)) for weight in weights])  # which are detached
                self._count(UNCHANGED, now == then, counted)


def _adds_eps(group: Mapping[str, Any]) -> bool:
    return "betas" in group and bool(group.get("eps"))


def _are_below_eps(gradients: list[torch.Tensor], eps: float) -> torch.Tensor:
    """Compare the root mean squares of sampled gradients with ``eps``, which Adam and its variants add to them."""
    narrowed = [gradient.float() if gradient.dtype is torch.float64 else gradient for gradient in gradients]
    norms = torch.stack(torch._foreach_norm(narrowed, dtype=torch.float32))
    sizes = torch.tensor([gradient.numel() for gradient in gradients]).sqrt().to(norms.device, non_blocking=True)
    return (norms > 0) & (norms < eps * sizes)


def _sampled_gradients(weights: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    for weight in weights:
        gradient = weight.grad
        if gradient is not None and gradient.layout is torch.strided and gradient.shape == weight.shape:
            own = local_part(gradient)
            if own.numel():
                yield weight, sampled_view(own)


def _compensates_rounding(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> bool:
    """Return whether an optimizer compensates for rounding, or rounds stochastically."""
    state: Mapping[str, Any] = optimizer.state.get(weight, {})
    if any(part in name for name in state for part in _COMPENSATING_STATE):
        return True
    return bool(getattr(optimizer, "master_weights", False) or getattr(optimizer, "bf16_stochastic_round", False))
