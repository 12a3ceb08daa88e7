"""Activation overflow detection on a small model of torch: an inf in one layer is found there.

The inf is planted in the product of a layer in the middle. A step with detection must wait for the device once more
than a step without: detection reads all extremes in one copy, before the optimizer steps.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch

from gpu_parts.rows import Rows, Settings, run_part
from gpu_parts.waits import HostWaits
from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow, extreme_slots

CULPRIT = "1.2"


class Training:
    """The model and its optimizer."""

    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        blocks, hidden, tokens = (3, 64, 32) if settings.small else (12, 1024, 4096)
        layers = (
            torch.nn.Sequential(
                torch.nn.Linear(hidden, 4 * hidden), torch.nn.GELU(), torch.nn.Linear(4 * hidden, hidden)
            )
            for _ in range(blocks)
        )
        self.model = torch.nn.Sequential(*layers).to(settings.device)
        self._optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.randn(tokens, hidden, device=settings.device)

    def step(self) -> None:
        """Forward, backward and the optimizer's step."""
        self.model(self.inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


@contextlib.contextmanager
def _planted(model: torch.nn.Module) -> Iterator[None]:
    """One weight of a layer is too large for the products of the first activation with it."""
    weight = model.get_parameter(f"{CULPRIT}.weight")
    before = weight.detach().clone()
    with torch.no_grad():
        weight[0] = torch.finfo(weight.dtype).max
    try:
        yield
    finally:
        model.zero_grad()
        with torch.no_grad():
            weight.copy_(before)


def _finds(training: Training, rows: Rows) -> None:
    with _planted(training.model), DebugActivationOverflow(training.model):
        before = [parameter.detach().clone() for parameter in training.model.parameters()]
        try:
            training.step()
        except ActivationOverflowError as error:
            rows.equal("the layer that is named", error.path, CULPRIT, note=str(error).partition(".")[0])
            rows.equal("what of it", error.role, "output")
        else:
            rows.equal("the layer that is named", None, CULPRIT, note="nothing was raised")
        after = list(training.model.parameters())
        same = all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
        rows.equal("the weights after the step that was stopped", "as before" if same else "changed", "as before")


Way = Callable[[torch.nn.Module], AbstractContextManager[object]]


def _without(model: torch.nn.Module) -> AbstractContextManager[object]:
    return contextlib.nullcontext()


@contextlib.contextmanager
def _copies() -> Iterator[list[None]]:
    """An entry for each copy of the extremes to the host: on a CPU nothing else shows it."""
    found: list[None] = []
    to_host = extreme_slots.to_host

    def noted(rows: torch.Tensor) -> object:
        found.append(None)
        return to_host(rows)

    extreme_slots.to_host = noted  # type: ignore[assignment]
    try:
        yield found
    finally:
        extreme_slots.to_host = to_host


def _waits(training: Training, way: Way, settings: Settings) -> int:
    """Count the waits for the device in a step."""
    with way(training.model):
        training.step()
        with _copies() as copies, HostWaits(settings.device) as waits:
            training.step()
    return waits.total + (0 if settings.on_gpu else len(copies))


def check(settings: Settings, rows: Rows) -> None:
    logging.getLogger("te_precision_callbacks").setLevel(logging.CRITICAL)  # the report of the planted inf
    training = Training(settings)
    _finds(training, rows)
    added = _waits(training, DebugActivationOverflow, settings) - _waits(training, _without, settings)
    rows.equal("host waits added to a step", added, 1)


if __name__ == "__main__":
    run_part("overflow", check)
