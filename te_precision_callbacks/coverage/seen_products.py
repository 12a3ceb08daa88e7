"""Sees every matrix product of a model's step: the GEMMs of Transformer Engine through the tap, all others in torch.

A dispatch mode is active in a call of the model and in its backward, in one step. Of calls that are alike one is looked
at, and counts as often as there are such calls. The mode changes no number. A product belongs to the innermost module
that runs, and the product of a backward to that of the forward whose autograd node runs. One node can have many
products, as that of a compiled model: there the operands tell which of them is meant.

Read from torch 2.13: ``Module._compiled_call_impl``, which a call of a module runs instead of its own where it is set;
``torch.autograd._engine_run_backward``, which each backward calls.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import FrameType
from typing import Any, TypeVar

import torch
import torch.nn.modules.conv

from te_precision_callbacks.base.vocabulary import OPERANDS, GemmName, class_names
from te_precision_callbacks.coverage.coverage import Family, Product, ProductName, Reason
from te_precision_callbacks.coverage.gemm_events import AttentionEvent, AttentionSizes, GemmEvent
from te_precision_callbacks.coverage.gemm_precision import FROZEN, NO_INPUT_GRADIENT
from te_precision_callbacks.coverage.kept_state import LOSSES, OF_OPERATOR, REDUCING, KeptState
from te_precision_callbacks.coverage.lengths import Lengths
from te_precision_callbacks.coverage.marks import Marks, Weight, Weights, tensors_in
from te_precision_callbacks.coverage.matrix_products import (
    Bounds,
    MatrixProduct,
    Role,
    Sizes,
    by_values,
    is_product,
    products_of,
    why_not_counted,
)
from te_precision_callbacks.coverage.micro_batches import Call, Calls, leaves
from te_precision_callbacks.coverage.nodes import NodesOfProducts, products_of_node
from te_precision_callbacks.coverage.precision_audit import dtype_name, format_of, quantizer_format
from te_precision_callbacks.coverage.recomputed import Recomputed
from te_precision_callbacks.coverage.seeing import SeeingMode, is_seen_by
from te_precision_callbacks.coverage.state_row import StateRow
from te_precision_callbacks.coverage.surrounding import CallOfOneModule, TrainingStepOfOneModule
from te_precision_callbacks.layers.forwards import NO_BACKWARD, ForwardKind, in_evaluation, is_computing_again
from te_precision_callbacks.layers.naming import SURROUNDS, Model, named_roots

ResultT = TypeVar("ResultT")

_SOFTMAX = frozenset({"aten::_softmax", "aten::_safe_softmax"})

OPERAND_NAMES: Mapping[ProductName, tuple[str, str]] = {
    "fprop": OPERANDS["fprop"],
    "dgrad": OPERANDS["dgrad"],
    "wgrad": OPERANDS["wgrad"],
    "qk": ("query", "key"),
    "pv": ("probabilities", "value"),
    "other": ("a", "b"),
    "lookup": ("indices", "weight"),
}
"""The names of the operands of a product of the forward, and of dgrad and wgrad."""

_OF_BACKWARD = ("gradient", "saved")
"""Those of a product of the backward without a weight."""


@dataclass(slots=True, eq=False)
class _Seen:
    """A product that has run.

    Attributes:
        layer: the path of its module, with the name of the weight where that is not ``weight``.
        family: as ``Product.family``.
        role: what it is for, as far as is known; ``wgrad`` and ``dgrad`` only where the forward has a weight.
        formats: of its operands.
        sizes: n, m, k and batch.
        kind: what computes it, for a reason.
        weight: the parameter that a product of the forward multiplies by.
        of: the product of the forward, for one of a backward that torch has run.
        backward: whether it belongs to a backward.
        gradients: how many products of the backward, but for dgrad, are of this one.
        call: the call of the model in which it has run; None where each call is looked at.
        not_counted: the operator, and why it is not counted; empty for a product.
        bounds: as those of a :class:`MatrixProduct`.
    """

    layer: str
    family: Family
    role: Role
    formats: tuple[str, str]
    sizes: Sizes
    kind: str = ""
    weight: Weight | None = None
    of: _Seen | None = None
    backward: bool = False
    gradients: int = 0
    call: Call | None = None
    not_counted: str = ""
    bounds: Bounds | None = None

    @property
    def calls(self) -> int:
        """How many there are of it in the step."""
        if self.call is None:
            return 1
        return self.call.forwards if self.of is None else self.call.backwards

    @property
    def reason(self) -> Reason | None:
        """Why it does not run in low precision, as far as its place tells."""
        if self.family in ("te", "te_ops", "lookup"):
            return None
        return Reason.ATTENTION if self.kind in (UNFUSED_KERNEL, FUSED, OTHER_KERNEL) else Reason.NOT_TE

    @property
    def origin(self) -> _Seen:
        """The product of the forward that it belongs to, also where it is one of a backward's backward."""
        return self if self.of is None else self.of.origin

    @property
    def gemm(self) -> ProductName:
        return self.role or ("other" if self.of is None else self.of.gemm)


