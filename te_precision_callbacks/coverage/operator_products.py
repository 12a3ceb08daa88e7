"""Products of torch's operators in a step, each with its module and weight; and the dtypes of a model's state.

A product in a forward belongs to the innermost running module. A product in a backward belongs to the forward product
of its autograd node; if a node has several, as in a compiled model, the operands decide. torch's ``ModuleTracker`` is
not used: in a backward it names other modules where an input needs no gradient (torch 2.13, BERT's keys). Nor are the
formulas of ``torch.utils.flop_counter``, which have no sizes.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.nn.modules.conv

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.optimizers import state_of
from te_precision_callbacks.base.vocabulary import class_names, name_of_format
from te_precision_callbacks.coverage.coverage import Family, StateRow
from te_precision_callbacks.coverage.formats import dtype_name, format_of
from te_precision_callbacks.coverage.marks import (
    UNFUSED,
    Marks,
    NodesOfProducts,
    Weight,
    WeightMarks,
    kind_of,
    products_of_current_node,
    tensors_in,
)
from te_precision_callbacks.coverage.matrix_products import (
    MatrixProduct,
    Role,
    products_of,
    why_not_counted,
)
from te_precision_callbacks.coverage.micro_batches import ModelCall, ModelCalls
from te_precision_callbacks.coverage.products import ATTENTION, SeenProduct
from te_precision_callbacks.coverage.step_table import StepTable
from te_precision_callbacks.layers.forwards import is_evaluation_forward, is_in_backward, is_recomputing
from te_precision_callbacks.layers.naming import Model, NamedTorchModule, parameters_of
from te_precision_callbacks.te import modules as te_modules

_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax"})

_OF_CONSTANTS = frozenset({"get_rht_matrix"})
"""Functions of Transformer Engine that multiply once in a process, for a constant: the matrix of NVFP4's Hadamard
transform (2.20, ``pytorch/tensor/nvfp4_tensor.py``)."""

_WITH_WEIGHT = (torch.nn.Linear, torch.nn.Bilinear, torch.nn.modules.conv._ConvNd)


class OperatorProducts:
    """Assigns each product to a module and a weight."""

    def __init__(
        self, modules: Mapping[int, NamedTorchModule], state: KeptState, calls: ModelCalls, table: StepTable
    ) -> None:
        self.nodes = NodesOfProducts()
        self.calls = calls
        self._modules = modules
        self._table = table
        self._state = state
        self._backward_of: ModelCall | None = None
        self.weights = WeightMarks()
        self._scores = Marks[SeenProduct]()

    @contextmanager
    def in_backward_of(self, call: ModelCall | None) -> Iterator[None]:
        self._backward_of = call
        try:
            yield
        finally:
            self._backward_of = None

    def note_data_dependent_sizes(self) -> None:
        call = self.current_call()
        if call is not None:
            call.has_data_dependent_sizes = True

    def current_call(self) -> ModelCall | None:
        return self.forward_call() or self._backward_of

    def forward_call(self) -> ModelCall | None:
        """The model call of the forward that runs in this thread, also of a forward recomputed in a backward."""
        if not is_in_backward():
            return self.calls.current
        at_node: list[SeenProduct] = products_of_current_node()
        if at_node:
            return at_node[0].call
        return None

    def note(self, operator: str, arguments: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> None:
        is_backward = is_in_backward()
        if operator in REDUCING:
            if is_backward:
                self._state.note_reduced(operator, arguments)
            return
        values = (*arguments, *keywords.values())
        uncounted = why_not_counted(operator, values)
        products = products_of(operator, arguments, result)
        if not products and not uncounted:
            if not is_backward or torch.is_grad_enabled():  # in a recomputed forward gradients are enabled
                self._follow(operator, values, result)
            return
        if any(product.sequences is not None for product in products):
            self.note_data_dependent_sizes()
        if not is_backward:
            if not is_evaluation_forward():
                self._note_forward(operator, products, values, result, uncounted=uncounted)
        elif is_recomputing():
            self._note_forward(operator, products, values, result, uncounted=uncounted, recomputed=True)
        else:
            self._note_backward(operator, products, uncounted=uncounted)

    def see(self, product: SeenProduct) -> None:
        if product.call is not None:
            product.place = len(self._table.calls) - 0.5
            product.call.seen.append(product)

    def _follow(self, operator: str, arguments: Sequence[Any], result: Any) -> None:
        """Follow weights through casts, and attention scores through the softmax."""
        if operator == "aten::_to_copy":
            for tensor in tensors_in(arguments):
                self.weights.follow(tensor, result)
        if not self._scores:
            return
        results = list(tensors_in([result]))
        for tensor in tensors_in(arguments):
            scores = self._scores.get(tensor)
            if scores is None:
                continue
            if operator in _SOFTMAX:
                scores.role = "qk"
                scores.family = "attention"
            for result_tensor in results:
                self._scores.put(result_tensor, scores)

    def _note_forward(
        self,
        operator: str,
        products: Iterable[MatrixProduct],
        arguments: Sequence[Any],
        result: Any,
        *,
        uncounted: str,
        recomputed: bool = False,
    ) -> None:
        """Note products of a forward.

        Args:
            uncounted: the reason if the operator is not counted.
            recomputed: whether an activation checkpoint recomputes it: not counted, but its nodes may get a backward.
        """
        call = self.forward_call()
        if (call is None and recomputed) or (call is not None and not call.is_counted and not recomputed):
            return  # its call is not counted, though its backward may run along with a counted call's
        inside = self._innermost_module()
        if inside is not None and te_modules.is_unknown(type(inside[1])):
            return
        placed: list[tuple[SeenProduct | None, MatrixProduct | None]]
        placed = [(self._seen_in(operator, product, inside), product) for product in products]
        if uncounted and inside is not None:
            placed = [(SeenProduct(inside[0], "functional", not_counted=f"{operator} {uncounted}"), None)]
        for seen, product in placed:
            if seen is None:
                continue
            seen.call = call
            if not recomputed:
                self.see(seen)
            self.nodes.note(seen, arguments, result)
            if product is not None and seen.weight is None and not seen.role:
                self._scores.put(result, seen)

    def _seen_in(self, operator: str, product: MatrixProduct, inside: NamedTorchModule | None) -> SeenProduct | None:
        is_lookup = product.role == "lookup"
        weight = self.weights.find(product.b, inside, embedding=is_lookup) or self.weights.find(product.a, inside)
        kind = ""
        has_weight = False
        if inside is not None:
            kind = kind_of(inside[1])
            has_weight = isinstance(inside[1], _WITH_WEIGHT)
        if weight is None and inside is not None and has_weight:
            weight = Weight(inside[0], "weight", True, kind)  # computed from parameters, as by a parametrization
        formats = _formats(product)
        if weight is not None:
            layer = f"{weight.module}.{weight.name}".removesuffix(".weight")
            family: Family = "functional"
            role: Role = "fprop"
            if is_lookup:
                family = role = "lookup"
            elif inside is not None and inside[0] == weight.module and has_weight:
                family = "torch"
            return SeenProduct(layer, family, role, formats, product.sizes, kind or weight.kind, weight)
        if inside is None:
            return None
        role = product.role
        scores = self._scores.get(product.a)
        if not role and scores is not None and scores.role == "qk":
            role = "pv"
        if not role and UNFUSED in class_names(inside[1]):  # its softmax may be a kernel of Transformer Engine
            role = "pv"
            if operator == "aten::baddbmm":
                role = "qk"
        family = "functional"
        if role in ATTENTION:
            family = "attention"
        return SeenProduct(inside[0], family, role, formats, product.sizes, kind, sequences=product.sequences)

    def _note_backward(
        self,
        operator: str,
        products: Iterable[MatrixProduct],
        *,
        uncounted: str,
    ) -> None:
        at_node: list[SeenProduct] = products_of_current_node()
        if not at_node:
            return  # the forward product was outside the model
        if uncounted:
            forward_product = at_node[0]
            what = f"{operator} {uncounted}"
            self.see(
                SeenProduct(
                    forward_product.layer,
                    forward_product.family,
                    backward=True,
                    call=forward_product.call,
                    not_counted=what,
                )
            )
        for product in products:
            forward_product = self._find_forward_product(product, at_node)
            role = product.role or forward_product.role
            if forward_product.weight is not None and not product.role:
                role = self._role_in_backward(product, forward_product, forward_product.weight)
            forward_product.gradients += role != "dgrad"
            self.see(
                SeenProduct(
                    forward_product.layer,
                    forward_product.family,
                    role,
                    _formats(product),
                    product.sizes,
                    forward_product.kind,
                    backward=True,
                    call=forward_product.call,
                    sequences=product.sequences,
                )
            )

    def _role_in_backward(self, product: MatrixProduct, forward_product: SeenProduct, forward_weight: Weight) -> Role:
        for operand in (product.a, product.b):
            weight = self.weights.find(operand)
            if weight is not None and weight.module == forward_weight.module:
                return "dgrad"
        rows, columns, *_ = forward_product.sizes
        if product.sizes[2] == columns != rows:
            return "dgrad"
        return "wgrad"

    def _find_forward_product(self, product: MatrixProduct, at_node: Sequence[SeenProduct]) -> SeenProduct:
        """The forward product of a backward product. If the node has several: by role in attention, or by weight, else
        the first product with matching sizes that still lacks gradients.
        """
        seen: SeenProduct
        candidates = list(at_node)
        if product.role in ATTENTION:
            candidates = [seen for seen in at_node if seen.role == product.role] or candidates
        if len(candidates) == 1:
            return candidates[0]
        weight = self.weights.find(product.a) or self.weights.find(product.b)
        if weight:
            return next((seen for seen in reversed(candidates) if seen.weight == weight), candidates[0])
        for seen in candidates:
            fits = sorted(seen.sizes[:3]) == sorted(product.sizes[:3]) and seen.sizes[3] == product.sizes[3]
            if fits and seen.gradients < (2 if seen.weight is None else seen.weight.trains):
                return seen
        return candidates[0]

    def _innermost_module(self) -> NamedTorchModule | None:
        """The innermost running module of the model with its path; None while a constant is created."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_name not in _OF_CONSTANTS:
            if frame.f_code.co_varnames[:1] == ("self",):
                named = self._modules.get(id(frame.f_locals.get("self")))
                if named is not None:
                    return named
            frame = frame.f_back
        return None


