"""Checks the parameters of a model under any config: gradients that never arrive, weights that never change, and
low-precision weights that do not follow their masters.

In most steps only whether parameters have gradients is checked, on the host. Weights are sampled in few steps.
Weights that have changed once are not sampled again, unless the optimizer keeps masters of them.
"""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.numerics.layouts import is_quantized
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.updates import TrainedModel
from te_precision_callbacks.instrumentation.weight_samples import WeightSample, local, means, pick, raw, sample
from te_precision_callbacks.layers.folding import form_of
from te_precision_callbacks.layers.forwards import outside_of_dynamo

WITHOUT_GRADIENT = 6
"""Steps of its optimizer after which a parameter without a gradient is reported."""

MOST_LEFT_OUT = 64
"""The same where an alike parameter has had a gradient and its module does not run: blocks may be left out at random,
and experts lack tokens."""

LOST = 8
"""Steps in a row in which a parameter that has had gradients gets none, although its module runs."""

UNSTEPPED = 20
"""Debug iterations in a row without a step of the optimizers that have stepped before."""

UNCHANGED, SPAN = 3, 6
"""Sampled steps that should have changed a weight, and the steps that they span at least."""

LIKELY = 4.0
"""An update of so many units in the last place must change a weight."""

FEW_CHANGED, STILL = 0.05, 0.9
"""The share of a weight's sampled elements that may have changed where it stands still, and the share of the parameters
that must stand still."""

APART, APART_CHECKS = 0.01, 2
"""The share of sampled elements farther from the master than rounding explains, and the checks that show it."""


class Problem(NamedTuple):
    """A problem of a parameter.

    Attributes:
        what: ``no_gradient``, ``lost_gradient``, ``left_out``, ``not_held``, ``frozen_held``,
            ``unstepped``, ``zeroed``, ``unchanged``, ``apart``, ``late``, ``still`` or ``nonfinite``.
        name: the parameter; empty if it is about the model.
        since: the iteration in which it began.
        number: the steps or the percent of elements that show it.
    """

    what: str
    name: str
    since: int
    number: float


@dataclass(eq=False)
class _Gap:
    """Steps of its optimizers in a row in which a parameter has no gradient.

    Attributes:
        since: the iteration of the first of them.
        steps: their number.
        called: those of them before which its module ran in training.
        reached, ran: whether a backward has reached it, and its module has run, since the last step.
        hooks: see both.
    """

    since: int
    steps: int = 0
    called: int = 0
    reached: bool = False
    ran: bool = False
    hooks: tuple[RemovableHandle, ...] = ()

    def unhook(self) -> None:
        """Remove its hooks."""
        for hook in self.hooks:
            hook.remove()


