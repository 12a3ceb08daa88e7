"""Finds parameters that do not train: missing gradients, weights that never change, low-precision weights that
differ from their master weights, and weights that other code than the optimizer overwrites.

Gradients are checked on the host in every step. Weights are sampled in few steps, and no longer once they have changed,
unless the optimizer holds master weights. The versions of weights, which writes in place raise, are read in each step,
on the host; a weight is compared with its last sample if code has written it more often than ever between two steps.
"""

from __future__ import annotations

import functools
import gc
import itertools
import operator
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.numerics.formats import E5M2
from te_precision_callbacks.base.numerics.layouts import NVFP4, PLAIN
from te_precision_callbacks.base.optimizers import held_ids_of_process
from te_precision_callbacks.base.vocabulary import ENDS_BY_A_GRADIENT, ParameterProblem
from te_precision_callbacks.layers.folding import form_of, numbers_of
from te_precision_callbacks.layers.forwards import is_checkpoint_without_backward, outside_of_dynamo
from te_precision_callbacks.parameters.finite_gradients import Broken, FiniteGradients
from te_precision_callbacks.parameters.updates import TrainedModel
from te_precision_callbacks.parameters.weight_samples import (
    BatchedChecks,
    Compare,
    WeightSample,
    copy_all,
    is_narrow,
    largest_of_each,
    local_part,
    raw_codes,
    sample,
    sampled_view,
    stack_equal,
)
from te_precision_callbacks.te.tensors import fp8_format, is_quantized, scaling_mode

WITHOUT_GRADIENT = 6
"""Optimizer steps after which a parameter without a gradient is reported."""

MAX_IDLE = 64
"""The same for a parameter whose module does not run while a similar parameter has a gradient: blocks may be skipped at
random, experts may get no tokens.
"""

LOST = 8
"""Consecutive steps without a gradient, although the module runs and earlier steps had one."""

UNSTEPPED = 20
"""Consecutive debug iterations without a step of optimizers that stepped before."""

UNCHANGED = 3
SPAN = 6
"""Minimum of sampled steps that should have changed a weight, and of the steps that they span."""

FEW_CHANGED = 0.05
NEARLY_ALL = 0.9
"""Largest share of changed elements in a weight that hardly changes; smallest share of matrices that hardly change, or
have gradients of 0, for a problem of the model.
"""

LIKELY = 4.0
"""An update of this many units in the last place must change a weight."""

AT_ZERO = 0.005
RISEN = 0.05
RISING_STEPS = 5
"""Share of the largest learning rate that counts as 0, the share it rises to, and the steps in which it rises."""

RISE = 10.0
MOST_RISES = 32
"""The factor by which the learning rate rises in one step, and the most rises that are noted."""

DECAYS = 0.02
"""Share of a weight that weight decay removes in a step: half of it in 34 steps."""

IDLE = 60
"""Steps between the first and the last sampled gradient of 0 of a parameter whose similar parameters have gradients."""

OTHERWISE = 8.0
REPLACED = 0.5
"""An overwritten weight differs from its last sample by so many times the ordinary change, and by this share of its
norm."""

THIN = 4
KEPT = 8
"""Every how many columns of a sample are kept for comparisons with overwritten weights, and the samples of each weight
that are kept: the first one and the last ones."""

MOST_LEFT_OUT = 8
"""The most weights of a shape without a master weight, for which those with one are found by their values."""

LATE = 8
"""Steps after which a weight that is equal to an earlier sample again was restored."""

APART = 0.01
APART_CHECKS = 2
"""Share of sampled elements that differ from the master weight by more than rounding, and the consecutive checks that
must find it.
"""

_GRADIENT = operator.attrgetter("grad")
_LAYOUT = operator.attrgetter("layout")
_SHAPE = operator.attrgetter("shape")
_VERSION = operator.attrgetter("weight._version")
_NAME = operator.attrgetter("name")
_MOST_WRITES = operator.attrgetter("most_writes")
_GAP = operator.attrgetter("gap")
_AT_STEP = operator.attrgetter("at_step")
_PLAIN = frozenset(PLAIN)
_DENSE = frozenset([torch.strided])

_NEVER_REACHED = ("no_gradient", "checkpointed", "frozen_held")

_RANGES = "_get_model_param_range_map"
"""Identifies a distributed optimizer of Megatron."""


SteppedWeight = tuple[str, torch.Tensor, torch.nn.Module]
"""The name of a parameter, the parameter and its module."""


class Problem(NamedTuple):
    """A problem of a parameter.

    Attributes:
        name: the parameter; empty for a problem of the model.
        number: number of steps, or percentage of elements.
    """

    what: ParameterProblem
    name: str
    since: int
    number: float


@dataclass(eq=False)
class _Gap:
    """Consecutive optimizer steps without a gradient of a parameter.

    Attributes:
        called: number of steps with a training forward of the module.
        reached, ran: whether a backward reached the parameter, and the module ran in training, since the last step.
        checkpointed: number of forwards in a reentrant checkpoint without an input that needs a gradient.
    """

    since: int
    steps: int = 0
    called: int = 0
    reached: bool = False
    ran: bool = False
    checkpointed: int = 0
    hooks: tuple[RemovableHandle, ...] = ()

    def unhook(self) -> None:
        for hook in self.hooks:
            hook.remove()


@dataclass(eq=False)
class _Writes:
    """Changes of a weight outside of its optimizer.

    Attributes:
        samples: samples of the values: iteration, a stack of samples, and the index in it.
        found: the problem of the weight, the iteration, and that of the sample; or None.
    """

    samples: tuple[tuple[int, torch.Tensor, int], ...] = ()
    found: tuple[ParameterProblem, int, int] | None = None

    def note(self, what: ParameterProblem, iteration: int, of_sample: int, share: float) -> None:
        if share == 1 and self.found is None:
            self.found = what, iteration, of_sample


