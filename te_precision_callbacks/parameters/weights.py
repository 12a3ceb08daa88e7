"""Samples weights before and after the steps of optimizers, and compares the samples, without waiting for the device.

:class:`WeightSamples` looks for weights that do not change, or that other code writes. Weights are sampled in few
steps, and no longer once they have changed, unless the optimizer holds master weights. The versions of weights, which
writes in place raise, are read in each step, on the host; a weight is compared with its last samples if code has
written it more often than ever between two steps. Regular writes, such as clamping or the copy of master weights, are
thus compared once.

:class:`UpdateShares` measures the effect of steps on the model, in collection steps:

- :data:`UNCHANGED`: percentage of sampled elements of matrices in 16 bits or fewer, with a gradient, that a step leaves
  unchanged; of a quantized weight those with the same code, whatever its scale. An update below half a unit in the last
  place is lost, unless the optimizer keeps a master weight or the rounding error.
- :data:`BELOW_EPS`: percentage of weights with a gradient below the ``eps`` that Adam adds to its root mean square, so
  the update is almost 0.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence

import torch
from torch.optim.optimizer import Optimizer

from te_precision_callbacks.base.devices import current_stream, follow
from te_precision_callbacks.base.optimizers import state_of
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.parameters.optimizers import Held, SteppedParameters, adds_eps, master_of
from te_precision_callbacks.parameters.parameter import FEW_CHANGED, MasterRow, WeightRow, WeightSample, WriteRow
from te_precision_callbacks.parameters.weight_samples import (
    BatchedMeasurements,
    WeightMeasurement,
    dequantized_sample,
    is_narrow,
    local_part,
    raw_codes,
    sampled_view,
    stack_equal,
)
from te_precision_callbacks.statistics.names import BELOW_EPS, UNCHANGED
from te_precision_callbacks.te.tensors import is_quantized

THIN = 4
SAMPLES = 8
"""Every how many columns of a sample are kept, and how many samples of each weight: the first one and the last ones."""

MASTER_ROWS = 3
"""The last checks against a master weight that are kept; the last one may not be on the host."""

VERSION = operator.attrgetter("weight._version")
_MOST_WRITES = operator.attrgetter("most_writes")


class WeightSamples:
    """Measures the rows of parameters; :attr:`batch` sets them when they are on the host."""

    def __init__(self) -> None:
        self.batch = BatchedMeasurements()
        self._stepping: list[tuple[WeightRow, torch.Tensor, torch.Tensor]] = []  # tensors before a sampled step

    def before_step(self, optimizer: Optimizer, stepped: SteppedParameters, iteration: int) -> None:
        """Sample weights and master weights before a step."""
        self._stepping.clear()
        trained = [held for held in stepped.held if held.parameter.weight.requires_grad]
        for held in stepped.held:
            self._compare_with_master(optimizer, held, iteration)
        views = [sampled_view(raw_codes(held.parameter.weight), THIN) for held in trained]
        for indices, copies in stack_equal(views):
            for index, values in zip(indices, copies.unbind(), strict=True):
                self._compare_with_first(trained[index], values, iteration)

    def _compare_with_first(self, held: Held, values: torch.Tensor, iteration: int) -> None:
        """Keep a sample, and compare it with the first one; :meth:`after_step` compares the stepped tensor."""
        parameter, tensor, group, _ = held
        weight = parameter.weight
        samples = parameter.samples
        if not samples and parameter.is_matrix and values.is_floating_point():
            self.batch.waiting.append(WeightMeasurement(_size, (values,), parameter, "first_size"))
        if not samples or samples[-1].iteration < iteration:  # optimizers may share a parameter
            parameter.samples = [*samples[:1], *samples[1:][2 - SAMPLES :], WeightSample(iteration, values)]
        if any([row.changed > FEW_CHANGED for row in parameter.rows]):  # noqa: C419  # no call each
            return
        rate = group.get("lr")
        row = WeightRow(iteration, rate if isinstance(rate, float) else 1.0)
        parameter.rows.append(row)
        first = parameter.samples[0].values
        if (first.shape, first.dtype) != (values.shape, values.dtype):
            row.changed = 1.0
        elif samples:
            self.batch.waiting.append(WeightMeasurement(_share_changed, (values, first), row, "changed"))
        # The master weight of a narrow weight may change by less than rounding.
        if tensor is weight or (tensor.shape == weight.shape and not is_narrow(weight)):
            if tensor.grad is None and weight.grad is not None:
                row.moved = 1.0  # the optimizer steps a copy that gets no gradient
            else:
                former_values = values if tensor is weight else sampled_view(raw_codes(tensor), THIN).clone()
                self._stepping.append((row, tensor, former_values))

    def after_step(self) -> None:
        for row, tensor, former_values in self._stepping:
            current_values = sampled_view(raw_codes(tensor), THIN)
            self.batch.waiting.append(WeightMeasurement(_share_changed, (current_values, former_values), row, "moved"))
        self._stepping.clear()
        self.batch.launch()

    def _compare_with_master(self, optimizer: Optimizer, held: Held, iteration: int) -> None:
        """Compare the weight of the last forward with its master weight."""
        parameter = held.parameter
        master = master_of(optimizer, held)
        span = None if held.start is None else range(held.start, held.start + held.tensor.numel())
        weight = None if master is None else dequantized_sample(parameter.weight, span)
        if master is not None and weight is not None:
            row = MasterRow(max(0, iteration - 1))
            parameter.master_rows = [*parameter.master_rows, row][-MASTER_ROWS:]
            self.batch.waiting.append(WeightMeasurement(_share_apart, (*weight, sampled_view(master)), row, "apart"))

    def check_writes(self, stepped: SteppedParameters, iteration: int) -> None:
        """Compare weights that were written more often since the last step than ever between two steps."""
        writes = [*map(operator.sub, map(VERSION, stepped.parameters), stepped.versions)]
        if not any(map(operator.gt, writes, map(_MOST_WRITES, stepped.parameters))):
            return
        for parameter, count in zip(stepped.parameters, writes, strict=True):
            if count > parameter.most_writes:
                parameter.most_writes = count
                weight = local_part(parameter.weight)
                if parameter.samples and parameter.is_matrix and not is_quantized(weight):
                    row = WriteRow(iteration, [sample.iteration for sample in parameter.samples])
                    parameter.writes.append(row)
                    tensors = (*[sample.values for sample in parameter.samples], sampled_view(weight, THIN))
                    self.batch.waiting.append(WeightMeasurement(_distances, tensors, row, "distances"))


def _size(values: torch.Tensor) -> torch.Tensor:
    return values.flatten(1).float().square().mean(1).sqrt()


def _share_changed(codes: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (codes != reference).flatten(1).float().mean(1)


def _share_apart(values: torch.Tensor, allowed: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    return ((values - master).abs() > allowed).flatten(1).float().mean(1)


def _distances(*samples: torch.Tensor) -> torch.Tensor:
    """Return the distances of zero and all samples from each other, [weights, points, points]: exactly 0 for equal
    ones."""
    points = torch.stack([torch.zeros_like(samples[0]), *samples], 1).float().flatten(2)
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


_COMPENSATING_STATE = ("master", "kahan", "compensation")
"""Parts of names of optimizer state that compensates for rounding."""


class UpdateShares:
    """Compares samples of weights before and after an optimizer's step."""

    def __init__(self, scalars: ScalarBuffer) -> None:
        self._scalars = scalars
        self._before: list[tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]] = []
        self._counts: dict[str, list[tuple[torch.cuda.Stream | None, torch.Tensor]]] = {}

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
    state = state_of(optimizer, weight)
    if any(part in name for name in state for part in _COMPENSATING_STATE):
        return True
    return bool(getattr(optimizer, "master_weights", False) or getattr(optimizer, "bf16_stochastic_round", False))
