"""Samples weights before and after the steps of optimizers, and compares the samples, without waiting for the device.

Weights are sampled in few steps, and no longer once they have changed, unless the optimizer holds master weights. The
versions of weights, which writes in place raise, are read in each step, on the host; a weight is compared with its last
samples if code has written it more often than ever between two steps. Regular writes, such as clamping or the copy of
master weights, are thus compared once.
"""

from __future__ import annotations

import operator

import torch
from torch.optim.optimizer import Optimizer

from te_precision_callbacks.parameters.optimizers import Held, SteppedParameters, master_of
from te_precision_callbacks.parameters.parameter import FEW_CHANGED, MasterRow, Parameter, WeightRow, WriteRow
from te_precision_callbacks.parameters.weight_samples import (
    BatchedMeasurements,
    WeightMeasurement,
    copy_all,
    is_narrow,
    local_part,
    raw_codes,
    sample,
    sampled_view,
)
from te_precision_callbacks.te.tensors import is_quantized

THIN = 4
SAMPLES = 8
"""Every how many columns of a sample are kept for comparisons with overwritten weights, and the samples of each weight
that are kept: the first one and the last ones."""

MASTER_ROWS = 3
"""The last checks against a master weight that are kept; the last one may not be on the host."""

VERSION = operator.attrgetter("weight._version")
_MOST_WRITES = operator.attrgetter("most_writes")


class WeightSamples:
    """Measures the rows of parameters; :attr:`batch` sets them when they are on the host."""

    def __init__(self) -> None:
        self.batch = BatchedMeasurements()
        self._stepping: list[tuple[WeightRow, torch.Tensor, torch.Tensor]] = []  # tensors before a sampled step

    def clear(self) -> None:
        self._stepping.clear()

    def before_step(self, optimizer: Optimizer, stepped: SteppedParameters, iteration: int) -> None:
        """Sample weights and master weights before a step."""
        self._stepping.clear()
        sampled: list[Parameter] = []
        values: list[torch.Tensor] = []
        compared: list[Held] = []
        elements: list[torch.Tensor] = []
        for held in stepped.held:
            parameter = held.parameter
            weight = parameter.weight
            self._compare_with_master(optimizer, held, iteration)
            if not weight.requires_grad:
                continue
            # Optimizers may share a parameter.
            is_new = not parameter.samples or parameter.samples[-1][0] < iteration
            if is_new and parameter.is_matrix and not is_quantized(local := local_part(weight)):
                sampled.append(parameter)
                values.append(sampled_view(local, THIN))
            if any([row.changed > FEW_CHANGED for row in parameter.rows]):  # noqa: C419  # no call each
                parameter.reference = None
            else:
                compared.append(held)
                elements.append(sampled_view(raw_codes(weight)))
        for parameter, copy in zip(sampled, copy_all(values), strict=True):
            first, *later = *parameter.samples, (iteration, copy)
            parameter.samples = [first, *later[1 - SAMPLES :]]
        for held, codes in zip(compared, copy_all(elements), strict=True):
            self._compare_with_reference(held, codes, iteration)

    def _compare_with_reference(self, held: Held, codes: torch.Tensor, iteration: int) -> None:
        """Compare a copy of a weight's sample with its first one; :meth:`after_step` compares the stepped tensor."""
        parameter, tensor, group, _ = held
        weight = parameter.weight
        rate = group.get("lr")
        row = WeightRow(iteration, rate if isinstance(rate, float) else 1.0)
        parameter.rows.append(row)
        reference = parameter.reference
        if reference is None:
            parameter.reference = codes
        elif (reference.shape, reference.dtype) == (codes.shape, codes.dtype):
            self.batch.waiting.append(WeightMeasurement(_share_changed, (codes, reference), row, "changed"))
        else:
            row.changed = 1.0
        # The master weight of a narrow weight may change by less than rounding.
        if tensor is weight or (tensor.shape == weight.shape and not is_narrow(weight)):
            if tensor.grad is None and weight.grad is not None:
                row.moved = 1.0  # the optimizer steps a copy that gets no gradient
            else:
                stepped_codes = codes if tensor is weight else sampled_view(raw_codes(tensor)).clone()
                self._stepping.append((row, tensor, stepped_codes))

    def after_step(self) -> None:
        for row, tensor, codes in self._stepping:
            self.batch.waiting.append(
                WeightMeasurement(_share_changed, (sampled_view(raw_codes(tensor)), codes), row, "moved")
            )
        self._stepping.clear()
        self.batch.launch()

    def _compare_with_master(self, optimizer: Optimizer, held: Held, iteration: int) -> None:
        """Compare the weight of the last forward with its master weight."""
        parameter = held.parameter
        master = master_of(optimizer, held)
        span = None if held.start is None else range(held.start, held.start + held.tensor.numel())
        weight = None if master is None else sample(parameter.weight, span)
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
                if parameter.samples and not is_quantized(weight):
                    row = WriteRow(iteration, [sampled_at for sampled_at, _ in parameter.samples])
                    parameter.writes.append(row)
                    tensors = (*[values for _, values in parameter.samples], sampled_view(weight, THIN))
                    self.batch.waiting.append(WeightMeasurement(_distances, tensors, row, "distances"))


def _share_changed(codes: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (codes != reference).flatten(1).float().mean(1)


def _share_apart(values: torch.Tensor, allowed: torch.Tensor, master: torch.Tensor) -> torch.Tensor:
    return ((values - master).abs() > allowed).flatten(1).float().mean(1)


def _distances(*samples: torch.Tensor) -> torch.Tensor:
    """Return the distances of zero and all samples from each other, [weights, points, points]: exactly 0 for equal
    ones."""
    points = torch.stack([torch.zeros_like(samples[0]), *samples], 1).float().flatten(2)
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")
