"""Measures the effect of optimizer steps on weights, in collection steps, without waiting for the device.

- :data:`UNCHANGED`: percentage of sampled elements of matrices in 16 bits or fewer, with a gradient, that a step leaves
  unchanged; of a quantized weight those with the same code, whatever its scale. An update below half a unit in the last
  place is lost, unless the optimizer keeps a master weight or the rounding error.
- :data:`BELOW_EPS`: percentage of weights with a gradient below the ``eps`` that Adam adds to its root mean square, so
  the update is almost 0.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from te_precision_callbacks.base.devices import current_stream, follow
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.parameters.optimizers import SteppedParameters, adds_eps
from te_precision_callbacks.parameters.weight_samples import is_narrow, local_part, raw_codes, sampled_view, stack_equal
from te_precision_callbacks.statistics.names import BELOW_EPS, UNCHANGED

_COMPENSATING_STATE = ("master", "kahan", "compensation")
"""Parts of names of optimizer state that compensates for rounding."""


class UpdateShares:
    """Compares samples of weights before and after an optimizer's step."""

    def __init__(self, scalars: ScalarBuffer) -> None:
        self._scalars = scalars
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

    def before_step(
        self, optimizer: Optimizer, stepped: SteppedParameters, gradients: Sequence[torch.Tensor | None]
    ) -> None:
        self._before.clear()
        narrow: list[tuple[torch.Tensor, torch.Tensor]] = []
        below: list[torch.Tensor] = []
        limits: list[float] = []
        for (parameter, tensor, group, _), gradient in zip(stepped.held, gradients, strict=True):
            weight = parameter.weight
            if tensor is weight and gradient is not None:
                sampled = sampled_view(local_part(gradient))
                if adds_eps(group):
                    below.append(sampled.float() if sampled.dtype is torch.float64 else sampled)
                    limits.append(group["eps"] * math.sqrt(sampled.numel()))
                if parameter.is_matrix and is_narrow(weight) and not _compensates_rounding(optimizer, weight):
                    narrow.append((weight, sampled != 0))
        if below:  # the root mean square, to which Adam and its variants add eps
            norms = torch.stack(torch._foreach_norm(below, dtype=torch.float32))
            are_below = (norms > 0) & (norms < torch.tensor(limits).to(norms.device, non_blocking=True))
            self._count(BELOW_EPS, are_below, torch.ones_like(are_below))
        for indices, codes in stack_equal([sampled_view(raw_codes(weight)) for weight, _ in narrow]):
            weights = [narrow[index][0] for index in indices]
            has = [narrow[index][1] for index in indices]
            # Codes may be packed or transposed.
            counted = [mask if mask.shape == codes.shape[1:] else mask.any().expand(codes.shape[1:]) for mask in has]
            self._before.append((weights, codes, torch.stack(counted)))

    def after_step(self) -> None:
        stepped = self._before
        self._before = []
        for weights, codes, counted in stepped:
            codes_now = torch.stack([sampled_view(raw_codes(weight)) for weight in weights])  # which are detached
            self._count(UNCHANGED, codes_now == codes, counted)


def _compensates_rounding(optimizer: torch.optim.Optimizer, weight: torch.Tensor) -> bool:
    """Return whether an optimizer compensates for rounding, or rounds stochastically."""
    state: Mapping[str, Any] = optimizer.state.get(weight, {})
    if any(part in name for name in state for part in _COMPENSATING_STATE):
        return True
    return bool(getattr(optimizer, "master_weights", False) or getattr(optimizer, "bf16_stochastic_round", False))
