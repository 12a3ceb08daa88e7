"""Parts of the tap: the layers of ``te.ops``, attention, and tensors that fused kernels write only in low precision.

Read from Transformer Engine 2.20.2: ``OperationFuser.__call__`` (``pytorch/ops/fuser.py``), ``fuser_forward`` and
``fuser_backward`` of the operations; and in ``pytorch/module``, ``apply_normalization`` and the functions that
``_act_func`` returns: the activation function, its derivative, and the derivative fused with the bias gradient.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from te_precision_callbacks.base.failures import Guard, Report
from te_precision_callbacks.base.numerics.layouts import unquantized
from te_precision_callbacks.base.replaced import AnyFunction
from te_precision_callbacks.coverage.formats import format_made_by, format_of, recipe_text
from te_precision_callbacks.coverage.model_watch import ModelProducts
from te_precision_callbacks.coverage.step_table import AttentionCall, StepTable, attention_sizes
from te_precision_callbacks.engine.kernels.columns import RECIPROCAL
from te_precision_callbacks.instrumentation.current_call import UNOBSERVED, Forward, Running
from te_precision_callbacks.layers.forwards import Classify, ForwardKind, running_forward
from te_precision_callbacks.layers.naming import NamedOperation
from te_precision_callbacks.te.state import current_recipe


class OperationsTap:
    """Finds the layer of a GEMM of ``te.ops``.

    Args:
        report_silent: called with each forward without events, the operation, and whether it was the backward.
    """

    def __init__(
        self, classify: Classify, running: Running, report_silent: Callable[[Forward, str, bool], None]
    ) -> None:
        self._classify = classify
        self._running = running
        self._report_silent = report_silent
        self._operations: dict[int, NamedOperation] = {}

    def watch(self, operations: Iterable[NamedOperation]) -> None:
        self._operations = {id(operation.module): operation for operation in operations}

    def wrap_call(self, upstream: AnyFunction) -> AnyFunction:
        @functools.wraps(upstream)
        def call(fuser: Any, *arguments: Any, **keywords: Any) -> Any:
            self._running.thread_state.kind = self._classify(fuser._basic_ops[0])
            return upstream(fuser, *arguments, **keywords)

        return call

    def wrap_forward(self, upstream: AnyFunction) -> AnyFunction:
        @functools.wraps(upstream)
        def fuser_forward(operation: Any, contexts: Any, *arguments: Any, **keywords: Any) -> Any:
            layers = self._layers_in(operation)
            kind = self._running.thread_state.kind
            forward = UNOBSERVED
            if layers and kind is not ForwardKind.UNTOUCHED:
                forward = self._forward_of(layers, kind, recipe_text(current_recipe()))
            for context in contexts:
                context.te_precision_forward = forward
            return self._run(forward, False, upstream, operation, contexts, *arguments, **keywords)

        return fuser_forward

    def wrap_backward(self, upstream: AnyFunction) -> AnyFunction:
        @functools.wraps(upstream)
        def fuser_backward(operation: Any, contexts: Any, *arguments: Any, **keywords: Any) -> Any:
            forward = getattr(contexts[0], "te_precision_forward", UNOBSERVED)
            layers = self._layers_in(operation)
            if len(layers) > 1 and not forward.is_fused:  # only the backward is fused
                forward = self._forward_of(layers, forward.kind, forward.recipe)
            return self._run(forward, True, upstream, operation, contexts, *arguments, **keywords)

        return fuser_backward

    def _run(
        self,
        forward: Forward,
        in_backward: bool,
        upstream: AnyFunction,
        operation: Any,
        *arguments: Any,
        **keywords: Any,
    ) -> Any:
        former_events = forward.events
        result = self._running.call(forward, upstream, operation, *arguments, **keywords)
        if forward.events == former_events:
            self._report_silent(forward, type(operation).__name__, in_backward)
        return result

    def _layers_in(self, operation: Any) -> list[Sequence[str]]:
        basic = [operation, *getattr(operation, "basic_ops", ())]
        return [self._operations[id(part)].names for part in basic if id(part) in self._operations]

    def _forward_of(self, layers: Sequence[Sequence[str]], kind: ForwardKind, recipe: str) -> Forward:
        forward = Forward()
        forward.layers = tuple(itertools.chain(*layers))
        forward.kind = kind
        forward.recipe = recipe
        forward.is_fused = len(layers) > 1
        forward.shapes = {}
        if kind is ForwardKind.OBSERVED:
            forward.watched = set()
        return forward


class AttentionTap:
    """Counts the products of fused attention, and reports the ends of the forwards of all attention modules.

    Attributes:
        names: id of an attention module -> its path.
    """

    def __init__(self, report: Report, running: Running, table: StepTable, products: ModelProducts | None) -> None:
        self.names: Mapping[int, str] = {}
        self._report = report
        self._running = running
        self._table = table
        self._products = products

    def enter(self, key: int, kind: ForwardKind) -> Forward:
        entered = Forward()
        entered.attention = self.names[key]
        entered.kind = kind
        return entered

    def leave(self, module: Any, entered: Forward) -> None:
        if self._products is None or entered.events:
            return
        with Guard(functools.partial(self._report, "observing the forward of", entered.attention)):
            frame = running_forward(module)
            arguments = {} if frame is None else dict(frame.f_locals)
            self._products.leave_attention(entered.attention, entered.kind, arguments)

    def wrap(self, upstream: AnyFunction) -> AnyFunction:
        signature = inspect.signature(upstream)

        @functools.wraps(upstream)
        def tapped(*operands: Any, **keywords: Any) -> Any:
            result = upstream(*operands, **keywords)
            running = self._running.thread_state.running
            if running is not None and running.attention:
                running.events += 1
                try:
                    if running.kind is ForwardKind.OBSERVED:
                        bound = signature.bind(*operands, **keywords)
                        bound.apply_defaults()
                        self._table.attention[_attention_call(running.attention, bound.arguments)] += 1
                except Exception as error:
                    self._report("observing the products of", running.attention, error)
            return result

        return tapped


def _attention_call(layer: str, arguments: Mapping[str, Any]) -> AttentionCall:
    """Return the call of a kernel, given its arguments by name; its gradient ``d_o`` in a backward.

    In a backward, the first operands are the gradients of the scores and of the result, in place of queries and
    probabilities.
    """
    tensors = arguments["q"], arguments["k"], arguments["v"]
    query, key, value = (format_of(tensor, columnwise=False) for tensor in tensors)
    layout = arguments["qkv_layout"].replace("3", "").replace("2", "").partition("_")[0]
    sizes = attention_sizes(*tensors, layout)
    if "d_o" not in arguments:
        probabilities = format_made_by(arguments["s_quantizer"], query)
        return AttentionCall(layer, False, (query, key), (probabilities, value), *sizes)
    gradient = format_of(arguments["d_o"], columnwise=False)
    scores = format_made_by(arguments.get("dp_quantizer"), gradient)
    return AttentionCall(layer, True, (scores, key), (gradient, value), *sizes)


_QUANTIZER_OF_NORM = 5  # position of the quantizer among the arguments of apply_normalization


class UnfusedTensors:
    """Keeps in high precision the tensors that a fused kernel writes only in low precision.

    The reference backend leaves them in ``unquantized``. On a GPU the same TE function runs again without a quantizer;
    training uses the first result.
    """

    def __init__(self, running: Running, report: Report) -> None:
        self._running = running
        self._report = report

    def wrap_norm(self, upstream: AnyFunction) -> AnyFunction:
        """Wrap ``apply_normalization``, which returns the activation of a module's first layer, and more."""
        observed = self._wrap(upstream, upstream, (0, "activation"), _QUANTIZER_OF_NORM)

        @functools.wraps(upstream)
        def apply_normalization(*arguments: Any) -> Any:
            forward = self._running.thread_state.running
            if forward is None:
                return upstream(*arguments)
            result = upstream(*arguments) if forward.high is None else observed(*arguments)
            if forward.watched is not None:
                forward.unread = (("input", result[2], RECIPROCAL),)
            return result

        return apply_normalization

    def wrap_act_func(self, upstream: AnyFunction) -> AnyFunction:
        """Wrap the functions of LayerNormMLP's ``_act_func``, which return fc2's activation and fc1's gradient."""
        wrap = functools.lru_cache(maxsize=64)(self._wrap)

        @functools.wraps(upstream)
        def act_func(*arguments: Any, **keywords: Any) -> Any:
            forward, backward, with_bias = upstream(*arguments, **keywords)
            return (
                wrap(forward, forward, (1, "activation")),
                wrap(backward, backward, (0, "gradient")),
                with_bias and wrap(with_bias, backward, (0, "gradient")),
            )

        return act_func

    def _wrap(self, function: Any, unfused: Any, operand: tuple[int, str], position: int = -1) -> AnyFunction:
        """Wrap a function that returns a tensor, or a tuple with the tensor in front.

        Args:
            unfused: returns the result in high precision if the quantizer is None.
            operand: layer index and name of the tensor.
            position: of the quantizer among the arguments.
        """

        def wrapped(*arguments: Any, **keywords: Any) -> Any:
            forward = self._running.thread_state.running
            if forward is None or forward.high is None or operand not in forward.wanted or operand in forward.read:
                return function(*arguments, **keywords)
            without_quantizer = list(arguments)
            without_quantizer[position] = None
            is_quantized = arguments[position] is not None
            unquantized.wanted = is_quantized
            try:
                result = function(*arguments, **keywords)
                high = unquantized.result
            finally:
                unquantized.wanted = False
                unquantized.result = None
            with Guard(functools.partial(self._report, "recomputing", f"{forward.layers[operand[0]]} {operand[1]}")):
                if high is None:
                    high = unfused(*without_quantizer, **keywords) if is_quantized else result
                forward.high[operand] = high[0] if isinstance(high, (list, tuple)) else high
            return result

        return wrapped
