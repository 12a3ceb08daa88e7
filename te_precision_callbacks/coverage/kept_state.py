"""Finds in which types a model and its optimizers keep everything but the operands of products, in one step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeGuard

import torch

from te_precision_callbacks.base.vocabulary import class_names, name_of_format
from te_precision_callbacks.coverage.coverage import StateRow
from te_precision_callbacks.coverage.marks import tensors_in
from te_precision_callbacks.coverage.micro_batches import ModelCall
from te_precision_callbacks.coverage.precision_audit import format_of
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import Model, named_roots

OF_OPERATOR = {
    **dict.fromkeys(
        ("aten::native_layer_norm", "aten::native_batch_norm", "aten::native_group_norm", "aten::_fused_rms_norm"),
        "norm",
    ),
    **dict.fromkeys(("aten::_softmax", "aten::_safe_softmax"), "softmax"),
}
"""Operator of torch 2.13 -> what its result is counted as."""

REDUCING = {
    **dict.fromkeys(("c10d::allreduce_", "c10d::allreduce_coalesced_", "c10d::reduce_"), 0),
    **dict.fromkeys(("_c10d_functional::all_reduce", "_c10d_functional::all_reduce_coalesced"), 0),
    **dict.fromkeys(("c10d::reduce_scatter_", "c10d::_reduce_scatter_base_"), 1),
    "c10d::reduce_scatter_tensor_coalesced_": 1,
    "_c10d_functional::reduce_scatter_tensor": 0,
    "_c10d_functional::reduce_scatter_tensor_coalesced": 0,
}
"""Collective of ``c10d`` and ``_c10d_functional`` of torch 2.13 that sums over ranks -> the number of the argument with
what it sums."""

LOSSES = frozenset({"aten::_log_softmax"})
"""Operators whose first argument are logits."""

_NODES_OF_PARAMETERS = frozenset({"torch::autograd::AccumulateGrad", "RegisterPostBackwardFunctionBackward"})
"""The nodes of torch 2.13's autograd in which gradients of parameters are reduced; the second one is fully_shard's."""

_MASTER = "master_param"
"""The key under which Transformer Engine 2.20.2's FusedAdam keeps a weight in another type."""


