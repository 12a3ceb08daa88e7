"""Sees every GEMM where Transformer Engine's Python hands its operands to the extension.

Read from Transformer Engine 2.20.2. While installed, these are replaced, and nothing else:

- ``general_gemm``, ``general_grouped_gemm`` and ``general_grouped_gemm_for_grouped_tensor``
  (``pytorch/cpp_extensions/gemm.py``) under every name under which a Python module has imported them: Transformer
  Engine's modules, ``te.ops``, and a user's own.
- ``prepare_forward`` and ``end_forward`` of the modules, which each forward calls with the module, and ``forward`` and
  ``backward`` of their autograd Functions. The layer of a forward is kept in the autograd context, since its backward
  runs in another thread.
- ``fused_attn_fwd`` and ``fused_attn_bwd`` (``pytorch/cpp_extensions/fused_attn.py``) in the same way, and ``forward``
  and ``backward`` of ``FusedAttnFunc``.
- ``WeightGradStore.put``, for a wgrad that runs later than its backward.
- ``OperationFuser.__call__``, and ``fuser_forward`` and ``fuser_backward`` of the operations of ``te.ops`` that have
  GEMMs.

Without a listener nothing is installed.

With ``fuse_wgrad_accumulation=True`` the wgrad GEMM writes into the weight's ``main_grad``, and its result is the sum
over all micro-batches so far. The product itself exists nowhere, and a difference of two sums is not exact. So if a
feature is about to look at the product, the same GEMM runs once before, into a separate tensor of the type of
``main_grad``, without any effect on training.

How many rows an expert has stands on the device where a GEMM is that of grouped tensors. It is read on the host only in
steps in which something looks at the GEMM.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.vocabulary import GEMM_OF_LAYOUT, OPERANDS, OperandName, class_names
from te_precision_callbacks.coverage.gemm_events import (
    OUTSIDE,
    AttentionEvent,
    AttentionListener,
    AttentionSizes,
    GemmEvent,
    GemmOperand,
    Listener,
)
from te_precision_callbacks.coverage.precision_audit import recipe_in_force, recipe_text
from te_precision_callbacks.coverage.seeing import modes_are_active, unseen
from te_precision_callbacks.instrumentation.handed import (
    GEMM,
    GROUPED_GEMM,
    GROUPED_TENSOR_GEMM,
    Gemms,
    Sources,
    arguments_of_forward,
    functions_of_modules,
    gradients,
    is_grouped_tensor,
    methods_of_operations,
    of_experts,
    of_grouped_tensors,
    of_one,
)
from te_precision_callbacks.layers.forwards import ForwardKind, outside_of_dynamo
from te_precision_callbacks.layers.naming import NamedOperation
from te_precision_callbacks.layers.turns import Turns

logger = logging.getLogger(__name__)

Classify = Callable[[torch.nn.Module], ForwardKind]


class _Forward:
    """A forward of a module, with its backward.

    Attributes:
        layers: the names of the module's layers; empty for a module that nobody listens to.
        kind: the kind of the forward.
        recipe: its recipe.
        is_heard: whether its GEMMs have events: those of an operation that several layers are fused in have none, since
            nothing tells which layer's GEMM one is.
        events: how many events there have been.
        high: (number of the layer, tensor) -> the tensor before its quantization, of the forward or backward that runs;
            None where nobody wants them.
    """

    __slots__ = ("_half", "_halves", "_read", "events", "high", "is_heard", "kind", "layers", "recipe")

    def __init__(
        self, layers: Sequence[str], kind: ForwardKind, recipe: str, *, halves: bool, is_heard: bool = True
    ) -> None:
        self.is_heard = is_heard
        self.events = 0
        self.layers = layers
        self.kind = kind
        self.recipe = recipe
        self.high: dict[tuple[int, str], Any] | None = None
        self._halves = halves
        self._half = 0
        self._read: set[tuple[int, str]] = set()

    def begin_forward(self) -> None:
        self._half = -1

    def begin_backward(self) -> None:
        self._half = 2

    def operand(self, number: int, tensor: OperandName, given: Any, *, columnwise: bool) -> GemmOperand:
        """An operand of a GEMM of one of the layers."""
        key = number, tensor
        first = key not in self._read
        self._read.add(key)
        high = None if self.high is None else self.high.get(key)
        return GemmOperand(tensor, given, columnwise, high, first)

    def number_of(self, gemm: str, expert: int | None) -> int:
        """The number of the layer whose GEMM runs next.

        LayerNormMLP has two: its forward, also a recomputed one, runs fc1 before fc2, and its backward fc2 before fc1,
        each dgrad before the wgrad of the same half.
        """
        if expert is not None or not self._halves:
            return expert or 0
        if gemm == "fprop":
            self._half = 0 if self._half in (-1, 2) else 1
        elif gemm == "dgrad":
            self._half = 1 if self._half in (-1, 0, 2) else 0
        return self._half


_UNHEARD = _Forward((), ForwardKind.UNTOUCHED, "", halves=False, is_heard=False)
"""That of all modules that nobody listens to."""

_OUTSIDE = _Forward((OUTSIDE,), ForwardKind.UNTOUCHED, "", halves=False)
"""That of GEMMs that no layer runs."""


class _Current(threading.local):
    """What runs in a thread.

    Attributes:
        entered: the forward of a module that is being run; None outside of them.
        running: the forward or backward of an autograd Function that runs; None outside of them.
        inside: whether a GEMM runs, which may call another one.
        kind: the kind of the forward of operations that is being run. They run in an autograd Function, where nothing
            tells training from evaluation any more.
    """

    entered: _Forward | None = None
    running: _Forward | None = None
    inside: bool = False
    kind: ForwardKind = ForwardKind.UNTOUCHED


class GemmTap:
    """Calls listeners behind each GEMM.

    Args:
        classify: decides the kind of a forward.
        report: receives failures of listeners.

    Attributes:
        has_new_operations: whether operations of ``te.ops`` have been given, or run in another recipe, since the last
            iteration: in the other modules the session notices that by itself.
        on_entered: called in each forward of a module of which there are events, behind its preparation, with the
            module and the kind of the forward; returns whether listeners want the tensors before their quantization.
        attention: is told of attention.
        on_silent: called with layers, what has run, and whether it was the backward, behind a forward or backward of
            training that has GEMMs and of which there was no event, as where they are in a kernel of their own.
    """

    def __init__(self, classify: Classify, report: Callable[[str, str, Exception], None]) -> None:
        self._classify = classify
        self._report = report
        self._listeners: tuple[Listener, ...] = ()
        self._layers: Mapping[int, Sequence[str]] = {}
        self._heard: Mapping[int, Any] = {}
        self._operations: dict[int, NamedOperation] = {}
        self._attentions: Mapping[int, str] = {}
        self.attention: AttentionListener | None = None
        self._turns = Turns[NamedOperation](())
        self._recipes: dict[int, Any] = {}
        self.has_new_operations = False
        self.on_entered: Callable[[torch.nn.Module, ForwardKind], bool] | None = None
        self.on_silent: Callable[[Sequence[str], str, bool], None] | None = None
        self._current = _Current()
        self._orders = itertools.count()
        self._replaced: list[tuple[Any, str, Any, Any]] = []
        self._callers: list[tuple[Any, str]] = []
        self._said_foreign = self._said_captured = False
        self._modules = 0  # so many there were when the callers were found

    @property
    def installed(self) -> bool:
        """Whether anything of Transformer Engine is replaced."""
        return bool(self._replaced)

    @property
    def layers_of_operations(self) -> list[str]:
        """The layers of ``te.ops``."""
        return [layer for operation in self._operations.values() for layer in operation.layers]

    def in_layer(self) -> bool:
        """Whether this thread runs a layer's GEMMs: all products inside are those of the events."""
        return self._current.inside or self._current.running is not None

    def hear(self, heard: Mapping[int, Any], attentions: Mapping[int, str] | None = None) -> None:
        """Set of which modules there are events; the mapping may change from step to step.

        Args:
            heard: the ids of modules with GEMMs.
            attentions: id of a module of attention -> its name.
        """
        self._heard, self._attentions = heard, attentions or {}

    def watch(
        self,
        layers: Mapping[int, Sequence[str]],
        operations: Iterable[NamedOperation],
    ) -> None:
        """Set the modules whose GEMMs have a layer; there are events of those that :meth:`hear` names.

        Args:
            layers: id of a module -> the names of its layers.
            operations: those of ``te.ops`` with GEMMs; there are events of all of them.
        """
        self._layers = layers
        self._operations = {id(operation.module): operation for operation in operations}
        self._turns = Turns(list(self._operations.values()))
        self._recipes = self._recipes_of_operations()
        self.has_new_operations = bool(self._operations)

    def begin_iteration(self, *, all_operations: bool = True) -> None:
        """Count the GEMMs from 0 again, and look whether operations have run in another recipe than before.

        Args:
            all_operations: whether all are looked at, and not only those that have their turn.
        """
        self._orders = itertools.count()
        looked = self._operations.values() if all_operations else self._turns.take()
        self.has_new_operations = any(_recipe_of(each) != self._recipes[id(each.module)] for each in looked)
        if self.has_new_operations:
            self._recipes = self._recipes_of_operations()

    def _recipes_of_operations(self) -> dict[int, Any]:
        return {key: _recipe_of(operation) for key, operation in self._operations.items()}

    def listen(self, *listeners: Listener) -> None:
        """Have these called, and no others; without any, Transformer Engine is as it was."""
        self._listeners = listeners
        if listeners and not self._replaced:
            self._install()
        elif not listeners and self._replaced:
            self._remove()

    # ------------------------------------------------------------------ what is replaced

    def _install(self) -> None:
        from transformer_engine.pytorch.attention.dot_product_attention import backends
        from transformer_engine.pytorch.cpp_extensions import fused_attn, gemm
        from transformer_engine.pytorch.module import _common, base
        from transformer_engine.pytorch.ops import fuser

        self._current = _Current()
        around_functions = {
            "general_gemm": self._around_gemm,
            "general_grouped_gemm": self._around_grouped,
            "general_grouped_gemm_for_grouped_tensor": self._around_grouped_tensors,
        }
        wrapped: dict[int, Any] = {}
        around_attention = {"fused_attn_fwd": self._around_attention, "fused_attn_bwd": self._around_attention}
        arounds_of_all = {**around_functions, **around_attention}
        for module, name in self._find_callers({gemm: tuple(around_functions), fused_attn: tuple(around_attention)}):
            found = getattr(module, name)
            self._replace(module, name, wrapped.setdefault(id(found), arounds_of_all[name](found)))
        module_class = base.TransformerEngineBaseModule
        for name, around in (("prepare_forward", self._around_prepare), ("end_forward", self._around_end)):
            self._replace(module_class, name, around(getattr(module_class, name)))
        for function, high in (*functions_of_modules(), (backends.FusedAttnFunc, None)):
            self._replace(function, "forward", staticmethod(self._around_forward(function.forward, high)))
            self._replace(function, "backward", staticmethod(self._around_backward(function.backward)))
        store = _common.WeightGradStore
        self._replace(store, "put", self._around_put(store.put))
        self._replace(fuser.OperationFuser, "__call__", self._around_fuser(fuser.OperationFuser.__call__))
        arounds = {"fuser_forward": self._around_fuser_forward, "fuser_backward": self._around_fuser_backward}
        for operation, name, method in methods_of_operations(tuple(arounds)):
            self._replace(operation, name, arounds[name](method))

    def _find_callers(self, functions: Mapping[Any, Sequence[str]]) -> list[tuple[Any, str]]:
        """The Python modules that have imported a function of ``cpp_extensions``, and under which name.

        Args:
            functions: Python module of ``cpp_extensions`` -> the functions.
        """
        origins = {name: origin for origin, names in functions.items() for name in names}
        if len(sys.modules) != self._modules:
            self._modules = len(sys.modules)
            self._callers = [
                (module, name)
                for module in list(sys.modules.values())
                for name, origin in origins.items()
                if (found := getattr(module, "__dict__", {}).get(name)) is not None
                # Transformer Engine's modules may have one of the user's own.
                if found is getattr(origin, name) or (callable(found) and _is_of_transformer_engine(module))
            ]
            self._say_foreign(origins)
        return self._callers

    def _say_foreign(self, origins: Mapping[str, Any]) -> None:
        """Say once which functions of the user's own stand in the place of Transformer Engine's."""
        theirs = [
            f"{module.__name__}.{name}"
            for module, name in self._callers
            if getattr(module, name) is not getattr(origins[name], name)
        ]
        if theirs and not self._said_foreign:
            self._said_foreign = True
            logger.info(
                "%s is not Transformer Engine's own function. It is kept: the session looks at what Transformer Engine"
                " hands to it, and then calls it.",
                " and ".join(theirs),
            )

    def _replace(self, owner: Any, name: str, value: Any) -> None:
        own = vars(owner).get(name)
        self._replaced.append((owner, name, own, value))
        setattr(owner, name, value)

    def _remove(self) -> None:
        while self._replaced:
            owner, name, own, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue  # somebody has put theirs around ours, which goes on to call what it stood for
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)
        self._current = _Current()

    # ------------------------------------------------------------------ which layer runs

    def _around_prepare(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        @outside_of_dynamo
        def prepare_forward(module: Any, *arguments: Any, **keywords: Any) -> Any:
            result = upstream(module, *arguments, **keywords)
            if id(module) in self._attentions:
                self._current.entered = self._entered_attention(module)
            else:
                self._current.entered = self._entered(module) if id(module) in self._heard else _UNHEARD
            return result

        return prepare_forward

    def _entered(self, module: Any) -> _Forward:
        try:
            halves = "LayerNormMLP" in class_names(module)
            recipe = recipe_in_force(module, fp8=module.fp8)
            entered = _Forward(self._layers[id(module)], self._classify(module), recipe, halves=halves)
            if self.on_entered is not None and self.on_entered(module, entered.kind):
                entered.high = {}
        except ObservationError:
            raise
        except Exception as error:
            self._report("looking at the forward of", str(getattr(module, "name", "a module")), error)
            return _UNHEARD
        return entered

    def _entered_attention(self, module: Any) -> _Forward:
        layer = self._attentions[id(module)]
        try:
            meta = module.fp8_meta
            local = meta.get("local_recipes") or [meta.get("recipe")]  # its recipe is that of the products alone
            entered = _Forward(
                (layer,), self._classify(module), recipe_text(local[0] if module.fp8 else None), halves=False
            )
            if self.attention is not None:
                self.attention.enter_attention(layer, entered.kind)
        except Exception as error:
            self._report("looking at the forward of", layer, error)
            return _UNHEARD
        return entered

    def _leave_attention(self, module: Any, entered: _Forward) -> None:
        try:
            if self.attention is not None:
                self.attention.leave_attention(entered.layers[0], entered.kind, arguments_of_forward(module))
        except Exception as error:
            self._report("looking at the forward of", entered.layers[0], error)

    def _sources(self, forward: _Forward, find: Callable[[], dict[tuple[int, str], Any]]) -> dict[tuple[int, str], Any]:
        """The tensors of a forward or backward before their quantization."""
        try:
            return find()
        except Exception as error:
            self._report("finding the tensors of", forward.layers[0], error)
            return {}

    def _around_end(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        @outside_of_dynamo
        def end_forward(module: Any) -> Any:
            entered, self._current.entered = self._current.entered, None
            if id(module) in self._attentions and entered not in (None, _UNHEARD):
                self._leave_attention(module, entered)
            return upstream(module)

        return end_forward

    def _run(self, forward: _Forward | None, function: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
        """Call a function as a part of a forward, or of its backward. Its products have events: no mode looks at it."""
        current = self._current
        before, current.running = current.running, forward
        try:
            if not modes_are_active():
                return function(*arguments, **keywords)
            with unseen():
                return function(*arguments, **keywords)
        finally:
            current.running = before

    def _around_forward(self, upstream: Callable[..., Any], high: Sources | None) -> Callable[..., Any]:
        """Around the forward of an autograd Function.

        Args:
            upstream: the forward.
            high: finds its tensors before their quantization; None for attention, which has no GEMMs.
        """

        @functools.wraps(upstream)
        def forward(ctx: Any, *arguments: Any) -> Any:
            entered = self._current.entered or _UNHEARD
            entered.begin_forward()
            if ctx is not None:
                ctx.te_precision_forward = entered
            if high is None:
                return self._run(entered, upstream, ctx, *arguments)
            before = entered.events
            if entered.high is not None:
                entered.high = self._sources(entered, lambda: high(arguments))
            try:
                result = self._run(entered, upstream, ctx, *arguments)
            finally:
                entered.high = None if entered.high is None else {}
            if entered.events == before:
                self._tell_silent(entered, upstream.__qualname__.partition(".")[0].lstrip("_"), backward=False)
            return result

        return forward

    def _around_backward(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def backward(ctx: Any, *arguments: Any) -> Any:
            entered = getattr(ctx, "te_precision_forward", _UNHEARD)
            entered.begin_backward()
            if entered.high is None:
                return self._run(entered, upstream, ctx, *arguments)
            entered.high = self._sources(entered, lambda: gradients(ctx, arguments[0], len(entered.layers)))
            try:
                return self._run(entered, upstream, ctx, *arguments)
            finally:
                entered.high = {}

        return backward

    def _around_put(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def put(store: Any, tensors: Any, function: Callable[..., Any]) -> Any:
            running = self._current.running
            if running is None:
                return upstream(store, tensors, function)
            half, high = running._half, running.high

            @functools.wraps(function)
            def later(*arguments: Any) -> Any:
                running._half = half
                running.high, before = high, running.high
                try:
                    return self._run(running, function, *arguments)
                finally:
                    running.high = before

            return upstream(store, tensors, later)

        return put

    def _around_fuser(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def call(fuser: Any, *arguments: Any, **keywords: Any) -> Any:
            self._current.kind = self._classify(fuser._basic_ops[0])
            return upstream(fuser, *arguments, **keywords)

        return call

    def _around_fuser_forward(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def fuser_forward(operation: Any, contexts: Any, *arguments: Any, **keywords: Any) -> Any:
            forward = self._of_operation(operation)
            for context in contexts:
                context.te_precision_forward = forward
            before = forward.events
            result = self._run(forward, upstream, operation, contexts, *arguments, **keywords)
            if forward.events == before:
                self._tell_silent(forward, type(operation).__name__, backward=False)
            return result

        return fuser_forward

    def _around_fuser_backward(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def fuser_backward(operation: Any, contexts: Any, *arguments: Any, **keywords: Any) -> Any:
            forward = getattr(contexts[0], "te_precision_forward", _UNHEARD)
            layers = self._layers_in(operation)
            if len(layers) > 1 and forward.is_heard:  # its forward is not the fused one
                named = tuple(name for layer in layers for name in layer)
                forward = _Forward(named, forward.kind, forward.recipe, halves=False, is_heard=False)
            before = forward.events
            result = self._run(forward, upstream, operation, contexts, *arguments, **keywords)
            if forward.events == before:
                self._tell_silent(forward, type(operation).__name__, backward=True)
            return result

        return fuser_backward

    def _tell_silent(self, forward: _Forward, what: str, *, backward: bool) -> None:
        """Tell of layers that have run without an event."""
        if self.on_silent is None or not forward.layers or forward.kind is not ForwardKind.OBSERVED:
            return
        try:
            self.on_silent(forward.layers, f"the GEMMs of {what}, which runs them in a kernel of its own", backward)
        except Exception as error:
            self._report("noting what is not seen of", forward.layers[0], error)

    def _layers_in(self, operation: Any) -> list[Sequence[str]]:
        """The layers of each operation with GEMMs that an operation is, or consists of."""
        basic = [operation, *getattr(operation, "basic_ops", ())]
        return [self._operations[id(one)].layers for one in basic if id(one) in self._operations]

    def _of_operation(self, operation: Any) -> _Forward:
        from transformer_engine.pytorch.quantization import FP8GlobalStateManager

        layers = self._layers_in(operation)
        if not layers:
            return _UNHEARD
        in_force = FP8GlobalStateManager.get_fp8_recipe() if FP8GlobalStateManager.is_fp8_enabled() else None
        named = tuple(name for layer in layers for name in layer)
        is_heard = len(layers) == 1
        return _Forward(named, self._current.kind, recipe_text(in_force), halves=False, is_heard=is_heard)

    # ------------------------------------------------------------------ the GEMMs

    def _around_gemm(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        return self._around(self._with_own_wgrad(upstream), GEMM, of_one)

    @staticmethod
    def _with_own_wgrad(upstream: Callable[..., Any]) -> Callable[..., Any]:
        """``general_gemm``, beside which a quantizer that needs it gets the wgrad of a micro-batch alone."""

        @functools.wraps(upstream)
        def general_gemm(*operands: Any, **keywords: Any) -> Any:
            take = getattr(keywords.get("quantization_params"), "take_own_wgrad", None)
            if take is not None and keywords.get("accumulate"):
                alone = {"accumulate": False, "out": None, "bias": None, "quantization_params": None}
                take(lambda: upstream(*operands, **{**keywords, **alone})[0])
            return upstream(*operands, **keywords)

        return general_gemm

    def _around_grouped(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        return self._around(upstream, GROUPED_GEMM, of_experts, grouped=True)

    def _around_grouped_tensors(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        return self._around(upstream, GROUPED_TENSOR_GEMM, of_grouped_tensors, grouped=True)

    def _around_attention(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(upstream)

        @functools.wraps(upstream)
        def tapped(*operands: Any, **keywords: Any) -> Any:
            result = upstream(*operands, **keywords)
            running, listener = self._current.running, self.attention
            if running is not None and running is not _UNHEARD and listener is not None:
                try:
                    given = signature.bind(*operands, **keywords)
                    given.apply_defaults()
                    listener.note_attention(self._attention_event(running, given.arguments))
                except Exception as error:
                    self._report("looking at the products of", running.layers[0], error)
            return result

        return tapped

    def _attention_event(self, forward: _Forward, given: Mapping[str, Any]) -> AttentionEvent:
        query, key, value = given["q"], given["k"], given["v"]
        form = given["qkv_layout"].replace("3", "").replace("2", "").partition("_")[0]
        return AttentionEvent(
            forward.layers[0],
            "d_o" in given,
            query,
            key,
            value,
            given.get("d_o"),
            given["s_quantizer"],
            given.get("dp_quantizer"),
            AttentionSizes.of(query, key, value, form),
            next(self._orders),
            forward.kind,
            forward.recipe,
            given,
        )

    def _around(
        self, upstream: Callable[..., Any], names: Sequence[str], gemms: Gemms, *, grouped: bool = False
    ) -> Callable[..., Any]:
        """A function of GEMMs that tells the listeners of them.

        Args:
            upstream: the function.
            names: its first parameters.
            gemms: its arguments and its result -> A, B and result of each GEMM.
            grouped: whether each GEMM is that of an expert.
        """

        @functools.wraps(upstream)
        def tapped(*operands: Any, **keywords: Any) -> Any:
            current = self._current
            forward = current.running or current.entered
            if current.inside or (forward is not None and not forward.is_heard) or not self._listeners:
                return upstream(*operands, **keywords)
            current.inside = True
            try:
                result = upstream(*operands, **keywords)
            finally:
                current.inside = False
            if grouped and is_capturing() and any(map(is_grouped_tensor, (*operands, *keywords.values()))):
                self._say_captured(forward)
                return result
            arguments = {"layout": "TN", **dict(zip(names, operands, strict=False)), **keywords}
            self._emit(forward, arguments, lambda: gemms(arguments, result), grouped=grouped)
            return result

        return tapped

    def _say_captured(self, forward: _Forward | None) -> None:
        """Say that the rows of experts, which the device knows, were not read: that would end the capture."""
        if not self._said_captured:
            self._said_captured = True
            logger.warning(
                "The GEMMs of %s and of other layers with grouped tensors are not observed in a CUDA graph: how many"
                " rows each expert has is unknown while it is captured. Capture after the first step.",
                OUTSIDE if forward is None else forward.layers[0],
            )

    def _emit(
        self,
        forward: _Forward | None,
        arguments: Mapping[str, Any],
        gemms: Callable[[], Iterable[tuple[Any, Any, Any]]],
        *,
        grouped: bool,
    ) -> None:
        """Tell the listeners of the GEMMs of a call: A, B and result of each."""
        try:
            layout = arguments["layout"]
            gemm = GEMM_OF_LAYOUT[layout]
            tensor_b, tensor_a = OPERANDS[gemm]
            of_forward = _OUTSIDE if forward is None else forward
            of_forward.events += 1
            for place, (a, b, out) in enumerate(gemms()):
                expert = place if grouped and forward is not None else None
                number = of_forward.number_of(gemm, expert)
                event = GemmEvent(
                    of_forward.layers[number],
                    gemm,
                    expert,
                    of_forward.operand(number, tensor_a, a, columnwise=layout[0] != "T"),
                    of_forward.operand(number, tensor_b, b, columnwise=layout[1] == "T"),
                    out,
                    next(self._orders),
                    of_forward.kind,
                    of_forward.recipe,
                    arguments,
                )
                for listener in self._listeners:
                    listener(event)
        except ObservationError:  # reported already, and to be raised
            raise
        except Exception as error:
            of_layer = OUTSIDE if forward is None else forward.layers[0]
            self._report("looking at the GEMMs of", of_layer, error)


class ExecutionOrder:
    """A listener that notes the order in which layers run.

    Attributes:
        forward: layer -> the place of its first forward among those of all layers.
        backward: layer -> the place of its first backward.
        grown: whether layers have come since it was set to False.
    """

    def __init__(self) -> None:
        self.forward: dict[str, int] = {}
        self.backward: dict[str, int] = {}
        self.grown = False

    def __call__(self, event: GemmEvent) -> None:
        """Note a GEMM of training."""
        places = self.forward if event.gemm == "fprop" else self.backward
        if event.layer not in places and event.kind in (ForwardKind.OBSERVED, ForwardKind.SILENT):
            places[event.layer] = len(places)
            self.grown = True


def _is_of_transformer_engine(module: Any) -> bool:
    return str(getattr(module, "__name__", "")).startswith("transformer_engine.")


def _recipe_of(operation: NamedOperation) -> Any:
    """The recipe that the last forward of an operation has left; None for high precision."""
    meta: Any = operation.module.__dict__["_fp8_metas"]
    return None if meta is None or meta["forward"] is None else meta["forward"].get("recipe")