@dataclass(eq=False)
class _Parameter:
    """State of a parameter's checks.

    Attributes:
        at_step: whether a gradient exists at the optimizer's step.
        longest: steps of the longest earlier gap.
        held_until: last iteration with a step of the parameter's optimizer, or -1.
        reference: first sample, until a later one differs in more than a few elements.
        has_moved: whether an element of a later sample differs.
        still: iterations of the first sample, and of the last with few differences, or -1.
        moves: iterations with an optimizer step that should have changed it.
        zeroed: last consecutive sampled iterations with only gradients of 0.
        apart_before: share of elements that differ from the master weight before the last step.
        checks: last checks against the master weight: ``apart``, ``late`` or empty, iteration and percentage.
        kept: last sampled iterations, and whether the next backward added to its uncleared gradient.
        removed: first iteration in which its gradient was there after the backward, but not at the optimizer's step,
            and the version of the weight; or None.
        most_writes: maximum number of writes to it between two optimizer steps.
    """

    name: str
    weight: torch.nn.Parameter
    module: torch.nn.Module
    has_gradient: bool = False
    at_step: bool = False
    gap: _Gap | None = None
    longest: int = 0
    held_until: int = -1
    reference: torch.Tensor | None = None
    has_moved: bool = False
    still: tuple[int, int] = (-1, -1)
    moves: tuple[int, ...] = ()
    zeroed: tuple[int, ...] = ()
    writes: _Writes = field(default_factory=_Writes)
    apart_before: float = 0.0
    checks: tuple[tuple[str, int, float], ...] = ()
    kept: dict[int, bool] = field(default_factory=dict)
    removed: tuple[int, int] | None = None
    most_writes: int = 0

    @property
    def is_left_out(self) -> bool:
        gap = self.gap
        return gap is not None and not gap.called and gap.steps >= max(MAX_IDLE, 4 * self.longest)

    def note_expected(self, iteration: int, share: float) -> None:
        if share > 0:
            self.moves = (*self.moves, iteration)

    def note_gradient(self, iteration: int, share: float) -> None:
        self.zeroed = (*self.zeroed, iteration) if share == 0 else ()

    def note_changed(self, iteration: int, share: float) -> None:
        self.has_moved |= share > 0
        if share > FEW_CHANGED:
            self.reference = None
        else:
            self.still = self.still[0], iteration

    def note_before(self, share: float) -> None:
        self.apart_before = share

    def note_apart(self, iteration: int, share: float) -> None:
        what = "" if share < APART else "late" if self.apart_before < share / 8 else "apart"
        self.checks = (*self.checks, (what, iteration, 100 * share))[-APART_CHECKS:]

    def note_kept(self, iteration: int, *, is_kept: bool) -> None:
        self.kept[iteration] = is_kept or self.kept.get(iteration, False)
        if len(self.kept) > UNCHANGED:
            del self.kept[min(self.kept)]


class RateRise(NamedTuple):
    """The learning rate of a parameter group in two steps: far smaller and not 0, then large."""

    before: float
    now: float


class _Clearing(NamedTuple):
    """The gradients of an optimizer between a sampled step and its next step.

    Attributes:
        kept: parameter -> whether its old gradient was there, and not 0, in each backward that added to it; None before
            the first one.
    """

    iteration: int
    kept: dict[_Parameter, torch.Tensor | bool | None]


class _Held(NamedTuple):
    """A parameter in an optimizer.

    Attributes:
        tensor: the stepped tensor: the parameter or its master weight.
        start: offset of a partial master weight in the flattened parameter; None for a whole one.
    """

    parameter: _Parameter
    tensor: torch.Tensor
    group: Mapping[str, Any]
    start: int | None = None

    @property
    def span(self) -> range | None:
        if self.start is None:
            return None
        return range(self.start, self.start + self.tensor.numel())


@dataclass(eq=False)
class _OfOptimizer:
    """The parameters that an optimizer steps, in lists: every step reads them, and a loop in Python takes ten times as
    long as a function of C over a list.

    Attributes:
        ids: the ids of the optimizer's groups and tensors for which the lists are right.
        groups: the parameter groups that step a parameter.
        tensors: the stepped tensor of each parameter.
        stepped: the parameters that are not quantized, in the order of the model.
        are_stepped: whether all tensors are parameters of the model, of a plain class.
        versions: the version of each parameter after the last step; empty before it.
    """

    ids: Sequence[Sequence[int]]
    held: list[_Held]
    groups: Sequence[Mapping[str, Any]]
    parameters: Sequence[_Parameter]
    tensors: Sequence[torch.Tensor]
    stepped: Sequence[SteppedWeight]
    are_stepped: bool
    versions: Sequence[int] = ()

    @classmethod
    def of(cls, ids: Sequence[Sequence[int]], held: list[_Held], all_parameters: Iterable[_Parameter]) -> _OfOptimizer:
        parameters = [entry.parameter for entry in held]
        are_held = set(parameters)
        return cls(
            ids=ids,
            held=held,
            groups=[*{id(entry.group): entry.group for entry in held}.values()],
            parameters=parameters,
            tensors=[*map(operator.attrgetter("tensor"), held)],
            stepped=[
                (one.name, one.weight, one.module)
                for one in all_parameters
                if one in are_held and (type(one.weight) in PLAIN or not is_quantized(one.weight))
            ],
            are_stepped=all(entry.tensor is entry.parameter.weight and type(entry.tensor) in PLAIN for entry in held),
        )


@dataclass(eq=False)
class _Schedule:
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
    def rises_again(self) -> bool:
        return self.zero_at is not None and self.rises >= RISING_STEPS and self.last >= RISEN * self.largest