class ModelProducts:
    """The matrix products of the first step of a model.

    Args:
        report: receives failures.
        is_paused: tells whether the front door evaluates.
        in_gemm_layer: tells whether a layer of Transformer Engine runs its GEMMs, of which there are events.

    Attributes:
        counting: whether products are counted: from :meth:`watch` until the end of the first step that has any.
        attentions: id of a module of Transformer Engine's attention -> its path.
        recomputed: knows which layers a checkpoint has computed again outside of autocast.
    """

    def __init__(
        self,
        report: Callable[[str, str, Exception], None],
        is_paused: Callable[[], bool],
        in_gemm_layer: Callable[[], bool],
    ) -> None:
        self.counting = False
        self._report = report
        self._is_paused = is_paused
        self._in_gemm_layer = in_gemm_layer
        self._is_muted = False
        self._put_back: list[Callable[[], None]] = []
        self._state = KeptState(report, self._call_now)
        self._forget({})

    def _forget(self, modules: Mapping[int, tuple[str, torch.nn.Module]]) -> None:
        self._modules = modules
        self._operations: frozenset[str] = frozenset()
        self.attentions: Mapping[int, str] = {}
        self._root = ""
        self._told: set[str] = set()  # layers of which a product has run in their present forward
        self.recomputed = Recomputed()
        self._failure = ""
        self._seen: list[_Seen] = []
        self._nodes = NodesOfProducts[_Seen]()
        self._calls = Calls()
        self._backward_of: Call | None = None
        self._lengths = Lengths()
        self._weights = Weights()
        self._activations = Marks[list[_Seen]]()
        self._scores, self._probabilities = Marks[_Seen](), Marks[bool]()

    # ------------------------------------------------------------------ its life

    def watch(self, model: Model, names: Mapping[int, str], operations: Iterable[str]) -> None:
        """Count the products of the next step, instead of those of another model.

        Args:
            model: the model.
            names: id of a module -> its path.
            operations: the layers of ``te.ops``.
        """
        self.close()
        roots = [root for _, root in named_roots(model) or ()]
        modules = {id(module): module for root in roots for module in root.modules()}
        paths = {key: names[key] for key in modules if key in names}
        attentions = {key: paths[key] for key, module in modules.items() if key in paths and _is_attention(module)}
        for key, path in attentions.items():
            paths |= {id(part): path for part in modules[key].modules()}
        self._forget({key: (path, modules[key]) for key, path in paths.items()})
        self._operations, self.attentions = frozenset(operations), attentions
        self._root = next((paths[id(root)] for root in roots if id(root) in paths), "")
        self._state.watch(model, lambda: is_seen_by(self) and not _in_backward())
        self.counting = True
        for root in roots:
            self._surround_calls(root)
        engine: Any = torch.autograd
        self._replace(engine, "_engine_run_backward", self._around_backward(engine._engine_run_backward))

    def end_step(self) -> tuple[tuple[Product, ...], tuple[StateRow, ...]] | None:
        """End a step: its products and what is kept in which type, after which no more are counted; None where the step
        had no products."""
        if not self._seen and not self._failure:
            return None
        try:
            return tuple(self._products()), self._state.rows()
        finally:
            self.close()

    def _of_each_sequence(self, found: Iterable[_Seen]) -> Iterator[_Seen]:
        """Products that were seen, those of attention of several sequences for each of them."""
        numbers: Mapping[int, Sequence[int]] = {}
        try:
            numbers = self._lengths.read()
        except Exception as error:
            self._report("reading the lengths of sequences in", "a step", error)
        for seen in found:
            bounds = seen.bounds
            if bounds is None or id(bounds.queries) not in numbers:
                yield seen
                continue
            for sizes in bounds.sizes(seen.sizes, numbers[id(bounds.queries)], numbers[id(bounds.keys)]):
                yield replace(seen, sizes=sizes, bounds=None)

    def close(self) -> None:
        """Count no longer, and leave torch as it was."""
        self.counting = False
        self._state.close()
        while self._put_back:
            self._put_back.pop()()
        self._forget({})

    def _products(self) -> Iterator[Product]:
        """The products of the step, each once, followed by what is not counted."""
        seen = [one for one in self._seen if one.call is None] if self._failure else self._seen
        yield from _summed(self._of_each_sequence(one for one in seen if not one.not_counted))
        left: dict[tuple[str, str, bool], _Seen] = {}
        for one in seen:
            if one.not_counted:
                left.setdefault((one.layer, one.not_counted, one.backward), one)
        for (layer, what, backward), one in left.items():
            yield Product.uncounted(layer, one.family, what, backward=backward)
        for what in [self._failure] if self._failure else self._calls.left_out():
            yield Product.uncounted(self._root, "functional", what)

    def _surround_calls(self, root: Any) -> None:
        """Look at a model while it is called; at Lightning's modules while they take a training step."""
        own = root._compiled_call_impl
        around = CallOfOneModule(self._around_call(root, root._call_impl if own is None else own, tells_result=True))
        setattr(around, SURROUNDS, own)
        self._replace(root, "_compiled_call_impl", around)
        if "LightningModule" in class_names(root):
            step = self._around_call(root, root.training_step, tells_result=False)
            self._replace(root, "training_step", TrainingStepOfOneModule(step, root))

    def _around_call(self, root: Any, upstream: Callable[..., Any], *, tells_result: bool) -> Callable[..., Any]:
        """Around a call of a model: look at it if it is to be counted."""

        @functools.wraps(upstream)
        def around(*arguments: Any, **keywords: Any) -> Any:
            if not self._looks() or not torch.is_grad_enabled() or _in_backward():
                return upstream(*arguments, **keywords)
            outer = self._calls.here
            call = self._guarded(lambda: self._calls.begin(root, arguments, keywords)) if outer is None else None
            looking = self._looking() if call is not None and call.like is None else nullcontext()
            try:
                with looking:
                    result = upstream(*arguments, **keywords)
                self._guarded(lambda: self._end_call(call, result, tells_result=tells_result))
            finally:
                if outer is None:
                    self._calls.leave()
            return result

        return around

    def _end_call(self, call: Call | None, result: Any, *, tells_result: bool) -> None:
        here = self._calls.here
        if tells_result and here is not None and here.like is None:
            self._state.note_logits(result)
        if call is not None:
            self._nodes.bind(leaves(result))
            self._calls.end(call, result)

    def _around_backward(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        """Around a backward: look at it if it is that of a call that is counted."""

        @functools.wraps(upstream)
        def around(roots: Any, *arguments: Any, **keywords: Any) -> Any:
            if not self._looks():
                return upstream(roots, *arguments, **keywords)
            if _in_backward():  # a backward inside of another one is looked at as that one is
                self._guarded(lambda: self._nodes.bind(roots))
                return upstream(roots, *arguments, **keywords)
            looking = self._guarded(lambda: self._looking_at_backward(roots))
            with looking or nullcontext():
                return upstream(roots, *arguments, **keywords)

        return around

    def _looking_at_backward(self, roots: Iterable[Any]) -> AbstractContextManager[Any]:
        self._nodes.bind(roots)
        call = self._calls.begin_backward(roots)
        if call is not None:
            return nullcontext() if is_seen_by(self) else self._looking(call)
        if torch.distributed.is_available() and torch.distributed.is_initialized() and not self._state.saw_reduction:
            return SeeingMode(self, lambda: not self._looks(), only=REDUCING)
        return nullcontext()

    @contextmanager
    def _looking(self, backward_of: Call | None = None) -> Iterator[None]:
        self._guarded(lambda: self._weights.read(self._modules.values()))
        self._backward_of = backward_of
        try:
            with SeeingMode(self, lambda: not self._looks()):
                yield
        finally:
            self._backward_of = None

    def _looks(self) -> bool:
        return self.counting and not self._failure and not self._is_paused()

    def _guarded(self, do: Callable[[], ResultT]) -> ResultT | None:
        """What does not reach training if it fails, and is left out after a failure."""
        try:
            return None if self._failure else do()
        except Exception as error:
            self.fail(error)
            return None

    def fail(self, error: Exception) -> None:
        """Look at nothing of torch any more in this step, and report why."""
        first, self._failure = not self._failure, f"all products of torch: {type(error).__name__}: {error}"
        if first:
            self._report("counting the matrix products of", "a step", error)

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute of an object or a Python module itself, until :meth:`close`."""
        attributes = vars(owner)
        missing = object()
        before = attributes.get(name, missing)
        attributes[name] = value  # OptimizedModule would set the attribute of what it wraps

        def put_back() -> None:
            if attributes.get(name) is not value:
                return  # somebody has put theirs around it
            if before is missing:
                del attributes[name]
            else:
                attributes[name] = before

        self._put_back.append(put_back)

    # ------------------------------------------------------------------ what runs

    def note(self, event: GemmEvent) -> None:
        """Count a GEMM of a layer of Transformer Engine; a listener of the tap."""
        if not self.counting:
            return
        self.recomputed.note(event)
        if event.kind is not ForwardKind.OBSERVED:
            return
        call = event.call
        b, a = (format_of(operand.data, columnwise=operand.columnwise) for operand in (event.b, event.a))
        self.see_gemm(event.layer, event.gemm, (call.n, call.m, call.k), (b, a))

    def see_gemm(
        self, layer: str, gemm: GemmName, sizes: tuple[int, int, int], formats: tuple[str, str] = ("", "")
    ) -> None:
        """Count a GEMM of a layer of Transformer Engine: its n, m and k, and the formats of its operands."""
        family: Family = "te_ops" if layer in self._operations else "te"
        self._seen.append(_Seen(layer, family, gemm, formats, (*sizes, 1)))

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Look at no operator of torch."""
        self._is_muted = True
        try:
            yield
        finally:
            self._is_muted = False

    def enter_attention(self, layer: str, kind: ForwardKind) -> None:
        """Note that a forward of Transformer Engine's attention begins."""
        self._told.discard(layer)

    def note_attention(self, event: AttentionEvent) -> None:
        """Count the products of fused attention."""
        self._told.add(event.layer)
        if not self.counting or event.kind is not ForwardKind.OBSERVED:
            return
        query, key, value = (format_of(tensor, columnwise=False) for tensor in (event.query, event.key, event.value))
        if event.backward:
            gradient = format_of(event.gradient, columnwise=False)
            scores = format_made_by(event.scores, gradient)
            self.see_attention(event.layer, event.sizes, (scores, key), (gradient, value), FUSED, backward=True)
        else:
            probabilities = format_made_by(event.probabilities, query)
            self.see_attention(event.layer, event.sizes, (query, key), (probabilities, value), FUSED)

    def leave_attention(self, layer: str, kind: ForwardKind, given: Mapping[str, Any]) -> None:
        """Count the products of attention that no operator and no event has told of, by their sizes."""
        if not self.counting or not is_seen_by(self):
            return
        call = self._call_of_forward()
        if kind is ForwardKind.SILENT and not _in_backward():  # computed again in the backward of a checkpoint
            self._nodes.note_running(_Seen(layer, "attention", "", ("", ""), (0, 0, 0, 0), call=call))
        if layer in self._told or kind is not ForwardKind.OBSERVED or (call is None and _in_backward()):
            return
        tensors = given["query_layer"], given["key_layer"], given["value_layer"]
        query, key, value = (format_of(tensor, columnwise=False) for tensor in tensors)
        sizes = AttentionSizes.of(*tensors, given["qkv_format"])
        begun = len(self._seen)
        self.see_attention(layer, sizes, (query, key), (query, value), OTHER_KERNEL)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self.see_attention(layer, sizes, (query, key), (query, value), OTHER_KERNEL, backward=True)
        for seen in self._seen[begun:]:
            seen.call = call

    def see_attention(
        self,
        layer: str,
        sizes: AttentionSizes,
        qk: tuple[str, str],
        pv: tuple[str, str],
        kind: str,
        *,
        backward: bool = False,
    ) -> None:
        """Count the products of attention.

        Args:
            layer: its name.
            sizes: their sizes.
            qk, pv: the formats of the operands of each.
            kind: what computes them: :data:`FUSED`, :data:`UNFUSED_KERNEL` or :data:`OTHER_KERNEL`.
            backward: whether they are those of the backward, two of each.
        """
        batch, rows, columns, size, size_v = sizes
        products: tuple[tuple[Role, tuple[str, str], tuple[int, int, int, int]], ...] = (
            ("qk", qk, (rows, columns, size, batch)),
            ("pv", pv, (rows, size_v, columns, batch)),
        )
        for role, formats, of_forward in products:
            for _ in range(2 if backward else 1):  # a gradient for each of two operands, with as many multiply-adds
                self._seen.append(_Seen(layer, "attention", role, formats, of_forward, kind, backward=backward))

    def note_silent(self, layers: Iterable[str], what: str, backward: bool) -> None:
        """Note that layers of Transformer Engine have run without an event of a GEMM.

        Args:
            layers: the layers.
            what: what has run, and why.
            backward: whether it was its backward.
        """
        if self.counting:
            for layer in layers:
                family: Family = "te_ops" if layer in self._operations else "te"
                self._seen.append(_Seen(layer, family, "", ("", ""), (0, 0, 0, 0), backward=backward, not_counted=what))

    def before(self, arguments: Sequence[Any], *, of_shards: bool) -> None:
        """As of :class:`~te_precision_callbacks.coverage.seeing.Watcher`."""
        self._nodes.bind(arguments)
        if of_shards:
            self._nodes.enter_outer(arguments)

    def after(self, operator: str, arguments: Sequence[Any], result: Any) -> None:
        """As of :class:`~te_precision_callbacks.coverage.seeing.Watcher`."""
        self._look(operator, arguments, result)

    def note_sizes_by_values(self) -> None:
        """As of :class:`~te_precision_callbacks.coverage.seeing.Watcher`."""
        call = self._call_now()
        if call is not None:
            call.goes_by_values = True

    def _call_now(self) -> Call | None:
        """The call of the model to which belongs what runs in this thread."""
        return self._call_of_forward() or self._backward_of

    def _call_of_forward(self) -> Call | None:
        """The call of the model to which belongs the forward that runs in this thread, also one that is computed again
        in the backward of a node."""
        if not _in_backward():
            return self._calls.here
        of_node: list[_Seen] = products_of_node(torch._C._current_autograd_node())
        return of_node[0].call if of_node else None

    def _look(self, operator: str, arguments: Sequence[Any], result: Any) -> None:
        """Note a call of an operator of torch."""
        if self._is_muted or self._in_gemm_layer():
            return
        in_backward = _in_backward()
        if operator in REDUCING:
            if in_backward:
                self._state.note_reduced(operator, arguments)
            return
        left = why_not_counted(operator, arguments)
        if not left and not is_product(operator):
            if not in_backward:
                self._note_kept(operator, arguments, result)
            if not in_backward or torch.is_grad_enabled():  # so it is where a forward is computed again
                self._follow(operator, arguments, result)
            return
        products = self._lengths.keep(products_of(operator, arguments, result))
        if by_values(operator, arguments):
            self.note_sizes_by_values()
        if not in_backward:
            if not in_evaluation():
                self._note_forward(operator, products, arguments, result, left=left)
        elif is_computing_again():
            self._note_forward(operator, products, arguments, result, left=left, again=True)
        else:
            self._note_backward(operator, products, arguments, result, left=left)

    def _note_kept(self, operator: str, arguments: Sequence[Any], result: Any) -> None:
        """Note in which type the result of an operator of a forward is."""
        if operator in OF_OPERATOR and self._innermost_module() is not None:
            self._state.note(operator, next(tensors_in([result])))
        if operator in LOSSES:
            self._state.note_loss(arguments[0])

    def _follow(self, operator: str, arguments: Sequence[Any], result: Any) -> None:
        """Follow weights through casts, and what attention multiplies to its softmax and behind it."""
        results = list(tensors_in([result]))
        for tensor in tensors_in(arguments):
            if operator == "aten::_to_copy":
                self._weights.follow(tensor, result)
            scores = self._scores.get(tensor)
            if scores is not None and operator in _SOFTMAX:
                scores.role, scores.family = "qk", "attention"
            for made in results:
                if scores is not None and operator in _SOFTMAX:
                    self._probabilities.put(made, True)
                elif scores is not None:
                    self._scores.put(made, scores)
                elif self._probabilities.get(tensor):
                    self._probabilities.put(made, True)

    def _note_forward(
        self,
        operator: str,
        products: Iterable[MatrixProduct],
        arguments: Sequence[Any],
        result: Any,
        *,
        left: str,
        again: bool = False,
    ) -> None:
        """Note products of a forward; ``again`` for one that an activation checkpoint computes again, which is not
        counted, but may have the nodes of the backward; ``left`` for an operator that is not counted, and why."""
        call = self._call_of_forward()
        if again and call is None:
            return  # of a call that is not counted, whose backward runs with that of one that is
        inside = self._innermost_module()
        found = [(product, self._seen_in(operator, product, inside)) for product in products]
        if left and inside is not None:
            family: Family = "functional"
            seen = _Seen(inside[0], family, "", ("", ""), (0, 0, 0, 0), call=call, not_counted=_words(operator, left))
            self._nodes.note(seen, arguments, result)
            self._seen += [] if again else [seen]
        for product, one in found:
            if one is None:
                continue
            one.call = call
            self._told.add(one.layer)
            if not again:
                self._seen.append(one)
            self._nodes.note(one, arguments, result)
            if one.weight is not None:
                known = self._activations.get(product.a) or []
                self._activations.put(product.a, [*known, one])
            elif not one.role:
                self._scores.put(result, one)

    def _seen_in(
        self, operator: str, product: MatrixProduct, inside: tuple[str, torch.nn.Module] | None
    ) -> _Seen | None:
        """A product of the forward, with its place; None outside of the model."""
        looks_up = product.role == "lookup"
        weight = self._weights.find(product.b, inside, embedding=looks_up) or self._weights.find(product.a, inside)
        if weight is None and inside is not None and isinstance(inside[1], _WITH_WEIGHT):
            weight = Weight(inside[0], "weight", True)  # computed from parameters, as by a parametrization
        formats = dtype_name(product.a.dtype), dtype_name(product.b.dtype)
        sizes = product.n, product.m, product.k, product.batch
        if weight is not None:
            layer = weight.module if weight.name == "weight" else f"{weight.module}.{weight.name}"
            role: Role = "lookup" if looks_up else "fprop"
            own = inside is not None and inside[0] == weight.module and isinstance(inside[1], _WITH_WEIGHT)
            family: Family = "lookup" if role == "lookup" else "torch" if own else "functional"
            return _Seen(layer, family, role, formats, sizes, self._kind(inside, weight), weight)
        if inside is None:
            return None
        role = product.role
        if not role and self._probabilities.get(product.a):
            role = "pv"
        if not role and _UNFUSED in class_names(inside[1]):  # its softmax may be a kernel of Transformer Engine
            role = "qk" if operator == "aten::baddbmm" else "pv"
        family = "attention" if role in ("qk", "pv") else "functional"
        return _Seen(inside[0], family, role, formats, sizes, kind_of(inside[1]), bounds=product.bounds)

    def _kind(self, inside: tuple[str, torch.nn.Module] | None, weight: Weight) -> str:
        """The class of the module that computes a product; that of its weight where no module runs, as in a compiled
        graph and in the backward of an autograd Function."""
        of_weight = (module for path, module in self._modules.values() if path == weight.module)
        module = next(of_weight, None) if inside is None else inside[1]
        return "torch" if module is None else kind_of(module)

    def _note_backward(
        self,
        operator: str,
        products: Iterable[MatrixProduct],
        arguments: Sequence[Any],
        result: Any,
        *,
        left: str,
    ) -> None:
        of_node: list[_Seen] = products_of_node(torch._C._current_autograd_node())
        if not of_node:
            return  # of a product outside of the model
        if left:
            of = of_node[0]
            what = _words(operator, left)
            self._seen.append(
                _Seen(
                    of.layer,
                    of.family,
                    "",
                    ("", ""),
                    (0, 0, 0, 0),
                    of=of,
                    backward=True,
                    call=of.call,
                    not_counted=what,
                )
            )
        for product in products:
            of = self._meant(product, of_node)
            if self._is_again(product, of):
                continue
            role: Role = product.role
            weight = of.origin.weight
            if weight is not None and not role:
                role = self._role_in_backward(product, of, weight)
            of.gradients += role != "dgrad"
            formats, sizes = (dtype_name(product.a.dtype), dtype_name(product.b.dtype)), product[2:6]
            seen = _Seen(of.layer, of.family, role, formats, sizes, of.kind, of=of, backward=True, call=of.call)
            seen.bounds = product.bounds
            self._seen.append(seen)
            if torch.is_grad_enabled():  # with create_graph=True it has a node of its own
                self._nodes.note(seen, arguments, result)

    def _is_again(self, product: MatrixProduct, of: _Seen) -> bool:
        """Whether a backward computes a product of the forward again: by the same weight, and the same activation."""
        if of.weight is None or self._weights.find(product.b) != of.weight:
            return False
        return product[2:6] == of.sizes and of in (self._activations.get(product.a) or ())

    def _role_in_backward(self, product: MatrixProduct, of: _Seen, of_forward: Weight) -> Role:
        """Whether a product of the backward multiplies the gradient by the weight, or by the activation."""
        for operand in (product.a, product.b):
            weight = self._weights.find(operand)
            if weight is not None and weight.module == of_forward.module:
                return "dgrad"
        rows, columns, *_ = of.sizes
        return "dgrad" if product.k == columns and product.k != rows else "wgrad"

    def _meant(self, product: MatrixProduct, of_node: Sequence[_Seen]) -> _Seen:
        """The product of the forward for one of the backward of a node that has several: that of its role in attention;
        that with the same weight, or the same activation; else one of these sizes, which all take part in its
        gradients, that has not got them yet."""
        alike = [seen for seen in of_node if product.role in ("qk", "pv") and seen.role == product.role] or of_node
        if len(alike) == 1:
            return alike[0]
        operands = product.a, product.b
        weights = list(filter(None, map(self._weights.find, operands)))
        if weights:
            of_weight = next((seen for seen in reversed(alike) if seen.weight == weights[0]), None)
            return alike[0] if of_weight is None else of_weight
        of_activation = [seen for operand in operands for seen in self._activations.get(operand) or ()]
        for seen in (*(seen for seen in of_activation if seen in alike), *alike):
            wanted = 1 if seen.weight is not None else 2
            fits = sorted(seen.sizes[:3]) == sorted(product[2:5]) and seen.sizes[3] == product.batch
            if fits and seen.gradients < wanted:
                return seen
        return alike[0]

    def _innermost_module(self) -> tuple[str, torch.nn.Module] | None:
        """The innermost module of the model that runs: its path, and the module."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if frame.f_code.co_varnames[:1] == ("self",):
                found = self._modules.get(id(frame.f_locals.get("self")))
                if found is not None:
                    return found
            frame = frame.f_back
        return None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != NO_BACKWARD


def _words(operator: str, why: str) -> str:
    return f"{operator} {why}"


_WITH_WEIGHT = (torch.nn.Linear, torch.nn.Bilinear, torch.nn.modules.conv._ConvNd)
_UNFUSED = "UnfusedDotProductAttention"
"""Transformer Engine's attention in torch: it multiplies by ``baddbmm`` first, then by ``bmm`` (2.20.2,
``pytorch/attention/dot_product_attention/backends.py``)."""

_ATTENTION = "DotProductAttention"
"""Transformer Engine's attention, whose parts, one for each way to compute it, have its name."""