@dataclass(eq=False)
class _Parameter:
    """A parameter, as far as it was checked.

    Attributes:
        at_step: whether an optimizer that steps has found a gradient of it.
        gap: the steps without a gradient up to now; None if the last one had one.
        longest: the steps of the longest earlier gap.
        held_until: the last iteration in which an optimizer that has it stepped; -1 if none has.
        reference: its first sample, while hardly an element of later ones differs.
        has_moved: whether an element of a later sample has differed.
        still_since, still_until: the iterations of its first sample and of the last one that hardly differs, or -1.
        moves: the iterations whose optimizer step should have changed it.
        zeroed: the latest sampled iterations in a row in which each sampled element of its gradient is 0.
        checks: what each check against its master has shown: ``apart`` or ``late``, by iteration.
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
    still_since: int = -1
    still_until: int = -1
    moves: tuple[int, ...] = ()
    zeroed: tuple[int, ...] = ()
    checks: tuple[tuple[str, int, float], ...] = ()


class _Held(NamedTuple):
    """A parameter in an optimizer: itself or its master, with the options of its group."""

    parameter: _Parameter
    tensor: torch.Tensor
    group: Mapping[str, Any]


class _Compared(NamedTuple):
    """Elements that rounding does not explain, against the master now and before the last step."""

    parameter: _Parameter
    iteration: int
    now: torch.Tensor
    before: torch.Tensor


class _Reading(NamedTuple):
    """Samples that are copied to the host.

    Attributes:
        moves: the parameters of which a step should have changed elements, and the step.
        changed: those that were compared with what they were in their first sampled step, and the step.
        gradients: those whose gradient was sampled, and the step.
        compared: those that were compared with their masters, and the step.
        shares: gives the means of what was compared: of ``moves``, ``changed``, ``gradients`` (elements
            that are not 0), and twice ``compared``.
    """

    moves: list[tuple[_Parameter, int]]
    changed: list[tuple[_Parameter, int]]
    gradients: list[tuple[_Parameter, int]]
    compared: list[tuple[_Parameter, int]]
    shares: Callable[[], list[float]]


class ParameterWatch:
    """Checks the parameters of a model from :meth:`begin` to :meth:`remove`.

    Args:
        model: the model.
        failures: receives failures.

    Attributes:
        checked: the rules that have had enough to check.
    """

    def __init__(self, model: TrainedModel, failures: ObservationFailures) -> None:
        self.checked: set[str] = set()
        self._model = model
        self._failures = failures
        self._iteration = 0
        self._parameters: dict[int, _Parameter] = {}
        self._held: weakref.WeakKeyDictionary[Optimizer, tuple[int, list[_Held]]] = weakref.WeakKeyDictionary()
        self._masters: weakref.WeakKeyDictionary[Optimizer, list[tuple[_Held, int, torch.Tensor]]]
        self._masters = weakref.WeakKeyDictionary()
        self._compared: list[_Compared] = []
        self._expected: list[tuple[_Parameter, int, torch.Tensor]] = []
        self._changed: list[tuple[_Parameter, int, torch.Tensor]] = []
        self._gradients: list[tuple[_Parameter, int, torch.Tensor]] = []
        self._reading: _Reading | None = None
        self._told: set[tuple[str, str]] = set()
        self._stepped = 0
        self._first = self._ended = 0
        self._optimizer_steps: weakref.WeakKeyDictionary[Optimizer, int] = weakref.WeakKeyDictionary()
        self._is_due = True
        self._has_sampled = self._has_begun = False

    def begin(self, iteration: int) -> None:
        """Begin to check in an iteration, if that was not done yet."""
        if not self._has_begun:
            self._has_begun = True
            self._first = self._iteration = iteration

    def remove(self) -> None:
        """Stop checking."""
        for parameter in self._parameters.values():
            if parameter.gap is not None:
                parameter.gap.unhook()
        for kept in (self._parameters, self._held, self._masters):
            kept.clear()

    # ------------------------------------------------------------------ before a step of an optimizer

    @torch.no_grad()
    def before_step(self, optimizer: Optimizer, iteration: int) -> None:
        """Check gradients, and in few steps sample weights and masters."""
        self._iteration = iteration
        try:
            held = self.held_by(optimizer)
            if not held:
                return
            self._optimizer_steps[optimizer] = self._optimizer_steps.get(optimizer, 0) + 1
            self._stepped = iteration
            for each in held:
                each.parameter.held_until = iteration
            self._check_gradients([(each.parameter, each.tensor) for each in held])
            self._compare_masters(optimizer)
            if self._is_due:
                self._has_sampled = True
                self._sample(optimizer, held)
                for parameter in self._parameters.values():
                    parameter.has_gradient |= parameter.weight.grad is not None
        except Exception as error:
            self._failures.report("checking the parameters of", type(optimizer).__name__, error)

    def _refresh(self) -> None:
        """Take the parameters that the model has now."""
        known, self._parameters = self._parameters, {}
        for name, weight, module in self._model.named_parameters():
            if id(weight) not in known:
                self._held.clear()
            if local(weight).numel():
                self._parameters[id(weight)] = known.get(id(weight)) or _Parameter(name, weight, module)
        if len(self._parameters) != len(known):
            self._held.clear()

    def held_by(self, optimizer: Optimizer) -> list[_Held]:
        """The model's parameters in an optimizer; found again when it gets more of them."""
        if not self._parameters:
            self._refresh()
        count = sum(len(group["params"]) for group in optimizer.param_groups)
        known = self._held.get(optimizer)
        if known is not None and known[0] == count:
            return known[1]
        owners = dict(self._parameters)
        for parameter in self._parameters.values():
            master = getattr(parameter.weight, "main_param", None)
            if master is not None:
                owners[id(master)] = parameter
        pairs: list[tuple[torch.Tensor, Mapping[str, Any]]]
        pairs = [(tensor, group) for group in optimizer.param_groups for tensor in group["params"]]
        held = [_Held(owners[id(tensor)], tensor, group) for tensor, group in pairs if id(tensor) in owners]
        held = held or self._by_values(pairs)
        self._held[optimizer] = count, held
        return held

    def _by_values(self, pairs: list[tuple[torch.Tensor, Mapping[str, Any]]]) -> list[_Held]:
        """The parameters of which an optimizer has masters: as many, in the same order, with the same values."""
        trained = [each for each in self._parameters.values() if each.weight.requires_grad]
        shapes = [each.weight.shape for each in trained]
        if not pairs or [tensor.shape for tensor, _ in pairs] != shapes:
            return []
        held = [_Held(each, *pair) for each, pair in zip(trained, pairs, strict=True)]
        found = [(sample(each.parameter.weight), pick(local(each.tensor))) for each in held]
        apart = [_apart(weight, master) for weight, master in found if weight is not None]
        return held if apart and max(means(apart)()) < APART else []

    def _check_gradients(self, held: list[tuple[_Parameter, torch.Tensor]]) -> None:
        """Check the gradients of parameters; of those that have one again, as nearly all, without a call."""
        for parameter, tensor in held:
            has_gradient = tensor.grad is not None or parameter.weight.grad is not None
            if not (has_gradient and parameter.at_step) or parameter.gap is not None:
                self._check_gradient(parameter, tensor)

    def _check_gradient(self, parameter: _Parameter, held: torch.Tensor) -> None:
        """Check whether a backward has reached a parameter since the last step: by its gradient where an optimizer
        steps; and by a hook, of one that has none there."""
        weight = parameter.weight
        if weight.grad is not None or held.grad is not None or getattr(weight, "grad_added_to_main_grad", False):
            parameter.has_gradient = parameter.at_step = True
        elif parameter.gap is not None and parameter.gap.reached:
            parameter.has_gradient, parameter.at_step = True, False  # it is removed before the step
        elif parameter.at_step or not parameter.has_gradient:
            self._count_without(parameter)
            return
        if parameter.gap is not None:
            parameter.longest = max(parameter.longest, parameter.gap.steps)
            parameter.gap.unhook()
            parameter.gap = None

    def _count_without(self, parameter: _Parameter) -> None:
        gap = parameter.gap
        if gap is None:
            gap = parameter.gap = _Gap(self._iteration)
            if parameter.weight.requires_grad:
                note: Any = parameter.weight.register_post_accumulate_grad_hook
                forward = parameter.module.register_forward_pre_hook(_note_forward(gap))
                gap.hooks = note(_note_backward(gap)), forward
        gap.steps += 1
        gap.called += gap.ran
        gap.ran = False

    # ------------------------------------------------------------------ samples

    def _sample(self, optimizer: Optimizer, held: list[_Held]) -> None:
        """Keep masters, and samples of weights that have not changed yet, with what the step should change."""
        iteration = self._iteration
        masters: list[tuple[_Held, int, torch.Tensor]] = []
        for each in held:
            parameter, group = each.parameter, each.group
            if (master := _master(optimizer, each)) is not None:
                masters.append((each, iteration, pick(master)))
            if not parameter.weight.requires_grad:
                continue
            gradient = _gradient(each)
            picked = None if gradient is None else pick(local(gradient))
            if picked is not None and parameter.weight.dim() > 1:
                self._gradients.append((parameter, iteration, picked.ne(0)))
            if parameter.has_moved and parameter.reference is None:
                continue
            now = pick(raw(parameter.weight))
            if parameter.reference is None:
                parameter.reference, parameter.still_since = now, iteration
            elif (parameter.reference.shape, parameter.reference.dtype) == (now.shape, now.dtype):
                self._changed.append((parameter, iteration, now.ne(parameter.reference)))
            else:
                parameter.has_moved, parameter.reference = True, None
                continue
            weight = sample(parameter.weight)
            if picked is not None and weight is not None:
                expected = _should_move(picked, weight, group)
                self._expected.append((parameter, iteration, expected))
        if masters:
            self._masters[optimizer] = masters

    def _compare_masters(self, optimizer: Optimizer) -> None:
        """Compare weights, as the last forward has used them, with the masters now and before the last step."""
        for each, iteration, before in self._masters.pop(optimizer, ()):
            master, weight = _master(optimizer, each), sample(each.parameter.weight)
            if master is not None and weight is not None:
                now = _apart(weight, pick(master))
                self._compared.append(_Compared(each.parameter, iteration, now, _apart(weight, before)))

    # ------------------------------------------------------------------ after a debug iteration

    @torch.no_grad()
    def end_step(self, iteration: int) -> list[Problem]:
        """The problems that are new after a debug iteration."""
        problems: list[Problem] = []
        self._ended = iteration
        try:
            if not self._optimizer_steps:
                self._check_without_optimizer()
            is_complete = self._reading is not None or self._has_sampled or self.is_due
            self._read()
            if self._has_sampled:
                if self._expected or self._compared or self._changed or self._gradients:
                    self._begin_reading()
                self._is_due = self._has_sampled = False
            if self.is_due:
                self._refresh()
            if is_complete or any([each.gap is not None for each in self._parameters.values()]):  # noqa: C419  # no call each
                problems = self._new_problems()
        except Exception as error:
            self._failures.report("checking", "the parameters", error)
        return problems

    def begin_step(self, iteration: int) -> None:
        """Begin a debug iteration."""
        self._iteration = iteration
        self._is_due |= is_due(iteration - self._first)

    @property
    def is_due(self) -> bool:
        """Whether ranks compare parameters after the iteration that has ended; the same on all ranks."""
        return is_due(self._ended - self._first)

    def _check_without_optimizer(self) -> None:
        """Count steps where no optimizer of torch's is known to step the model."""
        if not self._parameters:
            self._refresh()
        found = self._parameters.values()
        self._check_gradients([(each, each.weight) for each in found if each.weight.requires_grad])

    def _begin_reading(self) -> None:
        """Begin to copy what the samples show to the host."""
        expected, self._expected = self._expected, []
        compared, self._compared = self._compared, []
        changed, self._changed = self._changed, []
        gradients, self._gradients = self._gradients, []
        rows = [row for _, _, row in (*expected, *changed, *gradients)]
        shares = means([*rows, *(each.now for each in compared), *(each.before for each in compared)])
        moved, sampled, graded = (
            [(parameter, iteration) for parameter, iteration, _ in rows] for rows in (expected, changed, gradients)
        )
        compared_at = [(each.parameter, each.iteration) for each in compared]
        self._reading = _Reading(moved, sampled, graded, compared_at, shares)

    def _read(self) -> None:
        """Note what the samples have shown of which a copy was begun."""
        if self._reading is None:
            return
        reading, self._reading = self._reading, None
        shares = iter(reading.shares())
        for parameter, iteration in reading.moves:
            if next(shares) > 0:
                parameter.moves = (*parameter.moves, iteration)
        for parameter, iteration in reading.changed:
            share = next(shares)
            if share > 0:
                parameter.has_moved = True
            if share > FEW_CHANGED:
                parameter.reference = None
            else:
                parameter.still_until = iteration
        for parameter, iteration in reading.gradients:
            parameter.zeroed = (*parameter.zeroed, iteration) if next(shares) == 0 else ()
        of_now, of_before = ([next(shares) for _ in reading.compared] for _ in range(2))
        for (parameter, iteration), apart, apart_before in zip(reading.compared, of_now, of_before, strict=True):
            what = "" if apart < APART else "late" if apart_before < apart / 8 else "apart"
            parameter.checks = (*parameter.checks, (what, iteration, 100 * apart))[-APART_CHECKS:]
        if any(each.has_moved or each.moves for each in self._parameters.values()):
            self.checked.add("frozen-weight")

    # ------------------------------------------------------------------ problems

    def _new_problems(self) -> list[Problem]:
        problems = [found for found in self._problems() if (found.what, found.name) not in self._told]
        self._told.update((found.what, found.name) for found in problems)
        if self._trains and all(_is_settled(each, self._told) for each, _ in self._without_in_training()):
            self.checked.add("missing-gradient")
        return problems

    @property
    def _trains(self) -> bool:
        return bool(self._optimizer_steps) or any(each.has_gradient for each in self._parameters.values())

    def _without_in_training(self) -> list[tuple[_Parameter, _Gap]]:
        """The parameters without a gradient that optimizers hold; all of them where no optimizer is known."""
        held = {id(each.parameter) for _, found in self._held.values() for each in found}
        gaps = [(each, each.gap) for each in self._parameters.values() if each.gap is not None]
        return [(each, gap) for each, gap in gaps if id(each) in held or not held] if self._trains else []

    def _problems(self) -> Iterator[Problem]:
        without = self._without_in_training()
        alike = Counter(form_of(each.name) for each in self._parameters.values() if each.has_gradient and without)
        for parameter, gap in without:
            others = alike[form_of(parameter.name)]
            what = ""
            if parameter.has_gradient:
                if gap.called >= max(LOST, 2 * parameter.longest):
                    what = "lost_gradient"
                elif not gap.called and gap.steps >= max(MOST_LEFT_OUT, 4 * parameter.longest):
                    what = "left_out"
            elif gap.steps >= WITHOUT_GRADIENT and (
                not others or gap.called >= WITHOUT_GRADIENT - 1 or gap.steps >= MOST_LEFT_OUT
            ):
                what = "no_gradient" if parameter.weight.requires_grad else "frozen_held"
            if what:
                yield Problem(what, parameter.name, gap.since, gap.steps)
        for parameter in self._parameters.values():
            if parameter.checks or parameter.moves:
                yield from _of_weight(parameter)
        if self._optimizer_steps and self._ended - self._stepped >= UNSTEPPED:
            yield Problem("unstepped", "", self._stepped + 1, self._ended - self._stepped)
        yield from self._zeroed()
        yield from self._still()
        if max(self._optimizer_steps.values(), default=0) >= WITHOUT_GRADIENT:
            yield from self._not_held()

    def _zeroed(self) -> Iterator[Problem]:
        """Matrices whose gradient is 0 at the step of their optimizer, if nearly all are so."""
        trained = [each for each in self._parameters.values() if each.has_gradient and each.weight.dim() > 1]
        zeroed = [
            each for each in trained if len(each.zeroed) >= UNCHANGED and each.zeroed[-1] - each.zeroed[0] >= SPAN
        ]
        if zeroed and len(zeroed) >= STILL * len(trained):
            for each in zeroed:
                yield Problem("zeroed", each.name, each.zeroed[0], len(each.zeroed))

    def _still(self) -> Iterator[Problem]:
        """Float32 matrices with gradients that hardly change, if nearly all of them do; a bias of 0 is changed by any
        update."""
        found = self._parameters.values()
        trained = [each for each in found if each.has_gradient and each.still_since >= 0 and each.weight.dim() > 1]
        still = [
            each
            for each in trained
            if not each.moves
            and each.reference is not None
            and each.reference.dtype == torch.float32
            and each.still_until - each.still_since >= SPAN
        ]
        if still and len(still) >= STILL * len(trained):
            for each in still:
                yield Problem("still", each.name, each.still_since, each.still_until - each.still_since)

    def _not_held(self) -> Iterator[Problem]:
        """Trainable parameters with gradients that no optimizer has, not even one that has not stepped yet."""
        held = {id(each.parameter) for _, kept in self._held.values() for each in kept}
        found = [
            each
            for each in self._parameters.values()
            if each.weight.requires_grad and each.has_gradient and id(each) not in held
        ]
        if not found or all(("not_held", each.name) in self._told for each in found):
            return
        others = [each for each in gc.get_objects() if issubclass(type(each), Optimizer)]
        kept = {id(tensor) for each in others for group in each.param_groups for tensor in group["params"]}
        for each in found:
            master = getattr(each.weight, "main_param", None)
            if id(each.weight) not in kept and id(master) not in kept:
                yield Problem("not_held", each.name, each.held_until + 1, len(found))

    @torch.no_grad()
    def end(self, iteration: int) -> list[Problem]:
        """The problems that are left at the end of a run, with the weights that have inf or nan after an iteration."""
        self._read()
        if self._expected or self._compared or self._changed or self._gradients:
            self._begin_reading()
            self._read()
        problems = self._new_problems()
        broken = _nonfinite([(name, local(weight)) for name, weight, _ in self._model.named_parameters()])
        return problems + [Problem("nonfinite", name, iteration, 1) for name in broken]


