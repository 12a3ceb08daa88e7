"""The matrix products of a model's steps: Transformer Engine's from the step's table, torch's from its operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.coverage.formats import format_of
from te_precision_callbacks.coverage.history import CountedStep
from te_precision_callbacks.coverage.micro_batches import NOT_CALLED, Kind, ModelCall, Parts
from te_precision_callbacks.coverage.model_watch import ModelWatch
from te_precision_callbacks.coverage.products import OTHER_KERNEL, CountedKinds, SeenProduct
from te_precision_callbacks.coverage.step_table import AttentionCall
from te_precision_callbacks.layers.forwards import ForwardKind, is_in_backward
from te_precision_callbacks.layers.gemm_events import AttentionSizes
from te_precision_callbacks.layers.naming import Model, NamedTorchModule, modules_of, named_attention, roots_of


class ModelProducts(ModelWatch):
    """The matrix products of a model's steps.

    Attributes:
        attentions: id of a module of Transformer Engine's attention -> its path.
    """

    attentions: Mapping[int, str]

    def watch_model(self, model: Model, names: Mapping[int, str]) -> None:
        """Count the products of a model from the next step on, and stop counting any other model.

        ``names`` maps ids of modules to paths.
        """
        self.close()
        named: dict[int, NamedTorchModule] = {}
        for module in modules_of(model):
            if id(module) in names:
                named[id(module)] = names[id(module)], module
        self.attentions = named_attention(model, names)
        for key, path in self.attentions.items():
            for part in named[key][1].modules():
                named[id(part)] = path, part
        self._kinds = CountedKinds(next((named[id(root)][0] for root in roots_of(model) if id(root) in named), ""))
        self.watch(model, named)

    def take_step(self) -> CountedStep | None:
        """End a step; None if it had no products."""
        if not self.active:
            return None
        try:
            gemms = self.table.step_gemms()
            is_first = self.calls.is_first
            step_calls = self.calls.end_step()
            parts: Parts = {} if self.failure else self._keep_products(step_calls)
            has_gemms = gemms is not None and bool(gemms.calls or gemms.attention or gemms.unseen)
            if not parts and not has_gemms and not self.failure:
                return None
            why_not = self.failure or ("" if parts else NOT_CALLED)
            return CountedStep(gemms, parts, self._kinds, self.state.rows() if is_first else None, why_not)
        finally:
            self.end_step()

    def _keep_products(self, step_calls: Sequence[ModelCall]) -> Parts:
        by_call = group_by_key((seen.call, seen) for seen in self.operators.seen)
        parts: Parts = {}
        counted: dict[Kind, list[tuple[ModelCall, list[SeenProduct]]]] = {}
        for call in step_calls:
            parts[call.kind, False] = parts.get((call.kind, False), 0) + 1
            if call.may_have_backward:
                parts[call.kind, True] = parts.get((call.kind, True), 0) + 1
            if call.is_counted:
                counted.setdefault(call.kind, []).append((call, by_call.get(call, [])))
        for kind, products in counted.items():
            self._kinds.put(kind, products, self.calls)
        return parts

    def note_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.counting and self.calls.is_first:
            self.state.note_step(optimizer)

    def close(self) -> None:
        super().close()
        self.attentions = {}
        self._kinds = CountedKinds("")

    # ------------------------------------------------------------------ attention

    def leave_attention(self, layer: str, kind: ForwardKind, arguments: Mapping[str, Any]) -> None:
        """Count the products of an attention with an unknown kernel, by the arguments of its forward."""
        if not self.counting or not self.sees_operators():
            return
        call = self.operators.forward_call()
        if kind is ForwardKind.SILENT and not is_in_backward():  # a checkpoint recomputes it in the backward
            self.operators.nodes.note_running(SeenProduct(layer, "attention", call=call))
        if kind is not ForwardKind.OBSERVED or (call is None and is_in_backward()):
            return
        if layer in self.operators.with_product:
            return
        tensors = arguments["query_layer"], arguments["key_layer"], arguments["value_layer"]
        sizes = AttentionSizes.of(*tensors, arguments["qkv_format"])
        query, key, value = (format_of(tensor, columnwise=False) for tensor in tensors)
        has_backward = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
        # In a backward, a gradient for each operand, with equal multiply-adds.
        for backward in (False, True, True) if has_backward else (False,):
            for seen in AttentionCall(layer, backward, (query, key), (query, value), sizes).products(OTHER_KERNEL):
                seen.call = call
                self.operators.see(seen)
