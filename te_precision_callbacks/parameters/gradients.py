"""Measures gradients at the steps of optimizers, without waiting for the device: whether they are there, whether they
are finite or 0, and whether they were cleared.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.layers.forwards import is_checkpoint_without_backward, outside_of_dynamo
from te_precision_callbacks.parameters.optimizers import SteppedParameters
from te_precision_callbacks.parameters.parameter import SAMPLED_CLEARINGS, Gap, Parameter, ParameterProblem, Problem
from te_precision_callbacks.parameters.weight_samples import local_part, to_host

# ---------------------------------------------------------------------- missing gradients


def check_gradients(held: Iterable[tuple[Parameter, torch.Tensor]], iteration: int) -> list[tuple[Parameter, Gap]]:
    """Check whether a backward reached parameters since the last step, and return the gaps that it ended.

    The gradient shows it, or a hook if the gradient is removed before the optimizer's step.
    """
    ended: list[tuple[Parameter, Gap]] = []
    for parameter, tensor in held:
        weight = parameter.weight
        gap = parameter.gap
        if weight.grad is not None or tensor.grad is not None or getattr(weight, "grad_added_to_main_grad", False):
            parameter.has_gradient = True
            parameter.at_step = True
        elif gap is not None and gap.reached:
            parameter.has_gradient, parameter.at_step = True, False  # it is removed before the step
        else:
            if parameter.at_step or not parameter.has_gradient:
                _count_missing_gradient(parameter, iteration)
            continue
        if gap is not None:
            ended.append((parameter, gap))
            parameter.longest_gap = max(parameter.longest_gap, gap.steps)
            gap.unhook()
            parameter.gap = None
    return ended


def _count_missing_gradient(parameter: Parameter, iteration: int) -> None:
    gap = parameter.gap
    if gap is None:
        gap = parameter.gap = Gap(iteration)
        if parameter.is_trained:
            note: Any = parameter.weight.register_post_accumulate_grad_hook
            forward = parameter.module.register_forward_pre_hook(_note_forward(gap))
            gap.hooks = note(outside_of_dynamo(lambda _: setattr(gap, "reached", True))), forward
    gap.steps += 1
    gap.called += gap.ran
    gap.ran = False


def _note_forward(gap: Gap) -> Callable[..., None]:
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


# ---------------------------------------------------------------------- gradients that are not cleared


class GradientClearing:
    """Checks from a sampled step of an optimizer to its next one whether backwards add to gradients that were not
    cleared: of the same tensor and version as after the step.

    Attributes:
        around_backward: a context around each backward, while gradients may be cleared.
    """

    def __init__(self, failures: ObservationFailures) -> None:
        self.around_backward: list[Callable[[], AbstractContextManager[None]]] = []
        self._failures = failures
        self._windows: weakref.WeakKeyDictionary[Optimizer, _Window] = weakref.WeakKeyDictionary()

    def clear(self) -> None:
        self._windows.clear()
        self.around_backward.clear()

    def begin(self, optimizer: Optimizer, stepped: SteppedParameters, iteration: int) -> None:
        """Begin after a sampled step."""
        held = [entry.parameter for entry in stepped.held if entry.tensor is entry.parameter.weight]
        states = {parameter: _state(parameter) for parameter in held if parameter.weight.grad is not None}
        self._windows[optimizer] = _Window(iteration, states, set())
        self.around_backward[:] = [self._check]

    def end(self, optimizer: Optimizer) -> None:
        """End before the next step."""
        window = self._windows.pop(optimizer, None)
        if window is not None:
            for parameter in window.added.intersection(window.states):
                parameter.note_cleared(window.iteration, is_cleared=False)
            if not self._windows:
                self.around_backward.clear()

    @contextmanager
    def _check(self) -> Iterator[None]:
        windows = [] if is_capturing() else list(self._windows.values())
        with self._failures.guard("reading the gradients of", "the parameters"):
            for window in windows:
                for parameter, state in list(window.states.items()):
                    # ".data" changes no version: read values, which waits, where the gradient was not cleared before.
                    is_suspect = len(parameter.cleared) >= SAMPLED_CLEARINGS - 1 and not any(parameter.cleared.values())
                    gradient = parameter.weight.grad
                    if _state(parameter) != state or (is_suspect and gradient is not None and not gradient.any()):
                        del window.states[parameter]
                        parameter.note_cleared(window.iteration, is_cleared=True)
        yield
        for window in windows:
            for parameter, state in window.states.items():
                window.states[parameter] = _state(parameter)
                if window.states[parameter] != state:
                    window.added.add(parameter)


class _Window(NamedTuple):
    """The gradients of an optimizer between a sampled step and its next step.

    Attributes:
        states: the gradients that were not cleared so far, after the last backward.
        added: the parameters with an old gradient that a backward has added to.
    """

    iteration: int
    states: dict[Parameter, tuple[int, int]]
    added: set[Parameter]


def _state(parameter: Parameter) -> tuple[int, int]:
    """Return id and version of a gradient: a reference would keep it from being freed."""
    gradient = parameter.weight.grad
    return id(gradient), 0 if gradient is None else gradient._version


# ---------------------------------------------------------------------- gradients that are 0 or not finite


@dataclass
class ZeroGradients:
    """Consecutive optimizer steps with a gradient of 0.

    Attributes:
        was_present: whether it was not 0 in enough steps before.
    """

    since: int
    last: int
    was_present: bool
    steps: int = 0


class _Magnitudes(NamedTuple):
    """Logarithms of the largest magnitudes of tensors of one device and dtype.

    -inf for a tensor of zeros, inf or nan for a tensor that is not finite. Logarithms of float64 fit into float32.

    Attributes:
        order: among the iteration's GEMMs; None for weights.
    """

    order: int | None
    names: list[str]
    logarithms: torch.Tensor


class _Copy(NamedTuple):
    """Magnitudes of an iteration, which are copied to the host."""

    iteration: int
    order: int | None
    names: list[str]
    read: Callable[[], list[float]]


class GradientSizes:
    """Reads the largest magnitude of the gradients and the stepped weights of each step, until some were not finite.

    Gradients are read before they are clipped: clipping by a norm of nan makes all of them nan.

    Attributes:
        zeros: the parameters with a last gradient of 0.
        vanished: first and last iteration -> the gradients that have become 0; without a last one if they still are.
            The caller clears it.
        broken: the iteration of the first gradients that were not finite, and their place in the order of its GEMMs.
    """

    def __init__(self) -> None:
        self.zeros: dict[str, ZeroGradients] = {}
        self.vanished: dict[tuple[int, int | None], list[str]] = {}
        self.broken: tuple[int, int] | None = None
        self._present_since: dict[str, int] = {}  # parameter -> the iteration from which on its gradient was not 0
        self._least: dict[str, int] = {}  # parameter -> the number of steps from which on it is reported
        self._has_found = False
        self._clipped: list[_Magnitudes] = []
        self._stepped: list[_Magnitudes] = []
        self._copies: list[_Copy] = []

    def before_clipping(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        if self._has_found:
            return
        # Those of a batch that the script drops after clipping do not reach the optimizer.
        self._clipped = [clipped for clipped in self._clipped if set(names).isdisjoint(clipped.names)]
        self._clipped += _largest(names, gradients)

    def before_step(
        self, optimizer: Optimizer, names: Sequence[str], gradients: Sequence[torch.Tensor], order: int
    ) -> None:
        clipped = self._clipped
        self._clipped = []
        # A GradScaler gives it to a fused optimizer, which then skips the step by itself.
        if self._has_found or is_capturing() or getattr(optimizer, "found_inf", None) is not None:
            return
        if clipped:
            # A script may clear the gradients of a bad batch after clipping, and step.
            clipped = [magnitudes for magnitudes in clipped if not set(names).isdisjoint(magnitudes.names)]
            already = set(itertools.chain.from_iterable([magnitudes.names for magnitudes in clipped]))
            are_new = [name not in already for name in names]
            names = [*itertools.compress(names, are_new)]
            gradients = [*itertools.compress(gradients, are_new)]
        self._stepped += [magnitudes._replace(order=order) for magnitudes in clipped + _largest(names, gradients)]

    def is_broken(self) -> bool:
        """Return whether gradients of the step are not finite. Waits for the devices."""
        return any(not bool((largest < math.inf).all()) for _, _, largest in self._stepped)

    def end_step(self, iteration: int, weights: Sequence[Parameter], *, at_last: bool = False) -> list[Problem]:
        """Return the gradients that were not finite, at the first place with any; if all were, the stepped ``weights``
        that are not.

        On a GPU, the result of an iteration is returned after the next one, when it has been copied.
        """
        if not self._has_found or at_last:
            self._stepped += _largest(
                [parameter.name for parameter in weights], [parameter.weight for parameter in weights]
            )
        waits = False
        launched: list[_Copy] = []
        for order, names, logarithms in self._stepped:
            waits |= not at_last and logarithms.device.type != "cpu"
            launched.append(_Copy(iteration, order, names, to_host(logarithms)))
        self._clipped = []
        self._stepped = []
        ready = self._copies
        self._copies = launched
        if not waits:
            ready = ready + launched
            self._copies = []
        first: tuple[int, int | None] | None = None
        problems: list[Problem] = []
        for copy in ready:
            sizes = zip(copy.names, copy.read(), strict=True)
            odd = {name: size for name, size in sizes if not -math.inf < size < math.inf}
            broken = [name for name, size in odd.items() if size != -math.inf]
            if broken and first in (None, copy[:2]):
                first = copy[:2]
                what: ParameterProblem = "nonfinite" if copy.order is None else "nonfinite_gradient"
                problems += [Problem(what, name, copy.iteration, 0.0) for name in broken]
            if copy.order is not None:
                self._note_zeros(copy.iteration, copy.names, odd.keys() - broken)
        self._has_found |= bool(problems)
        if first is not None and first[1] is not None:
            self.broken = first[0], first[1]
        return problems

    def _note_zeros(self, iteration: int, names: Iterable[str], are_zero: set[str]) -> None:
        for name in names:
            if name not in self._present_since:
                self._present_since[name] = iteration
            elif name in self.zeros and name not in are_zero:
                zeros = self.zeros.pop(name)
                self._present_since[name] = zeros.last + 1
                if zeros.was_present and zeros.steps >= self._least.get(name, LEAST_ABSENT):
                    self._least[name] = 2 * zeros.steps
                    self.vanished.setdefault((zeros.since, zeros.last), []).append(name)
        for name in are_zero:
            if name not in self.zeros:
                was_present = iteration - self._present_since[name] >= LEAST_PRESENT
                self.zeros[name] = ZeroGradients(iteration, iteration, was_present)
            zeros = self.zeros[name]
            zeros.last = iteration
            zeros.steps += 1
            if zeros.was_present and zeros.steps == self._least.get(name, LEAST_ABSENT):
                self.vanished.setdefault((zeros.since, None), []).append(name)


def _largest(names: Sequence[str], tensors: Sequence[torch.Tensor]) -> list[_Magnitudes]:
    """Return the largest magnitudes of tensors, for each device and dtype.

    The loop calls no function for a plain tensor.
    """
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[str], list[torch.Tensor]]] = {}
    for name, named in zip(names, tensors, strict=True):
        tensor = named if type(named) in PLAIN else local_part(named)
        if tensor.layout is torch.strided and tensor.nbytes:
            kind = tensor.device, tensor.dtype
            if kind not in kinds:
                kinds[kind] = [], []
            names_of_kind, tensors_of_kind = kinds[kind]
            names_of_kind += (name,)
            tensors_of_kind += (tensor,)
    return [
        _Magnitudes(None, names_of_kind, largest_magnitudes(tensors_of_kind).log2().float())
        for (_, dtype), (names_of_kind, tensors_of_kind) in kinds.items()
        if dtype.is_floating_point
    ]


SLOW_NORM = ("cpu",)
"""Types of devices on which torch's norm takes ten times as long as the extremes."""


def largest_magnitudes(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Return the largest magnitude of each tensor of one device and dtype; inf or nan if an element is."""
    if tensors[0].device.type not in SLOW_NORM:
        return torch.stack(torch._foreach_norm(tensors, float("inf")))
    extremes = torch.stack([*itertools.chain.from_iterable(map(torch.aminmax, tensors))])
    return extremes.abs_().view(-1, 2).amax(1)