class ParameterWatch:
    """Checks the parameters of a model from :meth:`begin` to :meth:`remove`.

    Attributes:
        checked: rules that had enough data.
        last_update: the last iteration with an optimizer step at a learning rate above 0.
        unmatched: the optimizers with tensors that are not found among the weights, if a weight in 16 bits or fewer is
            in none. Nothing is concluded from a weight without an optimizer then.
        around_backward: a context around each backward, while gradients of a sampled step may be cleared.
    """

    def __init__(self, model: TrainedModel, failures: ObservationFailures) -> None:
        self.checked: set[str] = set()
        self.around_backward: list[Callable[[], AbstractContextManager[None]]] = []
        self._model = model
        self._failures = failures
        self._iteration = 0
        self._parameters: dict[int, _Parameter] = {}
        self._listed: list[tuple[int, int]] | None = None  # id and size of the parameters at the last refresh
        self._held: weakref.WeakKeyDictionary[Optimizer, _OfOptimizer] = weakref.WeakKeyDictionary()
        # Id of each list of weights -> the list, of all optimizers that stepped in the iteration of the last step.
        self._stepped: dict[int, Sequence[SteppedWeight]] = {}
        self._stepped_at = -1
        self._unmatched: weakref.WeakKeyDictionary[Optimizer, bool] = weakref.WeakKeyDictionary()
        self._masters: weakref.WeakKeyDictionary[Optimizer, list[tuple[_Held, int, torch.Tensor]]]
        self._masters = weakref.WeakKeyDictionary()
        self._clearing: weakref.WeakKeyDictionary[Optimizer, _Clearing] = weakref.WeakKeyDictionary()
        self._unread: list[_Clearing] = []
        self._batches = BatchedChecks()
        self._pending_read: Callable[[], None] | None = None
        self._reported: set[tuple[str, str]] = set()
        self._arrived: list[Problem] = []
        self._decays: dict[str, Problem] = {}
        self.last_update = 0
        self.unmatched: list[str] = []
        self._first = 0
        self._ended = 0
        self._optimizer_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._schedules: weakref.WeakKeyDictionary[Optimizer, _Schedule] = weakref.WeakKeyDictionary()
        self._rises: list[RateRise] = []
        self._rises_left = MOST_RISES
        self._finite = FiniteGradients()
        self._is_due = True
        self._has_sampled = False
        self._has_begun = False
        self._has_updated = False

    def begin(self, iteration: int) -> None:
        if not self._has_begun:
            self._has_begun = True
            self._first = iteration
            self._iteration = iteration
            self.last_update = iteration

    def remove(self) -> None:
        for parameter in self._parameters.values():
            if parameter.gap is not None:
                parameter.gap.unhook()
        for cache in (self._parameters, self._held, self._unmatched, self._masters, self._clearing, self._unread):
            cache.clear()
        self._stepped.clear()
        self.around_backward.clear()
        self._listed = None

    # ------------------------------------------------------------------ before a step of an optimizer

    def before_step(self, optimizer: Optimizer, iteration: int, place: int) -> None:
        """Check gradients; in few steps also sample weights and master weights. Called without autograd."""
        self._iteration = iteration
        with self._failures.guard("checking the parameters of", type(optimizer).__name__):
            known = self._known(optimizer)
            held = known.held
            if not held:
                return
            self._optimizer_steps[optimizer] = self._optimizer_steps.get(optimizer, 0) + 1
            rates = []
            for group in known.groups:
                rate = group.get("lr", 1.0)
                if isinstance(rate, torch.Tensor) or rate:
                    self.last_update = iteration
                    self._has_updated = True
                if isinstance(rate, (int, float)):
                    rates.append(float(rate))
            self._rises += self._schedules.setdefault(optimizer, _Schedule()).note(rates, iteration)
            if self._stepped_at != iteration:
                self._stepped_at = iteration
                self._stepped.clear()
            self._stepped[id(known.stepped)] = known.stepped
            for parameter in known.parameters:
                parameter.held_until = iteration
            gradients: list[torch.Tensor | None] = [*map(_GRADIENT, known.tensors)]
            has_all = (
                known.are_stepped
                and _PLAIN.issuperset(map(type, gradients))
                and _DENSE.issuperset(map(_LAYOUT, gradients))
                and all(map(operator.eq, map(_SHAPE, gradients), map(_SHAPE, known.tensors)))
            )
            if not has_all:
                gradients = _gradients(held)
            named = zip(map(_NAME, known.parameters), gradients, strict=True)
            self._finite.before_step(optimizer, [(name, one) for name, one in named if one is not None], place)
            if not (has_all and all(map(_AT_STEP, known.parameters))) or any(map(_GAP, known.parameters)):
                self._check_gradients(zip(known.parameters, known.tensors, strict=True))
            self._check_writes(known)
            self._compare_masters(optimizer)
            self._end_clearing(optimizer)
            if self._is_due:
                self._has_sampled = True
                kept: dict[_Parameter, torch.Tensor | bool | None] = {}
                for parameter, tensor, _, _ in held:
                    if tensor is parameter.weight and tensor.grad is not None:
                        kept[parameter] = None
                self._clearing[optimizer] = _Clearing(iteration, kept)
                self.around_backward[:] = [self._check_clearing]
                self._note_decay(optimizer, held)
                self._sample(optimizer, held, gradients)
                for parameter in self._parameters.values():
                    parameter.has_gradient |= parameter.weight.grad is not None
            self._batches.launch()

    def before_clipping(self, parameters: Iterable[torch.Tensor]) -> None:
        if not self._parameters:
            self._refresh()
        named = []
        for parameter in parameters:
            known = self._parameters.get(id(parameter))
            if known is not None and parameter.grad is not None:
                named.append((known.name, parameter.grad))
        self._finite.before_clipping(named)

    def after_step(self, optimizer: Optimizer) -> None:
        known = self._held.get(optimizer)
        if known is not None:
            known.versions = [*map(_VERSION, known.parameters)]

    def _check_writes(self, known: _OfOptimizer) -> None:
        """Compare weights that were written more often since the last step than ever between two steps.

        Regular writes, such as clamping or the copy of master weights, are thus compared once.
        """
        if not known.versions:
            return
        counts = [*map(operator.sub, map(_VERSION, known.parameters), known.versions)]
        if any(map(operator.gt, counts, map(_MOST_WRITES, known.parameters))):
            for parameter, count in zip(known.parameters, counts, strict=True):
                if count > parameter.most_writes:
                    parameter.most_writes = count
                    self._compare_with_samples(parameter)

    def _compare_with_samples(self, parameter: _Parameter) -> None:
        weight = local_part(parameter.weight)
        samples = [(iteration, stack[index]) for iteration, stack, index in parameter.writes.samples]
        if weight.dim() < 2 or is_quantized(weight) or not samples:
            return
        now = sampled_view(weight, THIN)
        iteration = self._iteration
        last, at_last = samples[-1]
        self._has_sampled = True
        checks: list[tuple[ParameterProblem, int, Compare, tuple[torch.Tensor, ...]]] = [
            ("emptied", last, _is_emptied, (now, at_last))
        ]
        for earlier, at_earlier in samples[:-1]:
            if iteration - earlier >= LATE:
                checks.append(("restored", earlier, _is_restored, (now, at_earlier, at_last)))
        if len(samples) > 1:
            before, at_before = samples[-2]
            span = max(1.0, (iteration - last) / (last - before))
            checks.append(("replaced", last, functools.partial(_is_replaced, span), (now, at_before, at_last)))
        for what, of_sample, compare, tensors in checks:
            note = functools.partial(parameter.writes.note, what, iteration, of_sample)
            self._batches.add((what, iteration, of_sample, last), compare, tensors, note)

    def _refresh(self) -> None:
        """List the parameters, unless they are the same as before; their names take long to find."""
        modules: list[torch.nn.Module | None] = [*self._model.roots]
        weights: list[torch.nn.Parameter | None] = []
        seen: set[int] = set()
        for module in modules:  # which grows; Module.modules() calls a generator for each level of the tree
            if module is not None and id(module) not in seen:
                seen.add(id(module))
                weights += module._parameters.values()
                modules += module._modules.values()
        listed = [(id(weight), weight.numel()) for weight in weights if weight is not None]
        if listed == self._listed:
            return
        self._listed = listed
        known = self._parameters
        self._parameters = {}
        for name, weight, module in self._model.named_parameters():
            if id(weight) not in known:
                self._held.clear()
            if local_part(weight).numel():
                self._parameters[id(weight)] = known.get(id(weight)) or _Parameter(name, weight, module)
        if len(self._parameters) != len(known):
            self._held.clear()

    @property
    def broken(self) -> tuple[int, int] | None:
        return self._finite.broken

    def holds(self, optimizer: Optimizer) -> bool:
        """Return whether an optimizer steps parameters of the model."""
        return bool(self._known(optimizer).held)

    def _known(self, optimizer: Optimizer) -> _OfOptimizer:
        # Groups that grow, whose parameters are replaced, or that load_state_dict() has replaced.
        ids = [[id(group), *map(id, group["params"])] for group in optimizer.param_groups]
        known = self._held.get(optimizer)
        if known is not None and known.ids == ids:
            return known
        self._refresh()
        owners = dict(self._parameters)
        for parameter in self._parameters.values():
            master = getattr(parameter.weight, "main_param", None)
            if master is not None:
                owners[id(master)] = parameter
        starts = _starts_of_shards([state.weight for state in self._parameters.values()])
        held: list[_Held] = []
        left: list[tuple[torch.Tensor, Mapping[str, Any]]] = []
        for group in optimizer.param_groups:
            for tensor in group["params"]:
                if id(tensor) in owners:
                    held.append(_Held(owners[id(tensor)], tensor, group, starts.get(id(tensor))))
                elif tensor.requires_grad or tensor.grad is not None:
                    left.append((tensor, group))
        matched = self._match_by_values(left, held)
        self._unmatched[optimizer] = bool(left) and not matched
        known = _OfOptimizer.of(ids, held + matched, self._parameters.values())
        self._held[optimizer] = known
        return known

    def _match_by_values(self, left: list[tuple[torch.Tensor, Mapping[str, Any]]], held: list[_Held]) -> list[_Held]:
        """Find the weights of an optimizer's master weights, by shape, order and values.

        All or none are found, since tensors of another model may have some values in common, such as norms of 1. If
        weights of a shape are left out of the optimizer, values decide which; where all are equal, as in biases, the
        other weights of their modules decide.
        """
        taken = {entry.parameter for entry in held}
        tensors: dict[torch.Size, list[torch.Tensor]] = {}
        for tensor, _ in left:
            tensors.setdefault(tensor.shape, []).append(tensor)
        weights: dict[torch.Size, list[_Parameter]] = {shape: [] for shape in tensors}
        for parameter in self._parameters.values():
            if parameter.weight.requires_grad and parameter not in taken and parameter.weight.shape in weights:
                weights[parameter.weight.shape].append(parameter)
        if any(not 0 <= len(weights[shape]) - len(tensors[shape]) <= MOST_LEFT_OUT for shape in tensors):
            return []
        alike = _alike(tensors, weights)
        partners: dict[int, _Parameter] = {}
        left_out: set[torch.nn.Module] = set()
        for shape, of_shape in tensors.items():
            choices = [alike[id(tensor)] for tensor in of_shape]
            if len(of_shape) < len(weights[shape]) and all(len(choice) == 1 for choice in choices):
                chosen = [choice[0] for choice in choices]
                partners.update(zip(map(id, of_shape), chosen, strict=True))
                left_out.update(parameter.module for parameter in weights[shape] if parameter not in chosen)
        for shape, of_shape in tensors.items():
            if id(of_shape[0]) not in partners:
                candidates = [parameter for parameter in weights[shape] if parameter.module not in left_out]
                if len(candidates) != len(of_shape):
                    return []
                partners.update(zip(map(id, of_shape), candidates, strict=True))
        matched = [_Held(partners[id(tensor)], tensor, group) for tensor, group in left]
        if not all(entry.parameter in alike[id(entry.tensor)] for entry in matched):
            return []
        return matched if any(entry.tensor.dim() > 1 for entry in matched) else []

    def _check_gradients(self, held: Iterable[tuple[_Parameter, torch.Tensor]]) -> None:
        for parameter, tensor in held:
            has_gradient = tensor.grad is not None or parameter.weight.grad is not None
            if not (has_gradient and parameter.at_step) or parameter.gap is not None:
                self._check_gradient(parameter, tensor)

    def _check_gradient(self, parameter: _Parameter, held: torch.Tensor) -> None:
        """Check whether a backward reached a parameter since the last step.

        The gradient shows it, or a hook if the gradient is removed before the optimizer's step.
        """
        weight = parameter.weight
        if weight.grad is not None or held.grad is not None or getattr(weight, "grad_added_to_main_grad", False):
            parameter.has_gradient = True
            parameter.at_step = True
            parameter.removed = None
        elif parameter.gap is not None and parameter.gap.reached:
            parameter.removed = (parameter.gap.since, weight._version) if parameter.at_step else None
            parameter.has_gradient, parameter.at_step = True, False  # it is removed before the step
        elif parameter.at_step or not parameter.has_gradient:
            self._count_missing_gradient(parameter)
            return
        if parameter.gap is not None:
            self._end_problems(parameter, parameter.gap)
            parameter.longest = max(parameter.longest, parameter.gap.steps)
            parameter.gap.unhook()
            parameter.gap = None

    def _end_problems(self, parameter: _Parameter, gap: _Gap) -> None:
        ended = {(what, parameter.name) for what in ENDS_BY_A_GRADIENT} & self._reported
        if ended:
            self._reported -= {*ended, ("arrived", parameter.name)}
            self._arrived.append(Problem("arrived", parameter.name, gap.since, gap.steps))

    def _count_missing_gradient(self, parameter: _Parameter) -> None:
        gap = parameter.gap
        if gap is None:
            gap = _Gap(self._iteration)
            parameter.gap = gap
            if parameter.weight.requires_grad:
                note: Any = parameter.weight.register_post_accumulate_grad_hook
                forward = parameter.module.register_forward_pre_hook(_note_forward(gap))
                gap.hooks = note(_note_backward(gap)), forward
        gap.steps += 1
        gap.called += gap.ran
        gap.ran = False

    def _end_clearing(self, optimizer: Optimizer) -> None:
        clearing = self._clearing.pop(optimizer, None)
        if clearing is not None:
            self._unread.append(clearing)
        if not self._clearing:
            self.around_backward.clear()

    @contextmanager
    def _check_clearing(self) -> Iterator[None]:
        """Check whether a backward adds to gradients of a sampled step that were not cleared."""
        old = self._old_gradients()
        yield
        for clearing, parameter, gradient, version, is_nonzero in old:
            if parameter.weight.grad is not gradient or gradient._version != version:
                was_kept = clearing.kept[parameter]
                clearing.kept[parameter] = is_nonzero if was_kept is None else was_kept & is_nonzero

    @torch.no_grad()
    def _old_gradients(self) -> list[tuple[_Clearing, _Parameter, torch.Tensor, int, torch.Tensor]]:
        uncleared: list[tuple[_Clearing, _Parameter, torch.Tensor]] = []
        try:
            for clearing in list(self._clearing.values()):
                for parameter, was_kept in clearing.kept.items():
                    gradient = parameter.weight.grad
                    if gradient is None:
                        clearing.kept[parameter] = False
                    elif was_kept is not False:
                        uncleared.append((clearing, parameter, gradient))
            if not uncleared or is_capturing():
                return []
            old = []
            for places, largest in largest_of_each([local_part(gradient) for *_, gradient in uncleared]):
                for place, is_nonzero in zip(places, largest != 0, strict=True):
                    clearing, parameter, gradient = uncleared[place]
                    old.append((clearing, parameter, gradient, gradient._version, is_nonzero))
            return old
        except Exception as error:  # in a backward of the training
            self._failures.report("reading the gradients of", "the parameters", error)
            return []

    def _note_decay(self, optimizer: Optimizer, held: list[_Held]) -> None:
        """Note parameters that lose a large share in a step by weight decay."""
        is_share = isinstance(optimizer, (torch.optim.AdamW, torch.optim.SGD))
        for group in optimizer.param_groups:
            share = group.get("lr", 0.0) * group.get("weight_decay", 0.0)
            if (is_share or group.get("decoupled_weight_decay")) and isinstance(share, float) and share >= DECAYS:
                for name in [entry.parameter.name for entry in held if entry.group is group]:
                    self._decays.setdefault(name, Problem("decays", name, self._iteration, 100 * share))

    def _sample(self, optimizer: Optimizer, all_held: list[_Held], gradients: Iterable[torch.Tensor | None]) -> None:
        self._copy_masters(optimizer, all_held)
        matrices: list[_Parameter] = []
        of_matrices: list[torch.Tensor] = []
        with_gradient: list[_Parameter] = []
        first: list[_Parameter] = []
        elements: list[torch.Tensor] = []
        for held, gradient in zip(all_held, gradients, strict=True):
            parameter = held.parameter
            if not parameter.weight.requires_grad:
                continue
            if parameter.weight.dim() > 1:
                matrices.append(parameter)
                if gradient is not None:
                    with_gradient.append(parameter)
                    of_matrices.append(local_part(gradient))
            if not parameter.has_moved or parameter.reference is not None:
                codes = sampled_view(raw_codes(parameter.weight))
                if parameter.reference is None:
                    first.append(parameter)
                    elements.append(codes)
                self._compare_with_reference(optimizer, held, codes, gradient)
        self._sample_values(matrices)
        for places, largest in largest_of_each(of_matrices):
            notes = [functools.partial(with_gradient[place].note_gradient, self._iteration) for place in places]
            self._batches.add_shares(largest != 0, notes)
        for parameter, copy in zip(first, copy_all(elements), strict=True):
            parameter.reference = copy
            parameter.still = (self._iteration, -1)

    def _copy_masters(self, optimizer: Optimizer, all_held: Iterable[_Held]) -> None:
        names = set(itertools.chain.from_iterable(optimizer.state.values()))
        is_in_state = any("master" in str(name) for name in names)
        with_master = []
        views = []
        for held in all_held:
            master = None
            if is_in_state or held.tensor is not held.parameter.weight:
                master = _master(optimizer, held)
            if master is not None:
                with_master.append(held)
                views.append(sampled_view(master))
        copies = zip(with_master, copy_all(views), strict=True)
        self._masters[optimizer] = [(held, self._iteration, copy) for held, copy in copies]

    def _sample_values(self, matrices: Iterable[_Parameter]) -> None:
        plain: list[_Parameter] = []
        samples: list[torch.Tensor] = []
        for parameter in matrices:
            own = local_part(parameter.weight)
            samples_before = parameter.writes.samples
            is_new = not samples_before or samples_before[-1][0] < self._iteration  # optimizers may share a parameter
            if is_new and not is_quantized(own):
                plain.append(parameter)
                samples.append(sampled_view(own, THIN))
        for places, stack in stack_equal(samples):
            for index, place in enumerate(places):
                writes = plain[place].writes
                first_sample, *later = *writes.samples, (self._iteration, stack, index)
                writes.samples = first_sample, *later[1 - KEPT :]

    def _compare_with_reference(
        self, optimizer: Optimizer, held: _Held, codes: torch.Tensor, gradient: torch.Tensor | None
    ) -> None:
        """Compare a weight with its reference, if it has one, and its gradient with what must change it."""
        parameter = held.parameter
        reference = parameter.reference
        if reference is not None:
            if (reference.shape, reference.dtype) != (codes.shape, codes.dtype):
                parameter.note_changed(self._iteration, 1.0)
                return
            rate = held.group.get("lr")
            if isinstance(rate, float) and rate == 0:
                parameter.still = (self._iteration, -1)  # up to now, nothing had to change it
            note = functools.partial(parameter.note_changed, self._iteration)
            self._batches.add("changed", torch.ne, (codes, reference), note)
        if gradient is not None and (now := sample(parameter.weight)) is not None:
            gradient = sampled_view(local_part(gradient))
            squares = _mean_squares(optimizer, held)
            should_move = functools.partial(_should_move, held.group, now.relative, len(squares))
            note = functools.partial(parameter.note_expected, self._iteration)
            tensors = (now.values, gradient, *squares, *now.with_tensor(gradient)[2:])
            self._batches.add((id(held.group), now.relative, len(squares)), should_move, tensors, note)

    def _compare_masters(self, optimizer: Optimizer) -> None:
        """Compare the weights of the last forward with the master weights, now and before the last step."""
        for held, iteration, before in self._masters.pop(optimizer, ()):
            master = _master(optimizer, held)
            weight = sample(held.parameter.weight, held.span)
            if master is not None and weight is not None:
                _compare_with_master(self._batches, weight, before, held.parameter.note_before)
                note = functools.partial(held.parameter.note_apart, iteration)
                _compare_with_master(self._batches, weight, sampled_view(master), note)

    # ------------------------------------------------------------------ after a debug iteration

    @torch.no_grad()
    def end_step(self, iteration: int, stepped: Sequence[SteppedWeight]) -> list[Problem]:
        problems: list[Problem] = []
        self._ended = iteration
        with self._failures.guard("checking", "the parameters"):
            if not self._optimizer_steps:
                self._check_without_optimizer()
            is_complete = self._pending_read is not None or self._has_sampled or self.is_due
            self._read()
            broken = self._finite.end_step(iteration, stepped)
            if self._has_sampled:
                self._pending_read = self._batches.start_copy()
                self._is_due = False
                self._has_sampled = False
            if self.is_due:
                self._refresh()
                self.unmatched = self._find_unmatched()
            if ("rises_again", "") not in self._reported:
                is_complete |= any([schedule.rises_again for schedule in self._schedules.values()])  # noqa: C419  # no call each
            if is_complete or any(map(_GAP, self._parameters.values())):
                problems = self._new_problems()
            problems += self._nonfinite(broken)
        return problems

    def stepped(self, iteration: int) -> list[SteppedWeight]:
        """Return what optimizers have stepped in an iteration, unless it is quantized, in the order of the model."""
        if self._stepped_at != iteration:
            return []
        stepped = [*itertools.chain.from_iterable(self._stepped.values())]
        if len(self._stepped) > 1:
            by_name = {weight[0]: weight for weight in stepped}
            stepped = [by_name[one.name] for one in self._parameters.values() if one.name in by_name]
        return stepped

    def take_rises(self) -> list[RateRise]:
        """Return the rises of the learning rate since the last call, at most :data:`MOST_RISES` in a run."""
        rises = self._rises[: self._rises_left]
        self._rises_left -= len(rises)
        self._rises = []
        return rises

    def take_vanished(self) -> dict[tuple[int, int | None], list[str]]:
        """Return first and last iteration -> matrices with gradients that have become 0; None if they still are.

        Layers in lists of a block are left out: experts may get no tokens.
        """
        found: dict[tuple[int, int | None], list[str]] = {}
        if self._finite.vanished:
            matrices = {known.name for known in self._parameters.values() if known.weight.dim() > 1}
            for name, since, until in self._finite.vanished:
                if name in matrices and len(numbers_of(name)) < 2:
                    found.setdefault((since, until), []).append(name)
            self._finite.vanished.clear()
        return found

    def _nonfinite(self, broken: list[Broken]) -> list[Problem]:
        if not broken:
            return []
        trained = sum(parameter.at_step for parameter in self._parameters.values())
        share = 100 * len({name for _, _, name in broken}) / max(1, trained)
        return [Problem(what, name, since, share) for since, what, name in broken]

    def note_checkpoint(self) -> None:
        """Sample the weights before the next step of an optimizer: code may restore them later."""
        self._is_due = True

    def begin_step(self, iteration: int) -> None:
        self._iteration = iteration
        self._is_due |= is_due(iteration - self._first)

    @property
    def is_due(self) -> bool:
        """Return whether ranks compare parameters after the iteration that ended; equal on all ranks."""
        return is_due(self._ended - self._first)

    def _check_without_optimizer(self) -> None:
        if not self._parameters:
            self._refresh()
        trained = [state for state in self._parameters.values() if state.weight.requires_grad]
        self._check_gradients([(state, state.weight) for state in trained])

    def _read(self) -> None:
        if self._pending_read is None:
            return
        self._pending_read()
        self._pending_read = None
        if any(parameter.has_moved or parameter.moves for parameter in self._parameters.values()):
            self.checked.add("frozen-weight")
        if self._schedules:
            self.checked.add("learning-rate")

    # ------------------------------------------------------------------ problems

    def _new_problems(self, *, at_last: bool = False) -> list[Problem]:
        found = self._problems(at_last=at_last)
        problems = [problem for problem in found if (problem.what, problem.name) not in self._reported]
        self._reported.update((problem.what, problem.name) for problem in problems)
        self._arrived.clear()
        is_complete = self._trains and not self.unmatched
        for parameter, _ in self._without_gradient():
            is_told = any((what, parameter.name) in self._reported for what in _NEVER_REACHED)
            is_complete = is_complete and (is_told or parameter.has_gradient)
        if is_complete:
            self.checked.add("missing-gradient")
        return problems

    @property
    def _trains(self) -> bool:
        return bool(self._optimizer_steps) or any(parameter.has_gradient for parameter in self._parameters.values())

    def _without_gradient(self) -> list[tuple[_Parameter, _Gap]]:
        gaps = [(parameter, parameter.gap) for parameter in self._parameters.values() if parameter.gap is not None]
        if not gaps or not self._trains:
            return []
        held = self._held_parameters()
        return [gap for gap in gaps if id(gap[0]) in held or not held]

    def _find_unmatched(self) -> list[str]:
        optimizers = [type(optimizer).__name__ for optimizer, is_unmatched in self._unmatched.items() if is_unmatched]
        if optimizers:
            held = self._held_parameters()
            for parameter in self._parameters.values():
                weight = parameter.weight
                if weight.requires_grad and id(parameter) not in held and is_narrow(weight):
                    return optimizers
        return []

    def _held_parameters(self) -> set[int]:
        return {id(parameter) for known in self._held.values() for parameter in known.parameters}

    def _problems(self, *, at_last: bool) -> Iterator[Problem]:
        without = self._without_gradient()
        similar = Counter(
            form_of(parameter.name) for parameter in self._parameters.values() if parameter.has_gradient and without
        )
        idle = self._idle_experts()
        yield from idle.values()
        yield from self._arrived
        yield from self._decays.values()
        for parameter, gap in without:
            if parameter in idle:
                continue
            trains = parameter.weight.requires_grad
            may_idle = trains and similar[form_of(parameter.name)] and gap.called < WITHOUT_GRADIENT - 1
            if parameter.has_gradient and trains:
                if gap.called >= max(LOST, 2 * parameter.longest):
                    yield Problem("lost_gradient", parameter.name, gap.since, gap.steps)
                elif parameter.is_left_out:
                    yield Problem("left_out", parameter.name, gap.since, gap.steps)
            elif gap.steps >= (MAX_IDLE if may_idle else WITHOUT_GRADIENT):
                what: ParameterProblem = "frozen_held"
                if trains:
                    what = "checkpointed" if gap.checkpointed else "no_gradient"
                yield Problem(what, parameter.name, gap.since, gap.steps)
        for parameter in self._parameters.values():
            since, version = parameter.removed or (self._ended, -1)
            if self._ended - since >= LOST and version == parameter.weight._version:
                yield Problem("lost_gradient", parameter.name, since, self._ended - since)
            if parameter.checks or (parameter.moves and not parameter.has_moved):
                yield from _weight_problems(parameter)
            if parameter.writes.found is not None:
                what, since, of_sample = parameter.writes.found
                yield Problem(what, parameter.name, since, of_sample)
        steps = self._ended - self.last_update
        if self._optimizer_steps and (steps >= UNSTEPPED or (at_last and steps >= SPAN and not self._has_updated)):
            yield Problem("unstepped", "", self.last_update + self._has_updated, steps)
        for schedule in self._schedules.values():
            if schedule.rises_again and schedule.zero_at is not None:
                yield Problem("rises_again", "", schedule.zero_at, 100 * schedule.last / schedule.largest)
        yield from self._model_problems()
        yield from self._kept_gradients()
        if max(self._optimizer_steps.values(), default=0) >= WITHOUT_GRADIENT:
            yield from self._unheld_parameters()

    def _model_problems(self) -> Iterator[Problem]:
        """Find problems of nearly all matrices: gradients of 0 at the optimizer's step, and float32 weights that hardly
        change. A bias of 0 is excluded, since any update changes it.
        """
        trained = 0
        sampled = 0
        zeroed: list[_Parameter] = []
        still: list[_Parameter] = []
        for parameter in self._parameters.values():
            if not parameter.has_gradient or parameter.weight.dim() < 2:
                continue
            trained += 1
            zeros = parameter.zeroed
            if len(zeros) >= UNCHANGED and zeros[-1] - zeros[0] >= SPAN:
                zeroed.append(parameter)
            since, until = parameter.still
            sampled += since >= 0
            may_move = parameter.moves and not parameter.has_moved
            is_float32 = parameter.reference is not None and parameter.reference.dtype == torch.float32
            if is_float32 and not may_move and 0 <= since <= until - SPAN:
                still.append(parameter)
        if len(zeroed) >= NEARLY_ALL * trained:
            for parameter in zeroed:
                yield Problem("zeroed", parameter.name, parameter.zeroed[0], len(parameter.zeroed))
        if len(still) >= NEARLY_ALL * sampled:
            for parameter in still:
                since, until = parameter.still
                yield Problem("still", parameter.name, since, until - since)

    def _idle_experts(self) -> dict[_Parameter, Problem]:
        """Find parameters without a gradient other than 0 for many steps while similar ones have others, as of experts
        without tokens. A block of a stack that never ran is not a problem.

        The number is the percentage of similar parameters.
        """
        idle: dict[_Parameter, int] = {}
        for parameter in self._parameters.values():
            gap = parameter.gap
            zeroed = parameter.zeroed
            if len(zeroed) >= UNCHANGED and zeroed[-1] - zeroed[0] >= IDLE:
                idle[parameter] = zeroed[0]
            elif gap is not None and parameter.is_left_out:
                idle[parameter] = gap.since
        if not idle:
            return {}
        similar: Counter[str] = Counter()
        without: Counter[str] = Counter()
        for parameter in self._parameters.values():
            form = form_of(parameter.name)
            similar[form] += 1
            without[form] += bool(parameter.zeroed or parameter.gap)
        found = {}
        for parameter, since in idle.items():
            form = form_of(parameter.name)
            may_train = parameter.has_gradient or len(numbers_of(parameter.name)) > 1
            if may_train and parameter.weight.requires_grad and without[form] < similar[form]:
                found[parameter] = Problem("idle", parameter.name, since, 100 * without[form] / similar[form])
        return found

    def _kept_gradients(self) -> Iterator[Problem]:
        """Find gradients that are not cleared."""
        self._read_kept()
        trained = 0
        kept: dict[str, int] = {}
        for parameter in self._parameters.values():
            trained += parameter.has_gradient
            if len(parameter.kept) == UNCHANGED:
                self.checked.add("kept-gradient")
                if False not in parameter.kept.values():
                    kept[parameter.name] = min(parameter.kept)
        if len(kept) == trained > 1:
            yield Problem("all_kept", "", min(kept.values()), UNCHANGED)
        elif ("all_kept", "") not in self._reported:
            for name, since in kept.items():
                yield Problem("kept", name, since, UNCHANGED)

    def _read_kept(self) -> None:
        """Read which gradients were kept, in one copy per device, 2 steps later, when the device has computed it."""
        while self._unread and self._unread[0].iteration + 2 < self._ended:
            clearing = self._unread.pop(0)
            flags = {key: flag for key, flag in clearing.kept.items() if isinstance(flag, torch.Tensor)}
            parameters = list(flags)
            for places, stack in stack_equal(list(flags.values())):
                for place, flag in zip(places, stack.tolist(), strict=True):
                    clearing.kept[parameters[place]] = flag
            for parameter, was_kept in clearing.kept.items():
                if was_kept is not None:
                    parameter.note_kept(clearing.iteration, is_kept=bool(was_kept))

    def _unheld_parameters(self) -> Iterator[Problem]:
        if self.unmatched:
            return
        held = self._held_parameters()
        unheld = []
        is_new = False
        for parameter in self._parameters.values():
            if parameter.weight.requires_grad and parameter.has_gradient and id(parameter) not in held:
                unheld.append(parameter)
                is_new |= self._reported.isdisjoint({("not_held", parameter.name), ("converted", parameter.name)})
        if not is_new:
            return
        stepped = held_ids_of_process()
        for parameter in unheld:
            master = getattr(parameter.weight, "main_param", None)
            if id(parameter.weight) not in stepped and id(master) not in stepped:
                what: ParameterProblem = "converted" if _is_converted(parameter.module) else "not_held"
                yield Problem(what, parameter.name, parameter.held_until + 1, len(unheld))

    @torch.no_grad()
    def end(self, iteration: int) -> list[Problem]:
        self._read()
        self._pending_read = self._batches.start_copy()
        self._read()
        problems = self._new_problems(at_last=True)
        problems += self._nonfinite(self._finite.end_step(iteration, at_last=True))
        broken = _find_nonfinite([(name, local_part(weight)) for name, weight, _ in self._model.named_parameters()])
        return problems + [Problem("nonfinite", name, iteration, 0) for name in broken]


