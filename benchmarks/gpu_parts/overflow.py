"""Activation overflow detection on a small model of torch: an inf in one layer is found there.

The inf is planted in the product of a layer in the middle. A step with detection must wait for the device once more
than a step without: detection reads all extremes in one copy, before the optimizer steps.
"""

from __future__ import annotations

import contextlib
import logging
from contextlib import AbstractContextManager
from unittest import mock

import torch

from gpu_parts.rows import Rows, Settings
from gpu_parts.waits import host_waits
from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow, frames

CULPRIT = "1.2"


class Training:
    def __init__(self, settings: Settings) -> None:
        torch.manual_seed(0)
        blocks, hidden, tokens = (12, 1024, 4096) if settings.on_gpu else (3, 64, 32)
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
        self.model(self.inputs).square().mean().backward()
        self._optimizer.step()
        self._optimizer.zero_grad()


def _finds(settings: Settings, rows: Rows) -> None:
    """A weight is too large for the products of the first activation with it."""
    training = Training(settings)
    with torch.no_grad():
        training.model.get_parameter(f"{CULPRIT}.weight")[0] = torch.finfo(torch.float32).max
    before = [parameter.detach().clone() for parameter in training.model.parameters()]
    with DebugActivationOverflow(training.model):
        try:
            training.step()
        except ActivationOverflowError as error:
            rows.equal("the layer that is named", error.path, CULPRIT, note=str(error).partition(".")[0])
            rows.equal("what of it", error.role, "output")
        else:
            rows.equal("the layer that is named", None, CULPRIT, note="nothing was raised")
    same = all(map(torch.equal, before, training.model.parameters()))
    rows.equal("the weights after the step that was stopped", "as before" if same else "changed", "as before")


def _waits(training: Training, detection: AbstractContextManager[object], settings: Settings) -> int:
    """Count the waits for the device in a step; on a CPU also the copies of the extremes, which do not wait there."""
    copies = mock.Mock(side_effect=frames.to_host)
    with detection, mock.patch.object(frames, "to_host", copies):
        training.step()
        copies.reset_mock()
        with host_waits(settings.device) as waits:
            training.step()
    return waits.total + (0 if settings.on_gpu else copies.call_count)


def check(settings: Settings, rows: Rows) -> None:
    logging.getLogger("te_precision_callbacks").setLevel(logging.CRITICAL)  # the report of the planted inf
    _finds(settings, rows)
    training = Training(settings)
    without = _waits(training, contextlib.nullcontext(), settings)
    waits = _waits(training, DebugActivationOverflow(training.model), settings)
    rows.equal("host waits added to a step", waits - without, 1)
