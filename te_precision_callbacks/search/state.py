"""The state of a training, put back bit for bit after a search."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from te_precision_callbacks.check.factory import format_failure
from te_precision_callbacks.search.units import SearchError
from te_precision_callbacks.te.state import Fp8State


class TrainingState:
    """The state of a model, its random generators, and an optimizer.

    Copies are in the memory of the host.

    Args:
        optimizer: if given, the parameters and the optimizer's state may change until :meth:`restore`.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.optimizer = optimizer
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        self._optimizer_state: dict[Any, Any] = {}
        self._groups: list[dict[str, Any]] = []
        tensors = [*model.buffers(), *(gradient for _, gradient in self._gradients if gradient is not None)]
        if optimizer is not None:
            tensors += model.parameters()
            self._optimizer_state = {key: dict(entry) for key, entry in optimizer.state.items()}
            for entry in self._optimizer_state.values():
                tensors += [value for value in entry.values() if isinstance(value, torch.Tensor)]
            self._groups = list(map(_options, optimizer.param_groups))
        self._tensors = {tensor: tensor.detach().to("cpu", copy=True) for tensor in tensors}
        self._generators: dict[Callable[[Any], object], Any] = {
            random.setstate: random.getstate(),
            np.random.set_state: np.random.get_state(),
            torch.set_rng_state: torch.get_rng_state(),
        }
        if torch.cuda.is_available():
            self._generators[torch.cuda.set_rng_state_all] = torch.cuda.get_rng_state_all()
        self._fp8 = Fp8State(model)

    def begin(self) -> None:
        """Go back to the state, without gradients, and with a copy of the FP8 state to change."""
        self._put_back()
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._fp8.lend_copy()

    def step(self) -> None:
        assert self.optimizer is not None  # noqa: S101
        try:
            self.optimizer.step()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            raise SearchError(format_failure("The step of optimizer= failed", error)) from error

    def updates(self) -> list[torch.Tensor]:
        """Step the optimizer; returns the changes of the parameters, in the memory of the host."""
        if self.optimizer is None:
            return []
        self.step()
        return [parameter.detach().cpu() - self._tensors[parameter] for parameter in self.parameters]

    def restore(self) -> None:
        """Go back to the state, bit for bit, with the same tensors."""
        self._put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._fp8.restore()

    def _put_back(self) -> None:
        with torch.no_grad():
            for tensor, value in self._tensors.items():
                tensor.copy_(value)
        if self.optimizer is not None:
            self.optimizer.state.clear()
            self.optimizer.state.update({key: dict(entry) for key, entry in self._optimizer_state.items()})
            for group, options in zip(self.optimizer.param_groups, self._groups, strict=True):
                group.update(copy.deepcopy(options))
        for put_back, state in self._generators.items():
            put_back(state)


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