def is_due(step: int) -> bool:
    """Return whether weights are sampled in a step, counted from the attach; equal on all ranks."""
    return step < 4 or step % 100 == 0 or step & (step - 1) == 0


def _note_backward(gap: _Gap) -> Any:
    return outside_of_dynamo(lambda _: setattr(gap, "reached", True))


def _note_forward(gap: _Gap) -> Callable[..., None]:
    """A module hook that Dynamo can trace: a compiled model stays one graph."""

    def note(module: torch.nn.Module, *_: Any) -> None:
        if module.training:  # a reentrant checkpoint runs it without gradients
            gap.ran = True
        if not torch.is_grad_enabled():
            note_checkpoint()

    @outside_of_dynamo
    def note_checkpoint() -> None:
        gap.checkpointed += is_checkpoint_without_backward()

    return note


def _weight_problems(parameter: _Parameter) -> Iterator[Problem]:
    shown = [what for what, _, _ in parameter.checks]
    # At first, a weight that is never copied is as far from its master as one copied late.
    is_late = set(shown) == {"late"}
    is_open = is_late and not parameter.has_moved and parameter.checks[-1][1] - parameter.still[0] < SPAN
    if len(shown) >= APART_CHECKS and all(shown) and not is_open:
        what: ParameterProblem = "late" if is_late and parameter.has_moved else "apart"
        yield Problem(what, parameter.name, parameter.checks[0][1], max(share for _, _, share in parameter.checks))
    moves = () if parameter.has_moved or any(shown) else parameter.moves
    if len(moves) >= UNCHANGED and moves[-1] - moves[0] >= SPAN:
        yield Problem("unchanged", parameter.name, moves[0], len(moves))