UNFUSED_KERNEL = "Transformer Engine's unfused attention"
FUSED = "Transformer Engine's fused attention"
OTHER_KERNEL = "another kernel of Transformer Engine's attention, counted by its sizes"


def _is_attention(module: torch.nn.Module) -> bool:
    """Whether a module is Transformer Engine's attention, or derived from it, as Megatron's is."""
    return any(
        base.__name__ == _ATTENTION and base.__module__.startswith("transformer_engine.")
        for base in type(module).__mro__
    )


def format_made_by(quantizer: Any, otherwise: str) -> str:
    """The format that attention rounds a tensor of its own to; without a quantizer, as in MXFP8, that of an operand."""
    return otherwise if quantizer is None else quantizer_format(quantizer, torch.float32, columnwise=False)


def kind_of(module: torch.nn.Module) -> str:
    """The class of a module, in words for a reason."""
    kind = type(module)
    if kind.__name__ == _UNFUSED:
        return UNFUSED_KERNEL
    return f"torch.nn.{kind.__name__}" if kind.__module__.startswith("torch.nn.") else kind.__name__


def _summed(seen: Iterable[_Seen]) -> Iterator[Product]:
    """The products of a step, each once, with what its calls amount to."""
    found: dict[tuple[str, ProductName, bool], list[_Seen]] = {}
    for one in seen:
        found.setdefault((one.layer, one.gemm, one.backward or one.gemm in ("dgrad", "wgrad")), []).append(one)
    has_backward = any(backward for _, _, backward in found)
    for (layer, gemm, backward), calls in found.items():
        first = calls[0]
        n, m, k, batch = first.sizes
        names = _OF_BACKWARD if backward and gemm not in OPERANDS else OPERAND_NAMES[gemm]
        formats = [" -> ".join(dict.fromkeys(call.formats[side] for call in calls)) for side in (0, 1)]
        yield Product(
            layer,
            first.family,
            gemm,
            backward,
            n,
            m,
            k,
            batch,
            sum(call.calls for call in calls),
            sum(call.calls * math.prod(call.sizes) for call in calls),
            dict(zip(names, formats, strict=True)),
            reason=first.reason,
            reason_ref=first.kind,
        )
        weight = first.weight
        if weight is None or gemm != "fprop" or not has_backward:
            continue
        if (layer, "dgrad", True) not in found:
            yield Product.left_out(layer, first.family, "dgrad", NO_INPUT_GRADIENT)
        if not weight.trains:
            yield Product.left_out(layer, first.family, "wgrad", FROZEN)
