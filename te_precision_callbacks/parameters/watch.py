"""Measures the parameters of a model at the steps of its optimizers: their gradients, their weights, and what other
code than the optimizer writes into them. The rules in ``diagnosis/rules`` judge the measurements.

Gradients are checked on the host in every step, and their largest magnitudes on the device. Weights are sampled in few
steps.
"""

from __future__ import annotations

import functools
import itertools
import operator
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.layers.folding import numbers_of
from te_precision_callbacks.parameters.gradients import GradientClearing, GradientSizes, check_gradients
from te_precision_callbacks.parameters.optimizers import ParameterList, SteppedParameters, TrainedModel, gradients_of
from te_precision_callbacks.parameters.parameter import Gap, Parameter, Problem
from te_precision_callbacks.parameters.weight_samples import local_part
from te_precision_callbacks.parameters.weights import VERSION, UpdateShares, WeightSamples
from te_precision_callbacks.te.tensors import is_quantized

AT_ZERO = 0.005
RISEN = 0.05
RISING_STEPS = 5
"""Share of the largest learning rate that counts as 0, the share it rises to, and the steps in which it rises."""

RISE = 10.0
MOST_RISES = 32
"""The factor by which the learning rate rises in one step, and the most rises that are noted."""

_GRADIENT = operator.attrgetter("grad")
_LAYOUT = operator.attrgetter("layout")
_SHAPE = operator.attrgetter("shape")
_IS_THERE = functools.partial(operator.is_not, None)
_GAP = operator.attrgetter("gap")
_AT_STEP = operator.attrgetter("at_step")
_PLAIN = frozenset(PLAIN)
_DENSE = frozenset([torch.strided])


LOW = 0.01
"""Share of the largest learning rate below which the effects of steps are not measured."""


class RateRise(NamedTuple):
    """The learning rate of a parameter group in two steps: far smaller and not 0, then large."""

    before: float
    now: float


@dataclass(eq=False)
class LearningRate:
    """The learning rate of an optimizer: its largest value, and its rise after it has fallen to 0.

    A rise in one step to most of the largest value is a restart, as of CosineAnnealingWarmRestarts.

    Attributes:
        of_groups: the learning rates of the parameter groups in the last step.
    """

    largest: float = 0.0
    last: float = 0.0
    zero_at: int | None = None
    rises: int = 0
    of_groups: Sequence[float] = ()

    def note(self, rates: Sequence[float], iteration: int) -> list[RateRise]:
        """Note the learning rates of the parameter groups, and return their large rises in this step."""
        groups = map(RateRise, self.of_groups, rates)
        risen = [group for group in groups if group.now >= RISE * group.before > 0]
        self.of_groups = rates
        rate = max(rates, default=0.0)
        self.largest = max(self.largest, rate)
        if rate <= AT_ZERO * self.largest:
            self.zero_at = iteration
            self.rises = 0
        elif rate < self.last or rate - self.last > self.largest / 2:
            self.zero_at = None
        elif rate > self.last:
            self.rises += 1
        self.last = rate
        return risen

    @property
    def is_low(self) -> bool:
        """Return whether updates vanish, as at the end of a decay."""
        return self.last < LOW * self.largest

    @property
    def rises_again(self) -> bool:
        return self.zero_at is not None and self.rises >= RISING_STEPS and self.last >= RISEN * self.largest


