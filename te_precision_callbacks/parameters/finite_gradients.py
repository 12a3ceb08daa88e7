"""Finds gradients with inf or nan at an optimizer's step, without waiting for the device.

Gradients that are clipped are read before: clipping by a norm of nan makes all of them nan.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.parameters.weight_samples import largest_of_each, local_part, to_host

NamedGradient = tuple[str, torch.Tensor]
"""The name of a parameter, and its gradient."""


class FiniteGradients:
    """Checks the gradients of each step, until some were not finite."""

    def __init__(self) -> None:
        self._has_found = False
        self._clipped: list[tuple[list[str], torch.Tensor]] = []
        self._stepped: list[tuple[list[str], torch.Tensor]] = []
        self._copies: list[tuple[int, list[str], Callable[[], list[float]]]] = []

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

    def end_step(self, iteration: int, *, at_last: bool = False) -> list[tuple[int, str]]:
        """Return the iteration and the parameter of each gradient that was not finite.

        On a GPU, the result of an iteration is returned after the next one, when it has been copied.
        """
        self._clipped = []
        for names, flags in self._stepped:
            self._copies.append((iteration, names, to_host(flags)))
        waits = any(flags.device.type != "cpu" for _, flags in self._stepped) and not at_last
        self._stepped = []
        ready = [copy for copy in self._copies if copy[0] < iteration or not waits]
        self._copies = [copy for copy in self._copies if copy[0] >= iteration and waits]
        broken = [
            (copied_at, name)
            for copied_at, names, read in ready
            for name, is_broken in zip(names, read(), strict=True)
            if is_broken
        ]
        self._has_found |= bool(broken)
        return broken


def _are_broken(gradients: Sequence[NamedGradient]) -> list[tuple[list[str], torch.Tensor]]:
    """Return names, and float32 flags of the same length, for each device and dtype."""
    return [
        ([gradients[place][0] for place in places], largest.isfinite().logical_not().float())
        for places, largest in largest_of_each([local_part(gradient) for _, gradient in gradients])
    ]
