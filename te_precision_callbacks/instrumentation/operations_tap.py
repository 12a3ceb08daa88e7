"""Finds the layers of ``te.ops`` for the tap.

Read from Transformer Engine 2.20.2: ``OperationFuser.__call__`` (``pytorch/ops/fuser.py``), ``fuser_forward`` and
``fuser_backward`` of the operations.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from te_precision_callbacks.coverage.precision_audit import recipe_text
from te_precision_callbacks.instrumentation.running import Forward, Running, unobserved
from te_precision_callbacks.layers.forwards import Classify
from te_precision_callbacks.layers.naming import NamedOperation
from te_precision_callbacks.layers.round_robin import RoundRobin


class OperationsTap:
    """Finds the layer of a GEMM of ``te.ops``.

    Args:
        report_silent: called with each forward without events, the operation, and whether it was the backward.

    Attributes:
        has_new: whether operations were added, or ran in another recipe, since the last iteration.
    """

    def __init__(
        self, classify: Classify, running: Running, report_silent: Callable[[Forward, str, bool], None]
    ) -> None:
        self.has_new = False
        self._classify = classify
        self._running = running
        self._report_silent = report_silent
        self._operations: dict[int, NamedOperation] = {}
        self._turns = RoundRobin[NamedOperation](())
        self._recipes: dict[int, Any] = {}

    @property
    def layers(self) -> list[str]:
        return [layer for operation in self._operations.values() for layer in operation.layers]

    def watch(self, operations: Iterable[NamedOperation]) -> None:
        self._operations = {id(operation.module): operation for operation in operations}
        self._turns = RoundRobin(list(self._operations.values()))
        self._recipes = self._recipes_now()
        self.has_new = bool(self._operations)

    def check_recipes(self, *, of_all: bool) -> None:
        checked = self._operations.values() if of_all else self._turns.take()
        self.has_new = any(_recipe_of(operation) != self._recipes[id(operation.module)] for operation in checked)
        if self.has_new:
            self._recipes = self._recipes_now()

    def _recipes_now(self) -> dict[int, Any]:
        return {key: _recipe_of(operation) for key, operation in self._operations.items()}

    def around_call(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def call(fuser: Any, *arguments: Any, **keywords: Any) -> Any:
            self._running.here.kind = self._classify(fuser._basic_ops[0])
            return upstream(fuser, *arguments, **keywords)

        return call

    def around_forward(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def fuser_forward(operation: Any, contexts: Any, *arguments: Any, **keywords: Any) -> Any:
            forward = self._of_operation(operation)
            for context in contexts:
                context.te_precision_forward = forward
            before = forward.events
            result = self._running.call(forward, False, upstream, operation, contexts, *arguments, **keywords)
            if forward.events == before:
                self._report_silent(forward, type(operation).__name__, False)
            return result

        return fuser_forward

    def around_backward(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def fuser_backward(operation: Any, contexts: Any, *arguments: Any, **keywords: Any) -> Any:
            forward = getattr(contexts[0], "te_precision_forward", None) or unobserved()
            layers = self._layers_in(operation)
            if len(layers) > 1 and forward.has_events:  # its forward is not the fused one
                named = tuple(name for layer in layers for name in layer)
                forward = Forward(named, forward.kind, forward.recipe, halves=False, has_events=False)
            before = forward.events
            result = self._running.call(forward, True, upstream, operation, contexts, *arguments, **keywords)
            if forward.events == before:
                self._report_silent(forward, type(operation).__name__, True)
            return result

        return fuser_backward

    def _layers_in(self, operation: Any) -> list[Sequence[str]]:
        basic = [operation, *getattr(operation, "basic_ops", ())]
        return [self._operations[id(part)].layers for part in basic if id(part) in self._operations]

    def _of_operation(self, operation: Any) -> Forward:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        layers = self._layers_in(operation)
        if not layers:
            return unobserved()
        in_force = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None
        named = tuple(name for layer in layers for name in layer)
        has_events = len(layers) == 1
        return Forward(named, self._running.here.kind, recipe_text(in_force), halves=False, has_events=has_events)


def _recipe_of(operation: NamedOperation) -> Any:
    """Return the recipe of an operation's last forward; None for high precision."""
    meta: Any = operation.module.__dict__["_fp8_metas"]
    return None if meta is None or meta["forward"] is None else meta["forward"].get("recipe")
