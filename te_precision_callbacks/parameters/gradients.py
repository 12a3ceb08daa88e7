"""Measures gradients at the steps of optimizers, without waiting for the device: whether they are there, whether they
are finite or 0, and whether they were cleared.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import Optimizer
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.vocabulary import LEAST_PRESENT
from te_precision_callbacks.layers.forwards import is_checkpoint_without_backward, outside_of_dynamo
from te_precision_callbacks.parameters.optimizers import SteppedParameters
from te_precision_callbacks.parameters.parameter import (
    SAMPLED_CLEARINGS,
    Gap,
    Parameter,
    ParameterProblem,
    Problem,
    ZeroGradients,
)
from te_precision_callbacks.parameters.weight_samples import local_part, to_host

# ---------------------------------------------------------------------- missing gradients


def _watch_gap(parameter: Parameter, gap: Gap) -> tuple[RemovableHandle, ...]:
    """Note what reaches a parameter and its module, until the returned hooks are removed."""

    def note_forward(module: torch.nn.Module, *_: Any) -> None:  # Dynamo can trace it: a compiled model stays one graph
        if module.training:  # a reentrant checkpoint runs it without gradients
            gap.ran = True
        if not torch.is_grad_enabled():
            note_checkpoint()

    @outside_of_dynamo
    def note_checkpoint() -> None:
        gap.checkpointed += is_checkpoint_without_backward()

    @outside_of_dynamo
    def note_gradient(_: torch.Tensor) -> None:
        gap.reached = True

    register: Any = parameter.weight.register_post_accumulate_grad_hook
    return register(note_gradient), parameter.module.register_forward_pre_hook(note_forward)


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
                if gap is None:
                    gap = parameter.gap = Gap(iteration)
                    if parameter.is_trained:
                        gap.hooks = _watch_gap(parameter, gap)
                gap.steps += 1
                gap.called += gap.ran
                gap.ran = False
            continue
        if gap is not None:
            ended.append((parameter, gap))
            parameter.longest_gap = max(parameter.longest_gap, gap.steps)
            gap.unhook()
            parameter.gap = None
    return ended


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


class _Magnitudes(NamedTuple):
    """Logarithms of the largest magnitudes of tensors of one device and dtype.

    -inf for a tensor of zeros, inf or nan for a tensor that is not finite. Logarithms of float64 fit into float32.

    Attributes:
        order: among the iteration's GEMMs; None for weights.
    """

    order: int | None
    parameters: Sequence[Parameter]
    logarithms: torch.Tensor


class _Copy(NamedTuple):
    """Magnitudes of an iteration, which are copied to the host."""

    iteration: int
    order: int | None
    parameters: Sequence[Parameter]
    read: Callable[[], list[float]]


class GradientSizes:
    """Reads the largest magnitude of the gradients and the stepped weights of each step, until some were not finite.

    Gradients are read before they are clipped: clipping by a norm of nan makes all of them nan.

    Attributes:
        vanished: first and last iteration -> the gradients that have become 0; without a last one if they still are.
            The caller clears it.
        broken: the iteration of the first gradients that were not finite, and their place in the order of its GEMMs.
    """

    def __init__(self) -> None:
        self.vanished: dict[tuple[int, int | None], list[Parameter]] = {}
        self.broken: tuple[int, int] | None = None
        self._has_found = False
        self._clipped: list[_Magnitudes] = []
        self._stepped: list[_Magnitudes] = []
        self._copies: list[_Copy] = []

    def before_clipping(self, gradients: Mapping[Parameter, torch.Tensor]) -> None:
        if self._has_found:
            return
        # Those of a batch that the script drops after clipping do not reach the optimizer.
        self._clipped = [clipped for clipped in self._clipped if gradients.keys().isdisjoint(clipped.parameters)]
        self._clipped += _largest([*gradients], [*gradients.values()])

    def before_step(
        self, optimizer: Optimizer, parameters: Sequence[Parameter], gradients: Sequence[torch.Tensor], order: int
    ) -> None:
        clipped = self._clipped
        self._clipped = []
        # A GradScaler gives it to a fused optimizer, which then skips the step by itself.
        if self._has_found or is_capturing() or getattr(optimizer, "found_inf", None) is not None:
            return
        if clipped:
            # A script may clear the gradients of a bad batch after clipping, and step.
            clipped = [magnitudes for magnitudes in clipped if not set(parameters).isdisjoint(magnitudes.parameters)]
            new = dict(zip(parameters, gradients, strict=True))
            for magnitudes in clipped:
                for parameter in magnitudes.parameters:
                    new.pop(parameter, None)
            parameters = [*new]
            if clipped:
                for parameter in parameters:
                    parameter.unclipped += 1
            gradients = [*new.values()]
        self._stepped += [magnitudes._replace(order=order) for magnitudes in clipped + _largest(parameters, gradients)]

    def is_broken(self) -> bool:
        """Return whether gradients of the step are not finite. Waits for the devices."""
        return any(not bool((largest < math.inf).all()) for _, _, largest in self._stepped)

    def end_step(self, iteration: int, weights: Sequence[Parameter], *, at_last: bool = False) -> list[Problem]:
        """Return the gradients that were not finite, at the first place with any; if all were, the stepped ``weights``
        that are not.

        On a GPU, the result of an iteration is returned after the next one, when it has been copied.
        """
        if not self._has_found or at_last:
            self._stepped += _largest(weights, [parameter.weight for parameter in weights])
        waits = False
        ready = self._copies
        self._copies = []
        for order, parameters, logarithms in self._stepped:
            waits |= not at_last and logarithms.device.type != "cpu"
            self._copies.append(_Copy(iteration, order, parameters, to_host(logarithms)))
        self._clipped = []
        self._stepped = []
        if not waits:
            ready += self._copies
            self._copies = []
        first: tuple[int, int | None] | None = None
        problems: list[Problem] = []
        for copy in ready:
            sizes = zip(copy.parameters, copy.read(), strict=True)
            odd = {parameter: size for parameter, size in sizes if not -math.inf < size < math.inf}
            broken = [parameter for parameter, size in odd.items() if size != -math.inf]
            if broken and first in (None, copy[:2]):
                first = copy[:2]
                what: ParameterProblem = "nonfinite" if copy.order is None else "nonfinite_gradient"
                problems += [Problem(what, parameter.name, copy.iteration, 0.0) for parameter in broken]
            if copy.order is not None:
                self._note_zeros(copy.iteration, copy.parameters, odd.keys() - broken)
        self._has_found |= bool(problems)
        if first is not None and first[1] is not None:
            self.broken = first[0], first[1]
        return problems

    def _note_zeros(self, iteration: int, parameters: Iterable[Parameter], are_zero: set[Parameter]) -> None:
        for parameter in parameters:
            if parameter.present_since < 0:
                parameter.present_since = iteration
            elif parameter.zeros is not None and parameter not in are_zero:
                zeros = parameter.zeros
                parameter.zeros = None
                parameter.present_since = zeros.last + 1
                if zeros.was_present and zeros.steps >= parameter.least_zeros:
                    parameter.least_zeros = 2 * zeros.steps
                    self.vanished.setdefault((zeros.since, zeros.last), []).append(parameter)
        for parameter in are_zero:
            if parameter.zeros is None:
                was_present = iteration - parameter.present_since >= LEAST_PRESENT
                parameter.zeros = ZeroGradients(iteration, was_present)
            zeros = parameter.zeros
            zeros.last = iteration
            zeros.steps += 1
            if zeros.was_present and zeros.steps == parameter.least_zeros:
                self.vanished.setdefault((zeros.since, None), []).append(parameter)


def _largest(parameters: Sequence[Parameter], tensors: Sequence[torch.Tensor]) -> list[_Magnitudes]:
    """Return the largest magnitudes of tensors, for each device and dtype.

    The loop calls no function for a plain tensor.
    """
    kinds: dict[tuple[torch.device, torch.dtype], tuple[list[Parameter], list[torch.Tensor]]] = {}
    for parameter, whole in zip(parameters, tensors, strict=True):
        tensor = whole if type(whole) in PLAIN else local_part(whole)
        if tensor.layout is torch.strided and tensor.nbytes:
            kind = tensor.device, tensor.dtype
            if kind not in kinds:
                kinds[kind] = [], []
            parameters_of_kind, tensors_of_kind = kinds[kind]
            parameters_of_kind += (parameter,)
            tensors_of_kind += (tensor,)
    return [
        _Magnitudes(None, parameters_of_kind, largest_magnitudes(tensors_of_kind).log2().float())
        for (_, dtype), (parameters_of_kind, tensors_of_kind) in kinds.items()
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