class ParameterWatch:
    """Measures the parameters of a model from :meth:`begin` to :meth:`remove`.

    Attributes:
        listed: the parameters, in total and of each optimizer.
        clearing: whether gradients are cleared between steps.
        sizes: the largest magnitudes of gradients.
        updates: the effects of optimizer steps in collection steps.
        schedules: the learning rates of the optimizers.
        ended: the last iteration that ended.
        ended_gaps: the gaps that have ended; the caller clears it.
        last_update: the last iteration with an optimizer step at a learning rate above 0, or the first iteration.
        has_updated: whether there was one.
        stepped_at: the last iteration with a step of an optimizer.
        had_gradients: whether parameters had gradients at the last step.
    """

    def __init__(self, model: TrainedModel, scalars: ScalarBuffer, failures: ObservationFailures) -> None:
        self.listed = ParameterList(model)
        self.clearing = GradientClearing(failures)
        self.sizes = GradientSizes()
        self.updates = UpdateShares(scalars)
        self.schedules: weakref.WeakKeyDictionary[Optimizer, LearningRate] = weakref.WeakKeyDictionary()
        self.ended = 0
        self.ended_gaps: list[tuple[Parameter, Gap]] = []
        self.last_update = 0
        self.has_updated = False
        self._weights = WeightSamples()
        self._failures = failures
        self._first: int | None = None
        self.stepped_at = -1
        self.had_gradients = False
        self._rises_left = MOST_RISES
        self._rising = 0  # schedules that rise again
        self._is_sampled = True  # the next step of an optimizer
        self._has_sampled = False

    def begin(self, iteration: int) -> None:
        if self._first is None:
            self._first = iteration
            self.last_update = iteration

    def remove(self) -> None:
        for parameter in self.parameters:
            if parameter.gap is not None:
                parameter.gap.unhook()
        self.listed.clear()
        self.clearing.clear()

    @property
    def parameters(self) -> list[Parameter]:
        return [*self.listed.parameters.values()]

    @property
    def steps(self) -> int:
        """The number of steps of the optimizer with most."""
        return max([stepped.steps for stepped in self.listed.stepped.values()], default=0)

    # ------------------------------------------------------------------ a step of an optimizer

    def before_step(self, optimizer: Optimizer, iteration: int, order: int, *, is_collected: bool) -> list[RateRise]:
        """Check gradients; in few steps also sample weights and master weights. Called without autograd.

        Args:
            order: the step's place among the iteration's GEMMs.
            is_collected: whether this is a collection step.

        Returns:
            The rises of the learning rate in this step, at most :data:`MOST_RISES` in a run.
        """
        rises: list[RateRise] = []
        with self._failures.guard("checking the parameters of", type(optimizer).__name__):
            stepped = self.listed.stepped_by(optimizer)
            if not stepped.held:
                return rises
            stepped.steps += 1
            rates = []
            for group in stepped.groups:
                rate = group.get("lr", 1.0)
                if isinstance(rate, torch.Tensor) or rate:
                    self.last_update = iteration
                    self.has_updated = True
                if isinstance(rate, (int, float)):
                    rates.append(float(rate))
            schedule = self.schedules.setdefault(optimizer, LearningRate())
            rises = schedule.note(rates, iteration)[: self._rises_left]
            self._rises_left -= len(rises)
            stepped.stepped_at = self.stepped_at = iteration
            for parameter in stepped.parameters:
                parameter.held_until = iteration
            gradients = self._check_gradients(optimizer, stepped, iteration, order)
            if stepped.versions:
                self._weights.check_writes(stepped, iteration)
            self.clearing.end(optimizer)
            if is_collected and not schedule.is_low:
                self.updates.before_step(optimizer, stepped, gradients)
            if self._is_sampled:
                self._has_sampled = True
                self._weights.before_step(optimizer, stepped, iteration)
                for parameter in self.listed.parameters.values():
                    parameter.has_gradient |= parameter.weight.grad is not None
            self._weights.batch.launch()
        return rises

    def _check_gradients(
        self, optimizer: Optimizer, stepped: SteppedParameters, iteration: int, order: int
    ) -> list[torch.Tensor | None]:
        gradients: list[torch.Tensor | None] = [*map(_GRADIENT, stepped.tensors)]
        has_all = (
            stepped.are_plain
            and _PLAIN.issuperset(map(type, gradients))
            and _DENSE.issuperset(map(_LAYOUT, gradients))
            and all(map(operator.eq, map(_SHAPE, gradients), map(_SHAPE, stepped.tensors)))
        )
        if not has_all:
            gradients = gradients_of(stepped.held)
        are_present = [*map(_IS_THERE, gradients)]
        parameters = [*itertools.compress(stepped.parameters, are_present)]
        self.had_gradients = bool(parameters) or any(tensor.grad is not None for tensor in stepped.tensors)  # sparse
        present = [gradient for gradient in gradients if gradient is not None]
        self.sizes.before_step(optimizer, parameters, present, order)
        if not (has_all and all(map(_AT_STEP, stepped.parameters))) or any(map(_GAP, stepped.parameters)):
            self.ended_gaps += check_gradients(zip(stepped.parameters, stepped.tensors, strict=True), iteration)
        return gradients

    def after_step(self, optimizer: Optimizer) -> None:
        stepped = self.listed.stepped.get(optimizer)
        if stepped is None or not stepped.held:
            return
        with self._failures.guard("checking a step of", type(optimizer).__name__):
            stepped.versions = [*map(VERSION, stepped.parameters)]
            self.updates.after_step()
            if self._is_sampled:
                self._weights.after_step()
                self.clearing.begin(optimizer, stepped, self.stepped_at)

    def before_clipping(self, parameters: Iterable[torch.Tensor]) -> None:
        if not self.listed.parameters:
            self.listed.refresh()
        listed = self.listed.parameters
        gradients = {
            listed[id(weight)]: weight.grad for weight in parameters if weight.grad is not None and id(weight) in listed
        }
        self.sizes.before_clipping(gradients)

    def note_checkpoint(self) -> None:
        """Sample the weights before the next step of an optimizer: code may restore them later."""
        self._is_sampled = True

    # ------------------------------------------------------------------ after a debug iteration

    def stepped(self, iteration: int) -> Sequence[Parameter]:
        """Return what optimizers have stepped in an iteration, unless it is quantized, in the order of the model."""
        in_order = [stepped.in_order for stepped in self.listed.stepped.values() if stepped.stepped_at == iteration]
        if len(in_order) < 2:
            return in_order[0] if in_order else []
        are_stepped = set(itertools.chain.from_iterable(in_order))
        return [parameter for parameter in self.parameters if parameter in are_stepped]

    @torch.no_grad()
    def end_step(self, iteration: int, stepped: Sequence[Parameter]) -> tuple[list[Problem], bool]:
        """End an iteration; return the problems of inf and nan, and whether there are new measurements."""
        self.ended = iteration
        broken: list[Problem] = []
        is_new = True
        with self._failures.guard("checking", "the parameters"):
            if not self.steps:
                if not self.listed.parameters:
                    self.listed.refresh()
                trained = [
                    (parameter, parameter.weight) for parameter in self.parameters if parameter.weight.requires_grad
                ]
                self.ended_gaps += check_gradients(trained, iteration)
            rising = sum([schedule.rises_again for schedule in self.schedules.values()])
            is_new = self._weights.batch.read() or self._has_sampled or self.is_due or rising != self._rising
            self._rising = rising
            self._is_sampled &= not self._has_sampled
            self._has_sampled = False
            broken = self.sizes.end_step(iteration, stepped)
            if self.is_due:
                self.listed.refresh()
            is_new = is_new or any(map(_GAP, self.listed.parameters.values()))
        self._is_sampled |= is_due(iteration + 1 - (self._first or 0))
        return broken, is_new

    @property
    def is_due(self) -> bool:
        """Return whether ranks compare parameters after the iteration that ended; equal on all ranks."""
        return is_due(self.ended - (self._first or 0))

    def take_vanished(self) -> dict[tuple[int, int | None], list[str]]:
        """Return first and last iteration -> matrices with gradients that have become 0; None if they still are.

        Layers in lists of a block are left out: experts may get no tokens.
        """
        vanished: dict[tuple[int, int | None], list[str]] = {}
        for span, parameters in self.sizes.vanished.items():
            for parameter in parameters:
                if parameter.is_matrix and len(numbers_of(parameter.name)) < 2:
                    vanished.setdefault(span, []).append(parameter.name)
        self.sizes.vanished.clear()
        return vanished

    @torch.no_grad()
    def end(self, iteration: int) -> list[Problem]:
        """Read all measurements at the end of a run, and return all weights that are not finite."""
        self._weights.batch.read()
        self._weights.batch.read()
        plain = [parameter for parameter in self.parameters if not is_quantized(local_part(parameter.weight))]
        return self.sizes.end_step(iteration, plain, at_last=True)


def is_due(step: int) -> bool:
    """Return whether weights are sampled in a step, counted from the attach; equal on all ranks."""
    return step < 4 or step % 100 == 0 or step & (step - 1) == 0