def is_due(step: int) -> bool:
    """Whether weights are sampled in a step, counted from the attach; the same on all ranks."""
    return step < 4 or step % 100 == 0 or step & (step - 1) == 0


def _note_backward(gap: _Gap) -> Any:
    return outside_of_dynamo(lambda _: setattr(gap, "reached", True))


def _note_forward(gap: _Gap) -> Callable[..., None]:
    """A hook of a module, which Dynamo can trace: a compiled model stays one graph."""

    def note(module: torch.nn.Module, *_: Any) -> None:
        if module.training:  # in a reentrant checkpoint it runs without gradients
            gap.ran = True

    return note


def _is_settled(parameter: _Parameter, told: Set[tuple[str, str]]) -> bool:
    """Whether a parameter without a gradient has had one, or was reported."""
    return parameter.has_gradient or any((what, parameter.name) in told for what in ("no_gradient", "frozen_held"))


def _of_weight(parameter: _Parameter) -> Iterator[Problem]:
    """The problems of a weight that does not change, or does not follow its master."""
    shown = [what for what, _, _ in parameter.checks]
    if len(shown) >= APART_CHECKS and all(shown):
        what = "late" if set(shown) == {"late"} else "apart"
        yield Problem(what, parameter.name, parameter.checks[0][1], max(share for _, _, share in parameter.checks))
    moves = () if parameter.has_moved or any(shown) else parameter.moves
    if len(moves) >= UNCHANGED and moves[-1] - moves[0] >= SPAN:
        yield Problem("unchanged", parameter.name, moves[0], len(moves))