def _formats(product: MatrixProduct) -> tuple[str, str]:
    return dtype_name(product.a.dtype), dtype_name(product.b.dtype)


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

    def __init__(self, report: Report, current_call: Callable[[], ModelCall | None]) -> None:
        self._report = report
        self._call_now = current_call
        self.close()

    def close(self) -> None:
        self._parameters: tuple[torch.nn.Parameter, ...] = ()
        self._rows: dict[tuple[str, str, int], int] = {}
        self.reduced: list[tuple[ModelCall | None, str, int]] = []

    def watch(self, model: Model) -> None:
        self.close()
        self._parameters = tuple(parameters_of(model))

    def note_reduced(self, operator: str, arguments: Sequence[Any]) -> None:
        """Count the input of a reducing operator (:data:`REDUCING`) in a backward if it holds gradients of parameters.

        These are reduced in the autograd nodes that accumulate them; tensor-parallel layers reduce in other nodes.
        """
        node = torch._C._current_autograd_node()
        if node is None or node.name() in _NODES_OF_PARAMETERS:
            for tensor in tensors_in([arguments[REDUCING[operator]]]):
                self.reduced.append((self._call_now(), _type(tensor), _bytes(tensor)))

    def rows(self) -> tuple[StateRow, ...]:
        for parameter in self._parameters:
            self._add("parameter", parameter)
        sizes = group_by_key(((subject, dtype), size) for (subject, dtype, _), size in self._rows.items())
        for call, dtype, size in self.reduced:
            times = 1
            if call is not None:
                times = call.forwards
            sizes.setdefault(("reduce", dtype), []).extend([size] * times)
        return tuple(StateRow(*key, len(element_counts), sum(element_counts)) for key, element_counts in sizes.items())

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        try:
            model_ids = set(map(id, self._parameters))
            stepped = list(itertools.chain.from_iterable(group["params"] for group in optimizer.param_groups))
            for parameter in stepped:
                if id(parameter) not in model_ids:
                    self._add("master_weight", parameter)
            for parameter in stepped:
                for name, value in state_of(optimizer, parameter).items():
                    if isinstance(value, torch.Tensor) and value.numel() >= parameter.numel() > 0 and value.dim():
                        self._add({_MASTER: "master_weight"}.get(name, "optimizer_state"), value)
            for subject, attribute in (("gradient", "grad"), ("main_grad", "main_grad")):
                for parameter in self._parameters:
                    self._add(subject, getattr(parameter, attribute, None))
        except Exception as error:
            self._report("looking at the state of", type(optimizer).__name__, error)

    def _add(self, subject: str, tensor: torch.Tensor | None) -> None:
        if tensor is not None:
            self._rows[subject, _type(tensor), id(tensor)] = _bytes(tensor)


def _type(tensor: torch.Tensor) -> str:
    if name_of_format(tensor) is not None:
        return format_of(tensor, columnwise=False)
    return str(tensor.dtype).removeprefix("torch.")


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
