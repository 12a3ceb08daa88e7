"""The matrix products of a model's steps: GEMMs of Transformer Engine from the tap, all others from torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.coverage.coverage import Family
from te_precision_callbacks.coverage.matrix_products import Role
from te_precision_callbacks.coverage.micro_batches import Kind, ModelCall, Parts
from te_precision_callbacks.coverage.model_watch import ModelWatch, is_seen_by
from te_precision_callbacks.coverage.precision_audit import format_of, quantizer_format
from te_precision_callbacks.coverage.products import FUSED, OTHER_KERNEL, CountedKinds, CountedStep, SeenProduct
from te_precision_callbacks.layers.forwards import ForwardKind, is_in_backward
from te_precision_callbacks.layers.gemm_events import AttentionEvent, AttentionSizes, GemmEvent
from te_precision_callbacks.layers.naming import Model, NamedTorchModule, modules_of, named_attention, roots_of


class ModelProducts(ModelWatch):
    """The matrix products of a model's steps: a listener of the tap, and of torch's operators.

    Attributes:
        attentions: id of a module of Transformer Engine's attention -> its path.
        recomputed_outside: the layers that a reentrant checkpoint of torch, which does not restore autocast, recomputed
            without the recipe of their first forward.
    """

    def __init__(
        self,
        report: Report,
        is_paused: Callable[[], bool],
        count: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__(report, is_paused, count)
        self.attentions: Mapping[int, str] = {}
        self.recomputed_outside: set[str] = set()
        self._first_in_recipe: set[str] = set()
        self._operations: frozenset[str] = frozenset()
        self._kinds = CountedKinds("")

    def watch_model(self, model: Model, names: Mapping[int, str], operations: Iterable[str]) -> None:
        """Count the products of a model from the next step on, and stop counting any other model.

        ``names`` maps ids of modules to paths; ``operations`` are the layers of ``te.ops``.
        """
        self.close()
        named: dict[int, NamedTorchModule] = {}
        for module in modules_of(model):
            if id(module) in names:
                named[id(module)] = names[id(module)], module
        self._operations = frozenset(operations)
        self.attentions = named_attention(model, names)
        for key, path in self.attentions.items():
            for part in named[key][1].modules():
                named[id(part)] = path, part
        self._kinds = CountedKinds(next((named[id(root)][0] for root in roots_of(model) if id(root) in named), ""))
        self.watch(model, named)

    def take_step(self) -> CountedStep | None:
        """End a step. None if it had no products, or if counting has failed."""
        if not self.active or (self.failure and not self.counting):
            return None
        try:
            is_first = self.calls.is_first
            step_calls = self.calls.end_step()
            parts: Parts
            if self.failure:
                kind = Kind(self.failure)
                parts = {kind: (1, 1)}
                self._kinds.put_failed(kind, [seen for seen in self.operators.seen if seen.family in ("te", "te_ops")])
            else:
                parts = self._keep_products(step_calls)
            if not parts:
                return None
            state = None
            if is_first:
                state = self.state.rows()
            return CountedStep(parts, self._kinds, state)
        finally:
            self.end_step()
            if not self.counting:
                self._first_in_recipe = set()

    def _keep_products(self, step_calls: Sequence[ModelCall]) -> Parts:
        calls = self.calls
        by_call = group_by_key((seen.call, seen) for seen in self.operators.seen)
        parts: dict[Kind, tuple[int, int]] = {}
        counted: dict[Kind, list[tuple[ModelCall, list[SeenProduct]]]] = {}
        for call in step_calls:
            forwards, backwards = parts.get(call.kind, (0, 0))
            parts[call.kind] = forwards + 1, backwards + call.may_have_backward
            if call.is_counted:
                counted.setdefault(call.kind, []).append((call, by_call.get(call, [])))
        outside = calls.end_outside(has_products=bool(by_call.get(None)))
        if outside is not None:
            parts[outside] = 1, 1
            if calls.outside.is_counted:
                counted[outside] = [(calls.outside, by_call.get(None, []))]
        for kind, products in counted.items():
            has_equal_products = self._kinds.put(kind, products, calls.differ_in_integers)
            if has_equal_products is not None:
                calls.note_equal(kind, equal=has_equal_products)
        return parts

    def note_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.counting and self.calls.is_first:
            self.state.note_step(optimizer)

    def close(self) -> None:
        super().close()
        self.attentions = {}
        self.recomputed_outside = set()
        self._first_in_recipe = set()
        self._operations = frozenset()

    # ------------------------------------------------------------------ what runs

    def note(self, event: GemmEvent) -> None:
        if not self.counting:
            return
        if event.gemm == "fprop":
            self._note_recomputed(event)
        if event.kind is not ForwardKind.OBSERVED:
            return
        call = self._call_of(event)
        if call is None or call.is_counted:
            a = format_of(event.a.data, columnwise=event.a.columnwise)
            b = format_of(event.b.data, columnwise=event.b.columnwise)
            seen = SeenProduct(event.layer, self._family(event.layer), event.gemm, (b, a), (*event.sizes, 1), call=call)
            self.operators.seen.append(seen)

    def _call_of(self, event: GemmEvent) -> ModelCall | None:
        if self.failure:
            return None
        if event.gemm == "fprop" or "call" not in event.kept:
            event.kept["call"] = self.operators.current_call()
        call: ModelCall | None = event.kept["call"]
        return call

    def _note_recomputed(self, event: GemmEvent) -> None:
        """Compare the recipes of both forwards of a reentrant checkpoint, and keep the model call for the second."""
        if event.kind is ForwardKind.SILENT and not is_in_backward():
            if event.recipe:
                self._first_in_recipe.add(event.layer)
            self._note_running(event.layer)
        again = event.kind is ForwardKind.OBSERVED and not event.recipe and is_in_backward()
        if again and event.layer in self._first_in_recipe:
            self.recomputed_outside.add(event.layer)

    def _note_running(self, layer: str) -> None:
        seen = SeenProduct(layer, "attention", call=self.operators.forward_call())
        self.operators.nodes.note_running(seen)

    def _family(self, layer: str) -> Family:
        if layer in self._operations:
            return "te_ops"
        return "te"

    def enter_attention(self, layer: str) -> None:
        self.operators.with_product.discard(layer)

    def note_attention(self, event: AttentionEvent) -> None:
        self.operators.with_product.add(event.layer)
        call = self.operators.current_call()
        if not self.counting or event.kind is not ForwardKind.OBSERVED or (call is not None and not call.is_counted):
            return
        query, key, value = _formats_of(event.query, event.key, event.value)
        if event.backward:
            gradient = format_of(event.gradient, columnwise=False)
            scores = format_made_by(event.scores, gradient)
            self.see_attention(
                event.layer, event.sizes, (scores, key), (gradient, value), FUSED, backward=True, call=call
            )
        else:
            probabilities = format_made_by(event.probabilities, query)
            self.see_attention(event.layer, event.sizes, (query, key), (probabilities, value), FUSED, call=call)

    def leave_attention(self, layer: str, kind: ForwardKind, given: Mapping[str, Any]) -> None:
        if not self.counting or not is_seen_by(self):
            return
        call = self.operators.forward_call()
        if kind is ForwardKind.SILENT and not is_in_backward():  # a checkpoint recomputes it in the backward
            self._note_running(layer)
        if kind is not ForwardKind.OBSERVED or (call is None and is_in_backward()):
            return
        if layer in self.operators.with_product:
            return
        tensors = given["query_layer"], given["key_layer"], given["value_layer"]
        sizes = AttentionSizes.of(*tensors, given["qkv_format"])
        query, key, value = _formats_of(*tensors)
        self.see_attention(layer, sizes, (query, key), (query, value), OTHER_KERNEL, call=call)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            self.see_attention(layer, sizes, (query, key), (query, value), OTHER_KERNEL, backward=True, call=call)

    def see_attention(
        self,
        layer: str,
        sizes: AttentionSizes,
        qk: tuple[str, str],
        pv: tuple[str, str],
        kind: str,
        *,
        backward: bool = False,
        call: ModelCall | None = None,
    ) -> None:
        """Count the two products of attention, given the formats of their operands; in a backward, twice as many."""
        batch, rows, columns, size, size_v = sizes
        products: tuple[tuple[Role, tuple[str, str], tuple[int, int, int, int]], ...] = (
            ("qk", qk, (rows, columns, size, batch)),
            ("pv", pv, (rows, size_v, columns, batch)),
        )
        for role, formats, forward_sizes in products:
            for _ in range(1 + backward):  # in a backward, a gradient for each operand, with equal multiply-adds
                self.operators.seen.append(
                    SeenProduct(layer, "attention", role, formats, forward_sizes, kind, backward=backward, call=call)
                )

    def note_silent(self, layers: Iterable[str], what: str, backward: bool) -> None:
        """Note layers of Transformer Engine that ran without a GEMM event; ``what`` names the kernel and the reason."""
        call = self.operators.current_call()
        if self.counting and (call is None or call.is_counted):
            for layer in layers:
                seen = SeenProduct(layer, self._family(layer), backward=backward, call=call, not_counted=what)
                self.operators.seen.append(seen)


def _formats_of(*tensors: Any) -> list[str]:
    return [format_of(tensor, columnwise=False) for tensor in tensors]


def format_made_by(quantizer: Any, otherwise: str) -> str:
    """The format that a quantizer gives an inner tensor of attention; ``otherwise`` without one, as in MXFP8."""
    if quantizer is None:
        return otherwise
    return quantizer_format(quantizer, torch.float32, columnwise=False)
