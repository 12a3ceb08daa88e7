"""Finds gradients with inf or nan at an optimizer's step, and weights after it, without waiting for the device.

Gradients that are clipped are read before: clipping by a norm of nan makes all of them nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.parameters.weight_samples import largest_of_each, local_part, to_host

NamedGradient = tuple[str, torch.Tensor]
"""The name of a parameter, and its gradient or itself."""


_What = Literal["nonfinite_gradient", "nonfinite"]


class Broken(NamedTuple):
    """A gradient or a weight that was not finite in an iteration."""

    iteration: int
    what: _What
    name: str


class FiniteGradients:
    """Checks the gradients and the stepped weights of each step, until some were not finite."""

    def __init__(self) -> None:
        self._has_found = False
        self._clipped: list[tuple[list[str], torch.Tensor]] = []
        self._stepped: list[tuple[list[str], torch.Tensor]] = []
        self._copies: list[tuple[list[Broken], Callable[[], list[float]]]] = []

    def before_clipping(self, gradients: Sequence[NamedGradient]) -> None:
        if not self._has_found:
            self._clipped += _are_broken(gradients)

    def before_step(self, optimizer: torch.optim.Optimizer, gradients: Sequence[NamedGradient]) -> None:
        clipped = self._clipped
        self._clipped = []
        # A GradScaler gives it to a fused optimizer, which then skips the step by itself.
        if self._has_found or is_capturing() or getattr(optimizer, "found_inf", None) is not None:
            return
        known = {name for names, _ in clipped for name in names}
        self._stepped += clipped + _are_broken([gradient for gradient in gradients if gradient[0] not in known])

    def end_step(self, iteration: int, weights: Sequence[NamedGradient] = (), *, at_last: bool = False) -> list[Broken]:
        """Return the gradients that were not finite; if all were, the stepped ``weights`` that are not.

        On a GPU, the result of an iteration is returned after the next one, when it has been copied.
        """
        self._clipped = []
        waits = False
        updated = [] if self._has_found else _are_broken(weights)
        kinds: dict[_What, list[tuple[list[str], torch.Tensor]]]
        kinds = {"nonfinite_gradient": self._stepped, "nonfinite": updated}
        for what, flags_of in kinds.items():
            for names, flags in flags_of:
                self._copies.append(([Broken(iteration, what, name) for name in names], to_host(flags)))
                waits |= flags.device.type != "cpu" and not at_last
        self._stepped = []
        ready = [copy for copy in self._copies if copy[0][0].iteration < iteration or not waits]
        self._copies = [copy for copy in self._copies if copy[0][0].iteration >= iteration and waits]
        found = [one for all_of, read in ready for one, is_broken in zip(all_of, read(), strict=True) if is_broken]
        self._has_found |= bool(found)
        return [one for one in found if one.what == "nonfinite_gradient"] or found


def _are_broken(gradients: Sequence[NamedGradient]) -> list[tuple[list[str], torch.Tensor]]:
    """Return names, and float32 flags of the same length, for each device and dtype."""
    local = [one if type(one) in PLAIN else local_part(one) for _, one in gradients]
    return [
        ([gradients[place][0] for place in places], largest.isfinite().logical_not().float())
        for places, largest in largest_of_each(local)
    ]