def _is_converted(module: torch.nn.Module) -> bool:
    """Return whether Accelerate's FP8 conversion can have made a module; it passes trained parameters to the optimizer.

    Read from Accelerate 1.10 to 1.15, ``state.py`` and ``accelerator.py`` (``_prepare_te``).
    """
    state = getattr(sys.modules.get("accelerate.state"), "AcceleratorState", None)
    precision = getattr(state, "_shared_state", {}).get("_mixed_precision")
    return precision == "fp8" and type(module).__module__.startswith("transformer_engine.")


def _is_emptied(now: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    emptied = (now == 0).flatten(1).all(1) & (last != 0).flatten(1).any(1)
    return emptied[:, None, None].expand_as(now)


def _is_restored(now: torch.Tensor, earlier: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    restored = (now == earlier).flatten(1).all(1) & (last != earlier).flatten(1).any(1)
    return restored[:, None, None].expand_as(now)


def _is_replaced(span: float, now: torch.Tensor, before: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
    """Return a bool tensor, true for weights that differ far more from the last sample than samples from each other.

    Args:
        span: steps since the last sample, in steps between the two samples; at least 1.
    """
    norms = [part.float().flatten(1).norm(dim=1) for part in (now - last, last - before, now, last)]
    changed, ordinary, size, last_size = norms
    is_far = (changed > OTHERWISE * span * ordinary) & (changed > REPLACED * torch.maximum(size, last_size))
    replaced: torch.Tensor = is_far & (ordinary > 0) & (size > 0)
    return replaced[:, None, None].expand_as(now)


def _alike(
    tensors: Mapping[torch.Size, Sequence[torch.Tensor]], weights: Mapping[torch.Size, Sequence[_Parameter]]
) -> dict[int, list[_Parameter]]:
    """Return id of a tensor -> the weights of its shape, near its place, that differ from it by rounding at most.

    A weight that cannot be sampled is like the tensor in its place, if there are as many of them.
    """
    batches = BatchedChecks()
    shares: dict[tuple[int, _Parameter], float] = {}
    for shape, of_shape in tensors.items():
        surplus = len(weights[shape]) - len(of_shape)
        samples = [sample(parameter.weight) for parameter in weights[shape]]
        for place, tensor in enumerate(of_shape):
            view = sampled_view(local_part(tensor))
            for candidate in range(place, place + surplus + 1):
                key = id(tensor), weights[shape][candidate]
                shares[key] = float(surplus > 0)
                weight = samples[candidate]
                if weight is not None:
                    _compare_with_master(batches, weight, view, functools.partial(shares.__setitem__, key))
    batches.launch()
    read = batches.start_copy()
    if read is not None:
        read()
    alike: dict[int, list[_Parameter]] = {}
    for (tensor_id, parameter), share in shares.items():
        alike.setdefault(tensor_id, [])
        if share < APART:
            alike[tensor_id].append(parameter)
    return alike


def _starts_of_shards(weights: Iterable[torch.Tensor]) -> dict[int, int]:
    """Return id of a partial master weight -> its offset in the flattened weight.

    Read from Megatron-Core 0.16.1, ``optimizer/distrib_optimizer.py``.
    """
    sharded: list[Any] = [weight for weight in weights if getattr(weight, "main_param_sharded", False)]
    owners = [owner for owner in gc.get_objects() if hasattr(type(owner), _RANGES)] if sharded else []
    starts: dict[int, int] = {}
    for owner, weight in itertools.product(owners, sharded):
        if weight.main_param is not None and weight in owner.model_param_gbuf_map:
            starts[id(weight.main_param)] = getattr(owner, _RANGES)(weight)["param"].start
    return starts


def _master(optimizer: Optimizer, held: _Held) -> torch.Tensor | None:
    """Return the float32 master weight, or its local part: stepped by the optimizer, or in the optimizer's state.

    None for a float32 weight: TE's FusedAdam keeps a master weight, but does not step it.
    """
    weight = held.parameter.weight
    if not is_narrow(weight):
        return None
    tensor: Any = held.tensor
    if tensor is weight:
        state = optimizer.state.get(tensor, {})
        tensor = next((value for name, value in state.items() if "master" in str(name)), None)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        return None
    own = local_part(tensor)
    if own.shape == local_part(weight).shape or held.start is not None:
        return own
    return None


def _gradients(all_held: Iterable[_Held]) -> list[torch.Tensor | None]:
    """Return the gradient of each parameter; None without a dense one of the parameter's shape."""
    gradients: list[torch.Tensor | None] = []
    for parameter, tensor, _, _ in all_held:
        weight = parameter.weight
        found = None
        for owner, name in ((tensor, "grad"), (weight, "grad"), (weight, "main_grad")):
            gradient = getattr(owner, name, None)
            if isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided:
                # The check of the class is cheaper than looking up an attribute that a tensor does not have.
                own = weight if type(weight) in PLAIN else getattr(weight, "_local_tensor", weight)
                local = gradient if type(gradient) in PLAIN else getattr(gradient, "_local_tensor", gradient)
                found = gradient if local.shape == own.shape else None
                break
        gradients.append(found)
    return gradients


def _mean_squares(optimizer: Optimizer, held: _Held) -> tuple[torch.Tensor, ...]:
    """Return a sample of Adam's mean squares of a parameter's gradients, as a tuple of at most one tensor."""
    state = optimizer.state.get(held.tensor, {})
    squares = state.get("max_exp_avg_sq", state.get("exp_avg_sq"))
    if not isinstance(squares, torch.Tensor) or squares.dtype not in (torch.float32, torch.bfloat16):
        return ()  # others are scaled
    own = local_part(squares)
    if own.shape == local_part(held.parameter.weight).shape:
        return (sampled_view(own),)
    return ()


def _should_move(
    group: Mapping[str, Any],
    relative: float,
    has_squares: int,
    values: torch.Tensor,
    gradient: torch.Tensor,
    *others: torch.Tensor,
) -> torch.Tensor:
    """Return a bool tensor, true where a gradient's update, without momentum, far exceeds the weight's resolution.

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
    rate = group.get("lr")
    update = update * (0.0 if rate is None else rate)
    absolute = others[-1] if len(others) > has_squares else None
    unit = torch.finfo(values.dtype).eps if absolute is None else 2 * relative
    floor = LIKELY * unit * values.float().abs()
    floor = floor if absolute is None else floor + 4 * LIKELY * absolute
    moves: torch.Tensor = torch.isfinite(update) & (update > floor)
    return moves


def _compare_with_master(
    batches: BatchedChecks, weight: WeightSample, master: torch.Tensor, note: Callable[[float], None]
) -> None:
    """Measure the share of elements that differ from the master weight by more than the format's rounding."""
    compare = functools.partial(_exceeds_rounding, weight.relative)
    batches.add(("apart", weight.relative), compare, weight.with_tensor(master), note)


def _exceeds_rounding(
    relative: float, values: torch.Tensor, master: torch.Tensor, absolute: torch.Tensor | None = None
) -> torch.Tensor:
    values = values.float()
    allowed = 1.001 * relative * values.abs()
    return (values - master).abs() > (allowed if absolute is None else allowed + absolute)


def _find_nonfinite(weights: list[tuple[str, torch.Tensor]]) -> list[str]:
    """Return the names of weights with inf or nan, with one copy to the host per dtype and device."""
    names = []
    all_codes = []
    for name, weight in weights:
        codes = weight
        if is_quantized(weight):  # each format has its own code for nan
            if scaling_mode(weight) == NVFP4:
                continue
            least = 0x7C if fp8_format(weight) is E5M2 else 0x7F
            codes = torch.where((raw_codes(weight) & 0x7F) >= least, torch.nan, 0.0)
        names.append(name)
        all_codes.append(codes)
    broken = []
    for places, largest in largest_of_each(all_codes):
        broken += [names[place] for place in itertools.compress(places, (~largest.isfinite()).tolist())]
    return broken