def _master(optimizer: Optimizer, held: _Held) -> torch.Tensor | None:
    """The float32 master of a weight, of its shape: what the optimizer steps, or keeps in its state. A plain float32
    weight has none that counts: TE's FusedAdam keeps one and does not step it."""
    weight = held.parameter.weight
    tensor: Any = held.tensor
    if tensor is weight:
        state = optimizer.state.get(tensor, {})
        tensor = next((value for name, value in state.items() if "master" in str(name)), None)
    if not isinstance(tensor, torch.Tensor) or tensor.dtype != torch.float32:
        return None
    own, is_rounded = local(tensor), is_quantized(local(weight)) or weight.dtype in (torch.bfloat16, torch.float16)
    return own if is_rounded and own.shape == local(weight).shape else None


def _gradient(held: _Held) -> torch.Tensor | None:
    for owner, name in ((held.tensor, "grad"), (held.parameter.weight, "grad"), (held.parameter.weight, "main_grad")):
        gradient = getattr(owner, name, None)
        if isinstance(gradient, torch.Tensor) and gradient.layout is torch.strided:
            return gradient if local(gradient).shape == local(held.parameter.weight).shape else None
    return None


def _should_move(gradient: torch.Tensor, weight: WeightSample, group: Mapping[str, Any]) -> torch.Tensor:
    """[elements]: whether an update by a gradient is far above the resolution of the weight."""
    size = gradient.float().abs()
    if "betas" in group:  # of Adam's kind: at most the learning rate
        size = size / (size + float(group.get("eps") or 0.0))
    values = weight.values.float().abs()
    plain = weight.values.dtype
    unit = torch.finfo(plain).eps if isinstance(weight.absolute, float) else 2 * weight.relative
    floor = LIKELY * unit * values + 4 * LIKELY * torch.as_tensor(weight.absolute)
    moves: torch.Tensor = torch.isfinite(size) & (size * group.get("lr", 0.0) > floor)
    return moves


