"""Finds gradients with inf or nan at an optimizer's step, and weights after it, without waiting for the device.

It also finds gradients that become 0, also by other code after the backward. Gradients are read before they are
clipped: clipping by a norm of nan makes all of them nan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Literal, NamedTuple

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.parameters.weight_samples import largest_of_each, local_part, to_host

NamedTensor = tuple[str, torch.Tensor] | tuple[str, torch.Tensor, torch.nn.Module]
"""The name of a parameter, and its gradient; or itself and its module."""


_What = Literal["nonfinite_gradient", "nonfinite"]


class Broken(NamedTuple):
    """A gradient or a weight that was not finite in an iteration."""

    iteration: int
    what: _What
    name: str


class FiniteGradients:
    """Checks the gradients and the stepped weights of each step, until some were not finite.

    Attributes:
        vanished: parameters with a gradient that has become 0, with the first iteration, and also with the last one
            when it is not 0 any more; the caller clears it.
        broken: the iteration of the first gradients that were not finite, and their place in the order of its GEMMs.
    """

    def __init__(self) -> None:
        self.vanished: list[tuple[str, int, int | None]] = []
        self.broken: tuple[int, int] | None = None
        self._since: dict[str, int] = {}  # parameter -> the iteration from which on its gradient was not 0
        self._zeros: dict[str, tuple[int, int]] = {}  # parameter -> first iteration, number of steps
        self._least: dict[str, int] = {}  # parameter -> the number of steps from which on it is reported
        self._has_found = False
        self._clipped: list[tuple[list[str], torch.Tensor]] = []
        self._stepped: list[tuple[int, list[str], torch.Tensor]] = []  # the first: their place
        # Iteration, problem, place, names, and a function that returns the logarithms of _largest().
        self._copies: list[tuple[int, _What, int, list[str], Callable[[], list[float]]]] = []

    def before_clipping(self, gradients: Sequence[NamedTensor]) -> None:
        if self._has_found:
            return
        # Those of a batch that the script drops after clipping do not reach the optimizer.
        names = {gradient[0] for gradient in gradients}
        self._clipped = [clipped for clipped in self._clipped if names.isdisjoint(clipped[0])] + _largest(gradients)

    def before_step(self, optimizer: torch.optim.Optimizer, gradients: Sequence[NamedTensor], place: int) -> None:
        clipped = self._clipped
        self._clipped = []
        # A GradScaler gives it to a fused optimizer, which then skips the step by itself.
        if self._has_found or is_capturing() or getattr(optimizer, "found_inf", None) is not None:
            return
        if clipped:
            known = {name for names, _ in clipped for name in names}
            gradients = [gradient for gradient in gradients if gradient[0] not in known]
        self._stepped += [(place, *part) for part in clipped + _largest(gradients)]

    def end_step(self, iteration: int, weights: Sequence[NamedTensor] = (), *, at_last: bool = False) -> list[Broken]:
        """Return the gradients that were not finite, at the first place with any; if all were, the stepped ``weights``
        that are not.

        On a GPU, the result of an iteration is returned after the next one, when it has been copied.
        """
        self._clipped = []
        waits = False
        kinds: dict[_What, list[tuple[int, list[str], torch.Tensor]]]
        kinds = {"nonfinite_gradient": self._stepped, "nonfinite": []}
        if not self._has_found:
            kinds["nonfinite"] += [(0, *part) for part in _largest(weights)]
        for what, of_kind in kinds.items():
            for place, names, largest in of_kind:
                self._copies.append((iteration, what, place, names, to_host(largest)))
                waits |= largest.device.type != "cpu" and not at_last
        self._stepped = []
        ready = [copy for copy in self._copies if copy[0] < iteration or not waits]
        self._copies = [copy for copy in self._copies if copy[0] >= iteration and waits]
        found: list[Broken] = []
        first: tuple[int, _What, int] | None = None
        for of_iteration, what, place, names, read in ready:
            odd = [(name, size) for name, size in zip(names, read(), strict=True) if not -math.inf < size < math.inf]
            broken = [Broken(of_iteration, what, name) for name, size in odd if size != -math.inf]
            if broken and first in (None, (of_iteration, what, place)):
                first = of_iteration, what, place
                found += broken
            if what == "nonfinite_gradient":
                self._note_zeros(of_iteration, names, {name for name, size in odd if size == -math.inf})
        self._has_found |= bool(found)
        if first is not None and first[1] == "nonfinite_gradient":
            self.broken = first[0], first[2]
        return found

    def _note_zeros(self, iteration: int, names: Iterable[str], zeros: set[str]) -> None:
        for name in names:
            if name not in self._since:
                self._since[name] = iteration
            elif name in self._zeros and name not in zeros:
                first, steps = self._zeros.pop(name)
                if steps >= self._least.get(name, LEAST_ABSENT):
                    self._least[name] = 2 * steps
                    self.vanished.append((name, first, self._since[name] - 1))
        for name in zeros:
            first, steps = self._zeros.get(name, (iteration, 0))
            if steps or iteration - self._since[name] >= LEAST_PRESENT:
                self._zeros[name] = first, steps + 1
                if steps + 1 == self._least.get(name, LEAST_ABSENT):
                    self.vanished.append((name, first, None))
            self._since[name] = iteration + 1


def _largest(tensors: Sequence[NamedTensor]) -> list[tuple[list[str], torch.Tensor]]:
    """Return names, and logarithms of the largest magnitudes of the same length, for each device and dtype.

    A logarithm of -inf is a tensor of zeros, inf or nan a tensor that is not finite. Logarithms of float64 fit into
    float32.
    """
    local = [one[1] if type(one[1]) in PLAIN else local_part(one[1]) for one in tensors]
    return [
        ([tensors[place][0] for place in places], largest.log2().float()) for places, largest in largest_of_each(local)
    ]
