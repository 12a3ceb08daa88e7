"""Finds in which types a model and its optimizers keep what is beside the operands of products, in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from te_precision_callbacks.forwards import outside_of_dynamo
from te_precision_callbacks.naming import Model, named_roots
from te_precision_callbacks.records.state import StateRow
from te_precision_callbacks.session.precision import format_of
from te_precision_callbacks.vocabulary import name_of_format

OF_OPERATOR = {
    **dict.fromkeys(("native_layer_norm", "native_batch_norm", "native_group_norm", "_fused_rms_norm"), "norm"),
    **dict.fromkeys(("_softmax", "_safe_softmax"), "softmax"),
}
"""Operator of torch 2.13 -> what its result is counted as."""

_MASTER = "master_param"
"""The key under which Transformer Engine 2.20.2's FusedAdam keeps a weight in another type."""


class KeptState:
    """The types of what a model and its optimizers keep, seen when the optimizers have stepped.

    Args:
        report: receives failures.
    """

    def __init__(self, report: Callable[[str, str, Exception], None]) -> None:
        self._report = report
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._rows: dict[tuple[str, str, int], int] = {}
        self._results: Counter[tuple[str, str]] = Counter()
        self._remove: Callable[[], None] = _nothing

    def watch(self, model: Model) -> None:
        """Look at a model, and at the next steps of its optimizers."""
        self.close()
        roots = [root for _, root in named_roots(model) or ()]
        self._parameters = tuple(dict.fromkeys(parameter for root in roots for parameter in root.parameters()))
        self._remove = register_optimizer_step_post_hook(outside_of_dynamo(self._look)).remove

    def close(self) -> None:
        """Look no longer."""
        self._remove()
        self._remove = _nothing
        self._parameters, self._rows, self._results = (), {}, Counter()

    def note(self, operator: str, result: torch.Tensor) -> None:
        """Count the result of one of :data:`OF_OPERATOR`."""
        self._results[OF_OPERATOR[operator], _type(result)] += 1

    def rows(self) -> tuple[StateRow, ...]:
        """What was seen; of the model what it has now."""
        self._add("parameter", self._parameters)
        tensors: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for (subject, dtype, _), size in self._rows.items():
            tensors[subject, dtype] += 1
            sizes[subject, dtype] += size
        return tuple(StateRow(*key, count, sizes[key]) for key, count in (tensors + self._results).items())

    def _look(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        try:
            own = set(map(id, self._parameters))
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._add("master_weight", (parameter for parameter in stepped if id(parameter) not in own))
            for parameter in stepped:
                self._look_at_state(optimizer.state.get(parameter, {}), parameter)
            for subject, attribute in (("gradient", "grad"), ("main_grad", "main_grad")):
                found = (getattr(parameter, attribute, None) for parameter in self._parameters)
                self._add(subject, (tensor for tensor in found if tensor is not None))
        except Exception as error:
            self._report("looking at the state of", type(optimizer).__name__, error)

    def _look_at_state(self, state: dict[str, Any], parameter: torch.Tensor) -> None:
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() >= parameter.numel() > 0 and value.dim():
                self._add("master_weight" if name == _MASTER else "optimizer_state", (value,))

    def _add(self, subject: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._rows[subject, _type(tensor), id(tensor)] = tensor.numel() * tensor.element_size()


def _type(tensor: torch.Tensor) -> str:
    """A type as torch names it, or the format of a quantized tensor."""
    if name_of_format(tensor) is not None:
        return format_of(tensor, columnwise=False)
    return str(tensor.dtype).removeprefix("torch.")


def _nothing() -> None:
    pass