def _apart(weight: WeightSample, master: torch.Tensor) -> torch.Tensor:
    """[elements]: whether a weight is farther from its master than its format rounds."""
    values = weight.values.float()
    return (values - master).abs() > 1.001 * weight.relative * values.abs() + weight.absolute


def _nonfinite(weights: list[tuple[str, torch.Tensor]]) -> list[str]:
    """The names of the weights with inf or nan, with one copy for each type on each device."""
    plain: dict[tuple[torch.device, torch.dtype], list[tuple[str, torch.Tensor]]] = {}
    for name, weight in weights:
        codes = weight
        if type(weight) is not torch.Tensor and is_quantized(weight):  # with a nan in it, it has the code of nan
            if not hasattr(weight, "_fp8_dtype"):
                continue
            least = 0x7C if "E5M2" in str(getattr(weight, "_fp8_dtype", "")) else 0x7F
            codes = torch.where((raw(weight) & 0x7F) >= least, torch.nan, 0.0)
        if codes.numel() and codes.is_floating_point():
            plain.setdefault((codes.device, codes.dtype), []).append((name, codes))
    broken: list[str] = []
    for found in plain.values():
        largest = torch._foreach_norm([each for _, each in found], float("inf"))
        finite = torch.stack(largest).isfinite().tolist()
        broken += [name for (name, _), holds in zip(found, finite, strict=True) if not holds]
    return broken