class KeptState:
    """The types of what a model and its optimizers keep, seen when the optimizers have stepped.

    Args:
        report: receives failures.
        call_now: gives the call of the model that runs in this thread.
    """

    def __init__(
        self, report: Callable[[str, str, Exception], None], call_now: Callable[[], ModelCall | None] = lambda: None
    ) -> None:
        self._report = report
        self._call_now = call_now
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._rows: dict[tuple[str, str, int], int] = {}
        self._results: Counter[tuple[ModelCall | None, str, str]] = Counter()
        self._sizes: Counter[tuple[ModelCall | None, str, str]] = Counter()
        self._of_losses: list[tuple[ModelCall | None, str, int]] = []
        self._removals: list[Callable[[], None]] = []

    def watch(self, model: Model, is_counting: Callable[[], bool]) -> None:
        """Look at a model, at the calls of its blocks, and at what :meth:`note_step` is called with.

        Args:
            model: the model.
            is_counting: whether a call of a block is one of training.
        """
        self.close()
        roots = [root for _, root in named_roots(model) or ()]
        self._parameters = tuple(dict.fromkeys(parameter for root in roots for parameter in root.parameters()))

        def enter(module: torch.nn.Module, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> None:
            if is_counting():
                found = (value for value in (*arguments, *keywords.values()) if _is_stream(value))
                self._note("residual", next(found, None))

        for block in (block for root in roots for block in _blocks(root)):
            hook = block.register_forward_pre_hook(outside_of_dynamo(enter), with_kwargs=True)
            self._removals.append(hook.remove)

    def close(self) -> None:
        """Look no longer."""
        while self._removals:
            self._removals.pop()()
        self._parameters, self._rows = (), {}
        self._results, self._sizes, self._of_losses = Counter(), Counter(), []

    def note(self, operator: str, result: torch.Tensor) -> None:
        """Count the result of one of :data:`OF_OPERATOR`."""
        self._results[self._call_now(), OF_OPERATOR[operator], _type(result)] += 1

    def note_reduced(self, operator: str, arguments: Sequence[Any]) -> None:
        """Count what one of :data:`REDUCING` sums over ranks in a backward, if that are gradients of parameters.

        These are reduced behind the nodes of autograd that sum them up; what a layer of tensor parallelism reduces, in
        a separate node.
        """
        node = torch._C._current_autograd_node()
        if node is None or node.name() in _NODES_OF_PARAMETERS:
            for tensor in tensors_in([arguments[REDUCING[operator]]]):
                self._note("reduce", tensor)

    def note_logits(self, result: Any) -> None:
        """Count what a model has returned: its ``logits``, or its first tensor."""
        try:
            logits = result.get("logits") if isinstance(result, Mapping) else getattr(result, "logits", None)
            found = [logits, *(result if isinstance(result, (list, tuple)) else [result])]
            self._note("logits", next(filter(_is_stream, found), None))
        except Exception as error:
            self._report("looking at the result of", "the model", error)

    def note_loss(self, logits: torch.Tensor) -> None:
        """Note what one of :data:`LOSSES` takes."""
        self._of_losses.append((self._call_now(), _type(logits), _bytes(logits)))

    def _note(self, subject: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            key = self._call_now(), subject, _type(tensor)
            self._results[key] += 1
            self._sizes[key] += _bytes(tensor)

    @property
    def saw_reduction(self) -> bool:
        """Whether gradients have been reduced."""
        return any(subject == "reduce" for _, subject, _ in self._results)

    def rows(self) -> tuple[StateRow, ...]:
        """What was seen, counted for all calls of the model that are alike; of the model what it has now."""
        self._add("parameter", self._parameters)
        results, seen_sizes = Counter(self._results), Counter(self._sizes)
        if not any(subject == "logits" for _, subject, _ in results):
            for call, dtype, size in self._of_losses:
                results[call, "logits", dtype] += 1
                seen_sizes[call, "logits", dtype] += size
        tensors: Counter[tuple[str, str]] = Counter()
        sizes: Counter[tuple[str, str]] = Counter()
        for (subject, dtype, _), size in self._rows.items():
            tensors[subject, dtype] += 1
            sizes[subject, dtype] += size
        for (call, subject, dtype), count in results.items():
            calls = 1 if call is None else call.forwards
            tensors[subject, dtype] += calls * count
            sizes[subject, dtype] += calls * seen_sizes[call, subject, dtype]
        return tuple(StateRow(*key, count, sizes[key]) for key, count in tensors.items())

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """Look at what an optimizer keeps, after a step of it."""
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
            self._rows[subject, _type(tensor), id(tensor)] = _bytes(tensor)


def _type(tensor: torch.Tensor) -> str:
    """A type as torch names it, or the format of a quantized tensor."""
    if name_of_format(tensor) is not None:
        return format_of(tensor, columnwise=False)
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_stream(value: object) -> TypeGuard[torch.Tensor]:
    """Whether a value is a floating-point tensor of more than a number."""
    return isinstance(value, torch.Tensor) and value.is_floating_point() and value.dim() > 0


def _blocks(root: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The blocks of a model: modules with modules in them, of one class, in a list of at least two; the outermost.

    None of a model that is compiled, in part or as a whole: with a hook, it would be compiled anew.
    """
    if any(m._compiled_call_impl is not None or "OptimizedModule" in class_names(m) for m in root.modules()):
        return
    modules, seen = [*root.children()][::-1], {root}
    while modules:
        module = modules.pop()
        if module in seen:
            continue
        seen.add(module)
        members = list(module) if isinstance(module, (torch.nn.ModuleList, torch.nn.Sequential)) else []
        alike = len(members) > 1 and len({type(member) for member in members}) == 1
        if alike and all(any(True for _ in member.children()) for member in members):
            yield from members
        else:
            modules += [*module.children()][::-1]
