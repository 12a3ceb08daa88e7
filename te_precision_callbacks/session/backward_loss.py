"""The training loss as ``backward`` gets it, for scripts that log none."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from te_precision_callbacks.base.before_calls import BeforeCalls
from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.layers.forwards import outside_of_dynamo


class BackwardLoss:
    """Averages the losses with which ``owner.backward(loss)`` is called in a step, until it is removed.

    Nothing is copied from a device.

    Args:
        owner: an Accelerator, or a Fabric.
        report: receives failures.

    Attributes:
        remove: stops listening.
    """

    def __init__(self, owner: Any, report: Callable[[str, str, Exception], None]) -> None:
        self._report = report
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._of_last_step: dict[str, torch.Tensor] = {}
        self._script_logs = False
        self.remove = BeforeCalls(owner, "backward", self._note).remove

    def note_logged(self, scalars: Mapping[str, Any]) -> None:
        """Leave the loss to a script that logs it under the same name."""
        self._script_logs |= "loss" in scalars

    def end_step(self) -> None:
        """Keep the mean of the step that ends."""
        self._of_last_step = {} if self._sum is None else {"loss": self._sum / self._count}
        self._sum, self._count = None, 0

    def take(self) -> dict[str, torch.Tensor]:
        """The mean of the step that has ended last, as ``loss``, once; empty where the script logs the loss."""
        loss, self._of_last_step = self._of_last_step, {}
        return {} if self._script_logs else loss

    @outside_of_dynamo
    def _note(self, *losses: Any, **keywords: Any) -> None:
        # accelerator.backward(loss), fabric.backward(tensor, *args, model=None)
        loss = losses[0] if losses else keywords.get("loss", keywords.get("tensor"))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex() or is_capturing():
            return
        try:
            value = loss.detach().reshape(()).to(torch.float32, copy=True)
            self._sum = value if self._sum is None else self._sum + value.to(self._sum.device, non_blocking=True)
            self._count += 1
        except Exception as error:
            self._report("reading", "the loss of backward()", error)
