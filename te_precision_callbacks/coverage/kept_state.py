"""The dtypes of parameters, gradients, reductions and optimizer state in the first step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.vocabulary import name_of_format
from te_precision_callbacks.coverage.coverage import StateRow
from te_precision_callbacks.coverage.marks import tensors_in
from te_precision_callbacks.coverage.micro_batches import ModelCall
from te_precision_callbacks.coverage.precision_audit import format_of
from te_precision_callbacks.layers.naming import Model, named_roots

REDUCING = {
    **dict.fromkeys(("c10d::allreduce_", "c10d::allreduce_coalesced_", "c10d::reduce_"), 0),
    **dict.fromkeys(("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_coalesced"), 0),
    **dict.fromkeys(("c10d::reduce_scatter_", "c10d::_reduce_scatter_base_"), 1),
    "c10d::reduce_scatter_tensor_coalesced_": 1,
    "_c10d_functional::reduce_scatter_tensor": 0,
    "_c10d_functional::reduce_scatter_tensor_coalesced": 0,
}
"""Collective of torch 2.13 that sums over ranks -> the number of the argument that it reduces."""

_NODES_OF_PARAMETERS = frozenset({"torch::autograd::AccumulateGrad", "RegisterPostBackwardFunctionBackward"})
"""The autograd nodes of torch 2.13 in which gradients of parameters are reduced; the second one is fully_shard's."""

_MASTER = "master_param"
"""The key of a weight in another dtype in the state of Transformer Engine 2.20.2's FusedAdam."""


class KeptState:
    """Collects the dtypes of a model and its optimizers after the optimizers' step."""

    def __init__(
        self, report: Callable[[str, str, Exception], None], call_now: Callable[[], ModelCall | None] = lambda: None
    ) -> None:
        self._report = report
        self._call_now = call_now
        self.close()

    def close(self) -> None:
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._rows: dict[tuple[str, str, int], int] = {}
        self.reduced: list[tuple[ModelCall | None, str, int]] = []

    def watch(self, model: Model) -> None:
        self.close()
        roots = [root for _, root in named_roots(model) or ()]
        self._parameters = tuple(dict.fromkeys(parameter for root in roots for parameter in root.parameters()))

    def note_reduced(self, operator: str, arguments: Sequence[Any]) -> None:
        """Count the input of one of :data:`REDUCING` in a backward, if it holds gradients of parameters, which autograd
        nodes that accumulate them reduce. Tensor-parallel layers reduce in other nodes.
        """
        node = torch._C._current_autograd_node()
        if node is None or node.name() in _NODES_OF_PARAMETERS:
            for tensor in tensors_in([arguments[REDUCING[operator]]]):
                self.reduced.append((self._call_now(), _type(tensor), _bytes(tensor)))

    def rows(self) -> tuple[StateRow, ...]:
        self._add("parameter", self._parameters)
        tensors: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        entries = [(subject, dtype, 1, size) for (subject, dtype, _), size in self._rows.items()]
        entries += [("reduce", dtype, 1 if call is None else call.forwards, size) for call, dtype, size in self.reduced]
        for subject, dtype, times, size in entries:
            tensors[subject, dtype] += times
            sizes[subject, dtype] += times * size
        return tuple(StateRow(*key, count, sizes[key]) for key, count in tensors.items())

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            own = set(map(id, self._parameters))
            stepped = [parameter for group in optimizer.param_groups for parameter in group["params"]]
            self._add("master_weight", (parameter for parameter in stepped if id(parameter) not in own))
            for parameter in stepped:
                for name, value in optimizer.state.get(parameter, {}).items():
                    if isinstance(value, torch.Tensor) and value.numel() >= parameter.numel() > 0 and value.dim():
                        self._add("master_weight" if name == _MASTER else "optimizer_state", (value,))
            for subject, attribute in (("gradient", "grad"), ("main_grad", "main_grad")):
                gradients = (getattr(parameter, attribute, None) for parameter in self._parameters)
                self._add(subject, (tensor for tensor in gradients if tensor is not None))
        except Exception as error:
            self._report("looking at the state of", type(optimizer).__name__, error)

    def _add(self, subject: str, tensors: Iterable[torch.Tensor]) -> None:
        for tensor in tensors:
            self._rows[subject, _type(tensor), id(tensor)] = _bytes(tensor)


def _type(tensor: torch.Tensor) -> str:
    if name_of_format(tensor) is not None:
        return format_of(tensor, columnwise=False)
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
