"""The state of a training, put back bit for bit after a search."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch

from te_precision_callbacks.te.state import Fp8State


class RandomState:
    """The states of the random generators of torch, CUDA, NumPy and Python."""

    def __init__(self) -> None:
        self._python = random.getstate()
        self._numpy = np.random.get_state()
        self._torch = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restore(self) -> None:
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        torch.set_rng_state(self._torch)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


def _copied(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


class TrainingState:
    """The state of a model, its random generators, and an optimizer.

    Copies are in the memory of the host.

    Args:
        optimizer: if given, the parameters and the optimizer's state may change until :meth:`restore`.
    """

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        tensors = list(model.buffers())
        self.parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
        tensors += [gradient for _, gradient in self._gradients if gradient is not None]
        self._optimizer = optimizer
        self._optimizer_state: dict[Any, Any] = {}
        self._groups: list[dict[str, Any]] = []
        if optimizer is not None:
            tensors += model.parameters()
            self._optimizer_state = {key: dict(entry) for key, entry in optimizer.state.items()}
            values = [value for entry in self._optimizer_state.values() for value in entry.values()]
            tensors += [value for value in values if isinstance(value, torch.Tensor)]
            self._groups = [_options(group) for group in optimizer.param_groups]
        self._tensors = [(tensor, _copied(tensor)) for tensor in tensors]
        self._random = RandomState()
        self._fp8 = Fp8State(model)

    def begin(self) -> None:
        """Go back to the state, without gradients, and with a copy of the FP8 state to change."""
        self._put_back()
        for parameter, _ in self._gradients:
            parameter.grad = None
        self._fp8.lend_copy()

    def restore(self) -> None:
        """Go back to the state, bit for bit, with the same tensors."""
        self._put_back()
        for parameter, gradient in self._gradients:
            parameter.grad = gradient
        self._fp8.restore()

    def _put_back(self) -> None:
        with torch.no_grad():
            for tensor, value in self._tensors:
                tensor.copy_(value)
        if self._optimizer is not None:
            self._optimizer.state.clear()
            self._optimizer.state.update({key: dict(entry) for key, entry in self._optimizer_state.items()})
            for group, options in zip(self._optimizer.param_groups, self._groups, strict=True):
                group.update(copy.deepcopy(options))
        self._random.restore()


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}
