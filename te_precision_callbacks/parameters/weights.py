"""Samples weights before the steps of optimizers, and compares the samples, without waiting for the device.

Weights are sampled in few steps, and no longer once they have changed, unless the optimizer holds master weights. The
versions of weights, which writes in place raise, are read in each step, on the host; a weight is compared with its last
samples if code has written it more often than ever between two steps. Regular writes, such as clamping or the copy of
master weights, are thus compared once.
"""

from __future__ import annotations

import functools
import operator
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import Optimizer

from te_precision_callbacks.parameters.optimizers import Held, SteppedParameters, master_of, mean_squares
from te_precision_callbacks.parameters.parameter import MasterRow, Parameter, WeightRow, WriteRow
from te_precision_callbacks.parameters.weight_samples import (
    BatchedMeasurements,
    copy_all,
    exceeds_rounding,
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

LIKELY = 4.0
"""An update of this many units in the last place must change a weight."""

MASTER_ROWS = 3
"""The last checks against a master weight that are kept; the last one may not be on the host."""

_VERSION = operator.attrgetter("weight._version")
_MOST_WRITES = operator.attrgetter("most_writes")


class WeightSamples:
    """Measures the rows of parameters; :attr:`batch` sets them when they are on the host."""

    def __init__(self) -> None:
        self.batch = BatchedMeasurements()
        self._masters: weakref.WeakKeyDictionary[Optimizer, list[tuple[Held, int, torch.Tensor]]]
        self._masters = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        self._masters.clear()

    def sample(
        self, optimizer: Optimizer, stepped: SteppedParameters, gradients: Sequence[torch.Tensor | None], iteration: int
    ) -> None:
        """Sample weights and master weights before a step."""
        masters = [(held, master) for held in stepped.held if (master := master_of(optimizer, held)) is not None]
        copies = copy_all([sampled_view(master) for _, master in masters])
        self._masters[optimizer] = [(held, iteration, copy) for (held, _), copy in zip(masters, copies, strict=True)]
        first: list[Parameter] = []
        codes_of_first: list[torch.Tensor] = []
        matrices: list[Parameter] = []
        for held, gradient in zip(stepped.held, gradients, strict=True):
            parameter = held.parameter
            if not parameter.is_trained:
                continue
            # Optimizers may share a parameter.
            is_new = not parameter.samples or parameter.samples[-1][0] < iteration
            if is_new and parameter.is_matrix and not is_quantized(local_part(parameter.weight)):
                matrices.append(parameter)
            if parameter.is_settled:
                parameter.reference = None
            else:
                codes = sampled_view(raw_codes(parameter.weight))
                if parameter.reference is None:
                    first.append(parameter)
                    codes_of_first.append(codes)
                self._compare_with_reference(optimizer, held, codes, gradient, iteration)
        for parameter, copy in zip(first, copy_all(codes_of_first), strict=True):
            parameter.reference = copy
        views = [sampled_view(local_part(parameter.weight), THIN) for parameter in matrices]
        for parameter, copy in zip(matrices, copy_all(views), strict=True):
            first_sample, *later = *parameter.samples, (iteration, copy)
            parameter.samples = [first_sample, *later[1 - SAMPLES :]]

    def _compare_with_reference(
        self, optimizer: Optimizer, held: Held, codes: torch.Tensor, gradient: torch.Tensor | None, iteration: int
    ) -> None:
        """Compare a weight with its first sample, and its gradient with what must change it."""
        parameter = held.parameter
        reference = parameter.reference
        rate = held.group.get("lr")
        row = WeightRow(iteration, rate if isinstance(rate, float) else 1.0)
        parameter.rows.append(row)
        if reference is not None:
            if (reference.shape, reference.dtype) != (codes.shape, codes.dtype):
                row.changed = 1.0
                return
            self.batch.add("changed", _share_changed, (codes, reference), row, "changed")
        if gradient is not None and (values := sample(parameter.weight)) is not None:
            gradient = sampled_view(local_part(gradient))
            squares = mean_squares(optimizer, held)
            measure = functools.partial(_share_movable, held.group, values.relative, len(squares))
            key = id(held.group), values.relative, len(squares)
            self.batch.add(key, measure, values.with_tensors(gradient, *squares), row, "movable")

    def check_masters(self, optimizer: Optimizer) -> None:
        """Compare the weights of the last forward with the master weights, now and before the last step."""
        for held, iteration, former in self._masters.pop(optimizer, ()):
            parameter = held.parameter
            master = master_of(optimizer, held)
            weight = sample(parameter.weight, held.span)
            if master is not None and weight is not None:
                row = MasterRow(iteration)
                parameter.master_rows = [*parameter.master_rows, row][-MASTER_ROWS:]
                measure = functools.partial(_shares_apart, weight.relative)
                tensors = weight.with_tensors(sampled_view(master), former)
                self.batch.add(("apart", weight.relative), measure, tensors, row, "apart")

    def check_writes(self, stepped: SteppedParameters, iteration: int) -> bool:
        """Compare weights that were written more often since the last step than ever between two steps; return whether
        there are any."""
        writes = [*map(operator.sub, map(_VERSION, stepped.parameters), stepped.versions)]
        if not any(map(operator.gt, writes, map(_MOST_WRITES, stepped.parameters))):
            return False
        for parameter, count in zip(stepped.parameters, writes, strict=True):
            if count > parameter.most_writes:
                parameter.most_writes = count
                weight = local_part(parameter.weight)
                if parameter.samples and not is_quantized(weight):
                    row = WriteRow(iteration, [sampled_at for sampled_at, _ in parameter.samples])
                    parameter.writes.append(row)
                    tensors = (*[values for _, values in parameter.samples], sampled_view(weight, THIN))
                    self.batch.add("distances", _distances, tensors, row, "distances")
        return True


def note_versions(stepped: SteppedParameters) -> None:
    """Note the versions of the weights after a step."""
    stepped.versions = [*map(_VERSION, stepped.parameters)]


def _share_changed(codes: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return _shares(codes != reference)


def _shares(are_true: torch.Tensor) -> torch.Tensor:
    return are_true.flatten(1).float().mean(1)


def _shares_apart(
    relative: float,
    values: torch.Tensor,
    master: torch.Tensor,
    former: torch.Tensor,
    absolute: torch.Tensor | None = None,
) -> torch.Tensor:
    shares = [_shares(exceeds_rounding(relative, values, tensor, absolute)) for tensor in (master, former)]
    return torch.stack(shares, 1)


def _distances(*samples: torch.Tensor) -> torch.Tensor:
    """Return the distances of zero and all samples from each other, [weights, points * points]: exactly 0 for equal
    ones."""
    points = torch.stack([torch.zeros_like(samples[0]), *samples], 1).float().flatten(2)
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist").flatten(1)


def _share_movable(
    group: Mapping[str, Any],
    relative: float,
    has_squares: int,
    values: torch.Tensor,
    gradient: torch.Tensor,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Return the shares of elements where a gradient's update, without momentum, far exceeds the weight's resolution.

    Args:
        group: the options of the optimizer.
        relative: the relative rounding error of the weight's format.
        has_squares: whether the mean squares of gradients before this step are among the other tensors.
        values, gradient: the samples.
        *others: the mean squares, if any; for a quantized weight, the rounding error near 0.
    """
    update = gradient.float().abs()
    if "betas" in group:  # Adam and its variants: at most the learning rate, and less after larger gradients
        usual = update
        if has_squares:
            decay = float(group["betas"][1])
            usual = torch.maximum(update, (decay * others[0].float() + (1 - decay) * update.square()).sqrt())
        update = update / (usual + float(group.get("eps") or 0.0))
    update = update * (group.get("lr") or 0.0)
    is_quantized_weight = len(others) > has_squares
    unit = 2 * relative if is_quantized_weight else torch.finfo(values.dtype).eps
    floor = LIKELY * unit * values.float().abs()
    if is_quantized_weight:
        floor = floor + 4 * LIKELY * others[-1]
    return _shares(torch.isfinite(update) & (update > floor))
