"""Measures the effect of optimizer steps on weights, in collection steps, without waiting for the device.

- :data:`UNCHANGED`: percentage of sampled elements of bfloat16 or float16 matrices, with a gradient, that a step leaves
  unchanged. An update below half a unit in the last place is lost, unless the optimizer keeps a master weight or the
  rounding error.
- :data:`BELOW_EPS`: percentage of weights with a gradient below the ``eps`` that Adam adds to its root mean square, so
  the update is almost 0.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from te_precision_callbacks.base.devices import current_stream, follow
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.parameters.weight_samples import local_part
from te_precision_callbacks.statistics.names import BELOW_EPS, UNCHANGED

LEAST_RATE = 0.01
"""Share of the largest learning rate below which steps are skipped: at the end of a decay all updates vanish."""

_SAMPLE = 1024

_ROUNDED = (torch.bfloat16, torch.float16)

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
        self._before: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._counts: dict[str, list[tuple[torch.cuda.Stream | None, torch.Tensor]]] = {}

    def clear(self) -> None:
        self._before.clear()
        self._counts.clear()

    @torch.no_grad()
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
            samples = [(group, list(_gradient_samples(group["params"]))) for group in optimizer.param_groups]
            self._check_gradients(samples)
            for weight, gradient in itertools.chain.from_iterable(sampled for _, sampled in samples):
                if weight.dtype in _ROUNDED and weight.dim() > 1 and not _compensates_rounding(optimizer, weight):
                    view = _subsample(local_part(weight))
                    self._before.append((view, view.clone(), gradient != 0))
        except Exception as error:
            self._before.clear()
            self._failures.report("checking a step of", type(optimizer).__name__, error)

    @torch.no_grad()
    def after_step(self, optimizer: torch.optim.Optimizer) -> None:
        before = self._before
        self._before = []
        with self._failures.guard("checking a step of", type(optimizer).__name__):
            if optimizer not in self._known:
                self._known.add(optimizer)
                if self._model.is_trained_by(optimizer):
                    self.adds_eps = bool(self.adds_eps) or any(map(_adds_eps, optimizer.param_groups))
            if not before:
                return
            has_gradients = torch.cat([has_gradient for _, _, has_gradient in before])
            self._count(UNCHANGED, torch.cat([now == then for now, then, _ in before]), has_gradients)

    def _check_gradients(self, samples: Iterable[tuple[Mapping[str, Any], Sequence[_GradientSample]]]) -> None:
        """Compare sampled gradients with ``eps``, for Adam and its variants."""
        are_below: list[torch.Tensor] = []
        for group, sampled in samples:
            if sampled and _adds_eps(group):
                gradients = [sample.float() if sample.dtype is torch.float64 else sample for _, sample in sampled]
                norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
                sizes = torch.tensor([float(gradient.numel()) ** 0.5 for _, gradient in sampled])
                sizes = sizes.to(norms.device, non_blocking=True)
                are_below.append((norms > 0) & (norms < float(group["eps"]) * sizes))
        if are_below:
            below = torch.cat(are_below)
            self._count(BELOW_EPS, below, torch.ones_like(below))


def _adds_eps(group: Mapping[str, Any]) -> bool:
    return "betas" in group and bool(group.get("eps"))


_GradientSample = tuple[torch.Tensor, torch.Tensor]


def _gradient_samples(weights: Iterable[torch.Tensor]) -> Iterator[_GradientSample]:
    for weight in weights:
        gradient = weight.grad
        if gradient is None or gradient.layout is not torch.strided:
            continue
        own = local_part(weight)
        own_gradient = local_part(gradient)
        if own.numel() == own_gradient.numel() > 0 and own.is_contiguous() and own_gradient.is_contiguous():
            yield weight, _subsample(own_gradient)


def _subsample(tensor: torch.Tensor) -> torch.Tensor:
    flat = tensor.view(-1)
    return flat[:: max(1, flat.numel() // _SAMPLE)]


def _compensates_rounding(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> bool:
    """Return whether an optimizer compensates for rounding, or rounds stochastically."""
    state: Mapping[str, Any] = optimizer.state.get(weight, {})
    if any(part in name for name in state for part in _COMPENSATING_STATE):
        return True
    return bool(getattr(optimizer, "master_weights", False) or getattr(optimizer, "bf16_stochastic_round", False))
