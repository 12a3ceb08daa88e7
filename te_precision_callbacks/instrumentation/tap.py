"""Reports every GEMM when Transformer Engine's Python calls the extension.

Read from Transformer Engine 2.20.2. While installed, the tap replaces:

- ``general_gemm``, ``general_grouped_gemm`` and ``general_grouped_gemm_for_grouped_tensor``
  (``pytorch/cpp_extensions/gemm.py``) in every Python module that imports them: TE's modules, ``te.ops``, and users'
  modules.
- The modules' ``prepare_forward``, ``end_forward`` of attention, and ``forward`` and ``backward`` of their autograd
  Functions. The layer is stored in the autograd context, since a backward runs in another thread.
- ``fused_attn_fwd`` and ``fused_attn_bwd`` (``pytorch/cpp_extensions/fused_attn.py``), and ``forward`` and ``backward``
  of ``FusedAttnFunc``.
- ``apply_normalization`` and ``_act_func`` of LayerNormLinear and LayerNormMLP (``tap_parts.py``).
- The modules' ``materialize_weight_for_forward``, which gathers distributed weights.
- ``WeightGradStore.put``, for a wgrad that runs later than its backward.
- ``te.Linear.forward`` where it is no operator of ``torch.compile`` (``compiled.py``). The replacement runs outside of
  graphs, like all other modules' forwards.
- ``OperationFuser.__call__``, and ``fuser_forward`` and ``fuser_backward`` of the operations of ``te.ops`` with GEMMs.

With ``fuse_wgrad_accumulation=True`` the wgrad GEMM adds to ``main_grad``, so the wgrad of a micro-batch never exists,
and the difference of two sums is not exact. If a feature needs this wgrad, the same GEMM first runs into a separate
tensor of ``main_grad``'s dtype, without effect on training.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.numerics.layouts import is_quantized
from te_precision_callbacks.base.replaced import AnyFunction, Replacements
from te_precision_callbacks.base.vocabulary import GEMM_OF_LAYOUT, OPERANDS, GemmName
from te_precision_callbacks.coverage.model_products import ModelProducts
from te_precision_callbacks.coverage.model_watch import hide_operators, modes_are_active
from te_precision_callbacks.coverage.precision_audit import recipe_of_operator, recipe_text
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.instrumentation.arguments import (
    GEMM,
    GROUPED_GEMM,
    GROUPED_TENSOR_GEMM,
    FindTensors,
    GemmsOfCall,
    GemmTensors,
    PlainTensors,
    argument_namer,
    autograd_functions,
    gemms_of_experts,
    gemms_of_grouped_tensors,
    gradients,
    is_grouped_tensor,
    single_gemm,
)
from te_precision_callbacks.instrumentation.compiled import CompiledLinears
from te_precision_callbacks.instrumentation.current_call import NEXT_HALF, Forward, Running, unobserved_forward
from te_precision_callbacks.instrumentation.every_step import EveryStep
from te_precision_callbacks.instrumentation.planned import GemmPlans, Key
from te_precision_callbacks.instrumentation.tap_parts import AttentionTap, OperationsTap, UnfusedTensors
from te_precision_callbacks.layers.forwards import Classify, ForwardKind, absent_from_graphs, outside_of_dynamo
from te_precision_callbacks.layers.gemm_events import (
    OUTSIDE,
    BeforeSum,
    GemmEvent,
    Listener,
)
from te_precision_callbacks.layers.naming import NamedOperation
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.state import recipe_in_use

logger = logging.getLogger(__name__)

ReadT = TypeVar("ReadT")


class _Listening(NamedTuple):
    """See :meth:`GemmTap.listen`."""

    listeners: tuple[Listener, ...] = ()
    before: BeforeSum | None = None
    plans: GemmPlans | None = None


class GemmTap:
    """Calls listeners after each GEMM.

    Args:
        enter: called in each forward with events, after ``prepare_forward``, with the module, the kind, its input, and
            the arguments of its operator in a compiled graph, or None; returns the tensors that listeners need before
            quantization, as (layer index, tensor name); None for a forward without events.
        silent: called after a training forward or backward without events, for example of an operation with its own
            GEMM kernel, with the layers, the operation, and whether it was the backward.
        every_step: gets the GEMMs of training forwards of its modules, with and without listeners.
    """

    def __init__(
        self,
        classify: Classify,
        report: Report,
        running: Running | None = None,
        *,
        enter: Callable[[torch.nn.Module, ForwardKind, Any, Any], Collection[tuple[int, str]] | None] | None = None,
        silent: Callable[[Sequence[str], str, bool], None] | None = None,
        attention: ModelProducts | None = None,
        every_step: EveryStep | None = None,
    ) -> None:
        self._classify = classify
        self._every_step = EveryStep(Ring(), report) if every_step is None else every_step
        self._report = report
        self._running = Running() if running is None else running
        self._enter = enter
        self._silent = silent
        self._attention = AttentionTap(classify, report, self._running, attention)
        self._unfused = UnfusedTensors(self._running, report)
        self.operations = OperationsTap(classify, self._running, self._report_silent)
        self._listening = _Listening()
        self._layers: Mapping[int, Sequence[str]] = {}
        self._mlps: set[int] = set()
        self._may_delay_wgrad = False
        self._observed: Mapping[int, Any] = {}
        self._name_of_recipe: tuple[Any, str] = (None, "")
        self._compiled = CompiledLinears(self._begin_compiled)
        self._seams = Replacements(keeps_later=True)
        self._warned_captured = False

    @property
    def installed(self) -> bool:
        return bool(self._seams)

    def observe(self, modules: Mapping[int, Any], attentions: Mapping[int, str] | None = None) -> None:
        """Set the modules with reported GEMMs, and attention modules' names, by id; both may change per step."""
        self._observed = modules
        self._attention.names = attentions or {}

    def watch(
        self,
        modules: Mapping[int, Any],
        layers: Mapping[int, Sequence[str]],
        operations: Iterable[NamedOperation],
    ) -> None:
        """Set the modules and their layers by id, and the ``te.ops`` operations; their GEMMs are always reported."""
        self._layers = layers
        self._mlps = {key for key, module in modules.items() if te_modules.of(module).is_mlp}
        self._may_delay_wgrad = any(map(te_modules.may_delay_wgrad, modules.values()))
        self._compiled.modules = [module for module in modules.values() if te_modules.is_compiled_operator(module)]
        self.operations.watch(operations)

    def begin_iteration(self, *, all_operations: bool) -> None:
        """Reset the count of GEMMs, and check whether the next few (or all) operations ran in another recipe."""
        self._running.begin_iteration()
        self._compiled.begin_iteration()
        self.operations.check_recipes(check_all=all_operations)

    def listen(
        self,
        *listeners: Listener,
        before: BeforeSum | None = None,
        plans: GemmPlans | None = None,
        watches: bool = False,
    ) -> None:
        """Set the listeners; without listeners and watch, remove the tap.

        Args:
            *listeners: called after each GEMM.
            before: called before a GEMM accumulates into its result.
            plans: the plans of GEMMs that need no listener.
            watches: whether the watch of every step gets the GEMMs of its modules.
        """
        self._listening = _Listening(listeners, before, plans)
        is_needed = listeners or (watches and self._every_step.is_on)
        if is_needed and not self._seams:
            self._install()
        elif not is_needed and self._seams:
            self._seams.restore()
            self._running.forget()

    # ------------------------------------------------------------------ installation

    def _install(self) -> None:
        from te_precision_callbacks.te.seams import (
            _common,
            backends,
            base,
            callers,
            fused_attn,
            fuser,
            gemm,
            grouped_linear,
            layernorm_linear,
            layernorm_mlp,
            linear,
            operation_methods,
        )

        self._running.forget()
        gemm_wrappers = {
            "general_gemm": lambda own: self._wrap_gemm(own, GEMM, single_gemm),
            "general_grouped_gemm": lambda own: self._wrap_gemm(own, GROUPED_GEMM, gemms_of_experts, grouped=True),
            "general_grouped_gemm_for_grouped_tensor": lambda own: self._wrap_gemm(
                own, GROUPED_TENSOR_GEMM, gemms_of_grouped_tensors, grouped=True
            ),
        }
        wrapped: dict[int, Any] = {}
        attention_wrappers = {"fused_attn_fwd": self._attention.wrap, "fused_attn_bwd": self._attention.wrap}
        wrappers = {**gemm_wrappers, **attention_wrappers}
        for module, name in callers({gemm: tuple(gemm_wrappers), fused_attn: tuple(attention_wrappers)}):
            own = getattr(module, name)
            if id(own) not in wrapped:
                wrapped[id(own)] = wrappers[name](own)
            self._seams.replace(module, name, wrapped[id(own)])
        module_class = base.TransformerEngineBaseModule
        self._seams.replace(module_class, "prepare_forward", self._wrap_prepare(module_class.prepare_forward))
        attention_class = te_modules.attention_class()
        self._seams.replace(attention_class, "end_forward", self._wrap_end(attention_class.end_forward))
        if linear._linear_op is None:
            self._seams.replace(linear.Linear, "forward", outside_of_dynamo(linear.Linear.forward))
        attention = backends.FusedAttnFunc, lambda: _find_none, ()
        for function, make_find, weights in (*autograd_functions(), attention):
            find_tensors = self._reader(function.forward, make_find)
            self._seams.replace(function, "forward", staticmethod(self._wrap_forward(function.forward, find_tensors)))
            self._seams.replace(function, "backward", staticmethod(self._wrap_backward(function.backward, weights)))
        for owner in (layernorm_linear, layernorm_mlp):
            self._seams.replace(owner, "apply_normalization", self._unfused.wrap_norm(owner.apply_normalization))
        self._seams.replace(layernorm_mlp, "_act_func", self._unfused.wrap_act_func(layernorm_mlp._act_func))
        for owner in (grouped_linear, layernorm_linear, linear):
            self._seams.replace(
                owner, "materialize_weight_for_forward", self._wrap_gather(owner.materialize_weight_for_forward)
            )
        self._seams.replace(_common.WeightGradStore, "put", self._wrap_put(_common.WeightGradStore.put))
        self._seams.replace(fuser.OperationFuser, "__call__", self.operations.wrap_call(fuser.OperationFuser.__call__))
        operation_wrappers = {
            "fuser_forward": self.operations.wrap_forward,
            "fuser_backward": self.operations.wrap_backward,
        }
        for operation, name, method in operation_methods(tuple(operation_wrappers)):
            self._seams.replace(operation, name, operation_wrappers[name](method))

    # ------------------------------------------------------------------ forwards and backwards

    def _wrap_prepare(self, upstream: AnyFunction) -> AnyFunction:
        @functools.wraps(upstream)
        def prepare_forward(module: Any, *arguments: Any, **keywords: Any) -> Any:
            if modes_are_active():  # in the first forward, it makes quantizers with operators that are no products
                with hide_operators():
                    result = upstream(module, *arguments, **keywords)
            else:
                result = upstream(module, *arguments, **keywords)
            if id(module) in self._attention.names:
                self._running.thread_state.entered = self._attention.enter(module)
            elif id(module) in self._observed:
                given = arguments[0] if arguments else keywords.get("inp")
                self._running.thread_state.entered = self._make_forward(module, given)
            else:
                self._running.thread_state.entered = self._unobserved_forward(module)
            if self._every_step.cast_hides_nan and id(module) in self._layers:
                row = te_modules.of(module)
                if not row.groups and not row.has_norm:
                    self._every_step.note_before_cast(self._running.thread_state.entered, result)
            return result

        return absent_from_graphs(prepare_forward, upstream)

    def _unobserved_forward(self, module: Any, compiled: Any = None) -> Forward:
        """Make the forward of a module without events: for the watch of every step."""
        layers = self._layers.get(id(module))
        if layers is None or not self._every_step.is_on:
            return unobserved_forward()
        try:
            halves = id(module) in self._mlps
            entered = Forward(layers, ForwardKind.UNTOUCHED, "", halves=halves, has_events=False)
            kind = self._classify(module) if compiled is None else self._kind(module, compiled)
            if kind is ForwardKind.OBSERVED:
                entered.watched = set()
        except Exception as error:
            self._report("watching the forward of", str(getattr(module, "name", "a module")), error)
            return unobserved_forward()
        return entered

    def _kind(self, module: Any, compiled: Any) -> ForwardKind:
        with torch.set_grad_enabled(compiled.is_grad_enabled):
            return self._classify(module)

    def _make_forward(self, module: Any, tensor: Any, compiled: Any = None) -> Forward:
        """Make the forward of a module, given its input; ``compiled``: the arguments of its operator in a graph."""
        try:
            if compiled is None:
                kind = self._classify(module)
                recipe = recipe_in_use(module)
                name = self._name_of_recipe
                if name[0] is not recipe:
                    name = recipe, recipe_text(recipe)
                    self._name_of_recipe = name
                in_force = name[1]
            else:
                kind = self._kind(module, compiled)
                in_force = recipe_of_operator(module, compiled)
            entered = Forward(self._layers[id(module)], kind, in_force, halves=id(module) in self._mlps)
            if kind is ForwardKind.OBSERVED and self._every_step.is_on:
                entered.watched = set()
            wanted = () if self._enter is None else self._enter(module, kind, tensor, compiled)
            if wanted is None:
                return self._unobserved_forward(module, compiled)
            if wanted:
                entered.wanted = wanted
                entered.high = {}
                plans = self._listening.plans
                if plans is not None and compiled is None:
                    if id(module) not in plans.of_modules:
                        plans.add_module(module, entered.layers)
                    entered.plans = plans.of_modules.get(id(module))
        except ObservationError:
            raise
        except Exception as error:
            self._report("observing the forward of", str(getattr(module, "name", "a module")), error)
            return unobserved_forward()
        return entered

    def _begin_compiled(self, module: Any, arguments: Any) -> Forward:
        if id(module) in self._observed:
            return self._make_forward(module, None, arguments)
        return self._unobserved_forward(module, arguments)

    def _forward_in_graph(self, arguments: Sequence[Any]) -> Forward | None:
        """Make the forward of a compiled ``te.Linear`` with delayed scaling: its graph ends before the autograd
        Function.
        """
        operator = arguments[-1] if self._compiled.modules else None
        module = self._compiled.module_of(arguments[0]) if type(operator).__name__ == "LinearFwdArgs" else None
        if module is None:
            return None
        return self._begin_compiled(module, operator)

    def _wrap_end(self, upstream: AnyFunction) -> AnyFunction:
        @functools.wraps(upstream)
        def end_forward(module: Any) -> Any:
            entered = self._running.thread_state.entered
            self._running.thread_state.entered = None
            if id(module) in self._attention.names and entered is not None and entered.layers:
                self._attention.leave(module, entered)
            return upstream(module)

        return absent_from_graphs(end_forward, upstream)

    def _reader(self, function: AnyFunction, make: Callable[[], ReadT]) -> ReadT | None:
        """Make what reads a function's arguments; report a missing parameter, and return None."""
        try:
            return make()
        except TypeError as error:
            self._report("reading the arguments of", function.__qualname__, error)
            return None

    def _wrap_forward(self, upstream: AnyFunction, find_tensors: FindTensors | None) -> AnyFunction:
        @functools.wraps(upstream)
        def forward(ctx: Any, *arguments: Any) -> Any:
            state = self._running.thread_state
            entered = state.entered or self._forward_in_graph(arguments) or unobserved_forward()
            if find_tensors is not _find_none:
                state.entered = None
            entered.half = -1
            if ctx is not None:
                ctx.te_precision_forward = entered
            before = entered.events
            if find_tensors is None:
                entered.wanted = ()
                entered.high = None
                entered.kind = ForwardKind.UNTOUCHED
            elif entered.high is not None:
                try:
                    entered.high = find_tensors((ctx, *arguments))
                except Exception as error:
                    entered.high = {}
                    self._report("finding the tensors of", entered.layers[0], error)
            try:
                result = self._running.call(entered, upstream, ctx, *arguments)
            finally:
                entered.high = None if entered.high is None else {}
            if entered.events == before and entered.kind is ForwardKind.OBSERVED:
                self._report_silent(entered, upstream.__qualname__.partition(".")[0].lstrip("_"), False)
            return result

        return forward

    def _wrap_backward(self, upstream: AnyFunction, weights: Sequence[int]) -> AnyFunction:
        """Wrap a backward; ``weights``: the places of the weights among its results."""

        @functools.wraps(upstream)
        def backward(ctx: Any, *arguments: Any) -> Any:
            entered = getattr(ctx, "te_precision_forward", None) or unobserved_forward()
            entered.half = 2
            if entered.watched is not None and weights and not self._may_delay_wgrad:
                entered.has_wgrad = _needs_all(ctx, weights)
            if entered.high is None:
                return self._running.call(entered, upstream, ctx, *arguments)
            try:
                entered.high = gradients(ctx, arguments[0], len(entered.layers))
            except Exception as error:
                entered.high = {}
                self._report("finding the tensors of", entered.layers[0], error)
            try:
                return self._running.call(entered, upstream, ctx, *arguments)
            finally:
                entered.high = {}

        return backward

    def _wrap_gather(self, upstream: AnyFunction) -> AnyFunction:
        """Wrap the gathering of distributed weights, since the forward gets only shards."""

        @functools.wraps(upstream)
        def materialize_weight_for_forward(weights: Any) -> Any:
            gathered = upstream(weights)
            running = self._running.thread_state.running
            if running is not None and running.high:
                for index, whole in enumerate(gathered):
                    if (index, "weight") in running.high:
                        running.high[index, "weight"] = None if is_quantized(whole) else whole
            return gathered

        return materialize_weight_for_forward

    def _wrap_put(self, upstream: AnyFunction) -> AnyFunction:
        @functools.wraps(upstream)
        def put(store: Any, tensors: Any, function: AnyFunction) -> Any:
            running = self._running.thread_state.running
            if running is None:
                return upstream(store, tensors, function)
            half = running.half
            high = running.high

            @functools.wraps(function)
            def later(*arguments: Any) -> Any:
                running.half = half
                before = running.high
                running.high = high
                try:
                    return self._running.call(running, function, *arguments)
                finally:
                    running.high = before

            return upstream(store, tensors, later)

        return put

    def _report_silent(self, forward: Forward, what: str, backward: bool) -> None:
        if self._silent is None or not forward.layers or forward.kind is not ForwardKind.OBSERVED:
            return
        try:
            self._silent(forward.layers, f"the GEMMs of {what}, which runs them in a separate kernel", backward)
        except Exception as error:
            self._report("noting the unseen GEMMs of", forward.layers[0], error)

    # ------------------------------------------------------------------ GEMMs

    def _wrap_gemm(
        self, upstream: AnyFunction, known: Sequence[str], gemms: GemmsOfCall, *, grouped: bool = False
    ) -> AnyFunction:
        """Wrap a GEMM function to report to the listeners.

        Args:
            known: the function's first parameters in TE 2.20.
            gemms: maps arguments and result to A, B and result of each GEMM.
            grouped: whether each GEMM belongs to an expert.
        """
        name_arguments = self._reader(upstream, lambda: argument_namer(upstream, known))
        if name_arguments is None:
            return upstream

        def named(operands: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
            return {"layout": "TN", **name_arguments(operands), **keywords}

        def watch(forward: Forward, operands: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> None:
            note = self._every_step.note
            if not grouped and len(operands) == 2:
                layout = keywords.get("layout", "TN")
                note(forward, layout, ((*operands, result[0]),), accumulates=keywords.get("accumulate"))
            elif any(map(is_grouped_tensor, (*operands, *keywords.values()))) and torch.cuda.is_available():
                self._every_step.ring.unwatched["GEMMs of grouped tensors"] += 1  # their rows are on the device
            else:
                arguments = named(operands, keywords)
                accumulates = arguments.get("accumulate")
                note(forward, arguments["layout"], _lazily(gemms, arguments, result), accumulates=accumulates)

        @functools.wraps(upstream)
        def tapped(*operands: Any, **keywords: Any) -> Any:
            call = upstream
            if not grouped and hasattr(keywords.get("quantization_params"), "take_own_wgrad"):
                call = functools.partial(_with_own_wgrad, upstream)
            current = self._running.thread_state
            if current.in_gemm:
                return call(*operands, **keywords)
            forward = current.running or current.entered
            listeners = self._listening.listeners
            is_compiled = (
                forward is None
                and not grouped
                and bool(self._compiled.modules and (listeners or self._every_step.is_on))
            )
            if is_compiled:
                layout = named(operands, keywords)["layout"]
                forward = self._find_compiled(GEMM_OF_LAYOUT[layout])
            has_no_events = forward is not None and not forward.has_events
            if has_no_events or not listeners:
                if forward is None or forward.watched is None:
                    if has_no_events and forward is not None and forward.kind is ForwardKind.OBSERVED:
                        self._every_step.ring.unwatched["operations that fuse several layers"] += 1
                    return call(*operands, **keywords)
                current.in_gemm = True
                try:
                    result = call(*operands, **keywords)
                finally:
                    current.in_gemm = False
                if forward.halves:
                    forward.half = NEXT_HALF[GEMM_OF_LAYOUT[keywords.get("layout", "TN")], forward.half]
                watch(forward, operands, keywords, result)
                return result
            planned = not grouped and forward is not None and forward.plans is not None and len(operands) == 2
            plans = self._listening.plans if planned else None
            before: Sequence[Any] = ()  # no listener needs the sums of modules with plans
            if plans is None:
                arguments = named(operands, keywords)
                before = self._before_sums(forward, arguments, grouped=grouped)
            current.in_gemm = True
            try:
                result = call(*operands, **keywords)
            finally:
                current.in_gemm = False
            if grouped and is_capturing() and any(map(is_grouped_tensor, (*operands, *keywords.values()))):
                self._warn_captured(forward)
                return result
            key: Key | None = ()
            if plans is not None and forward is not None:
                key = plans.follow(forward, operands, keywords, result)
                if key is None:
                    if forward.watched is not None:
                        watch(forward, operands, keywords, result)
                    return result
                arguments = named(operands, keywords)
            self._emit(forward, arguments, result, gemms, before, grouped=grouped, key=key)
            if forward is not None:
                watch(forward, operands, keywords, result)
            if is_compiled and forward is not None and forward.high:
                forward.high = {}
            return result

        return tapped

    def _find_compiled(self, gemm: GemmName) -> Forward | None:
        try:
            return self._compiled.find(gemm)
        except ObservationError:  # reported already; must be raised
            raise
        except Exception as error:
            self._report("finding the layer of", "a GEMM in a compiled graph", error)
            return unobserved_forward()

    def _before_sums(self, forward: Forward | None, arguments: Mapping[str, Any], *, grouped: bool) -> Sequence[Any]:
        """Call ``before`` with each tensor that a GEMM of this call accumulates into, and return the results."""
        before = self._listening.before
        if before is None or forward is None or not forward.layers or not arguments.get("accumulate"):
            return ()
        try:
            gemm = GEMM_OF_LAYOUT[arguments["layout"]]
            sums = arguments["out"]
            if not grouped:
                return [before(forward.layers[forward.peek_layer_index(gemm)], gemm, sums, forward.kept)]
            return [before(forward.layers[index], gemm, total, forward.kept) for index, total in enumerate(sums)]
        except ObservationError:  # reported already; must be raised
            raise
        except Exception as error:
            self._report("reading the sums of", forward.layers[0], error)
            return ()

    def _warn_captured(self, forward: Forward | None) -> None:
        """Warn that GEMMs are not observed: reading experts' row counts from the device would end the capture."""
        if not self._warned_captured:
            self._warned_captured = True
            logger.warning(
                "The GEMMs of %s and of other layers with grouped tensors are not observed in a CUDA graph, because"
                " the rows per expert are unknown during capture. Capture after the first step.",
                OUTSIDE if forward is None else forward.layers[0],
            )

    def _emit(
        self,
        forward: Forward | None,
        arguments: Mapping[str, Any],
        result: Any,
        gemms: GemmsOfCall,
        before: Sequence[Any],
        *,
        grouped: bool,
        key: Key | None,
    ) -> None:
        try:
            layout = arguments["layout"]
            gemm = GEMM_OF_LAYOUT[layout]
            tensor_b, tensor_a = OPERANDS[gemm]
            owner = forward or Forward((OUTSIDE,), ForwardKind.UNTOUCHED, "", halves=False)
            owner.events += 1
            # LayerNormMLP(checkpoint=True) recomputes fc1 in its own backward.
            is_recomputed = gemm == "fprop" and owner.half == 2
            for index, (a, b, out) in enumerate(gemms(arguments, result)):
                expert = index if grouped and forward is not None else None
                layer_index = owner.next_layer_index(gemm, expert)
                event = GemmEvent(
                    owner.layers[layer_index],
                    gemm,
                    expert,
                    owner.operand(layer_index, tensor_a, a, columnwise=layout[0] != "T"),
                    owner.operand(layer_index, tensor_b, b, columnwise=layout[1] == "T"),
                    out,
                    ForwardKind.SILENT if is_recomputed else owner.kind,
                    owner.recipe,
                    arguments,
                    gelu_input=None if grouped else result[2],
                    before=before[index] if before else None,
                    kept=owner.kept,
                )
                for listener in self._listening.listeners:
                    listener(event)
                if self._listening.plans is not None and key:
                    self._listening.plans.record(owner, key, event)
        except ObservationError:  # reported already; must be raised
            raise
        except Exception as error:
            layer = OUTSIDE if forward is None else forward.layers[0]
            self._report("observing the GEMMs of", layer, error)


def _needs_all(ctx: Any, places: Sequence[int]) -> bool:
    """Return whether a backward has to compute the gradients of the inputs at these places."""
    needs = getattr(ctx, "needs_input_grad", ())
    return max(places) < len(needs) and all(map(needs.__getitem__, places))


def _find_none(arguments: Sequence[Any]) -> PlainTensors:
    """Find the tensors of attention, which has no GEMMs."""
    return {}


def _lazily(gemms: GemmsOfCall, arguments: Mapping[str, Any], result: Any) -> Iterator[GemmTensors]:
    yield from gemms(arguments, result)


def _with_own_wgrad(upstream: AnyFunction, *operands: Any, **keywords: Any) -> Any:
    """Call ``general_gemm``; before, compute the wgrad of the micro-batch for a quantizer that needs it."""
    if keywords.get("accumulate"):
        alone = {"accumulate": False, "out": None, "bias": None, "quantization_params": None}
        keywords["quantization_params"].take_own_wgrad(lambda: upstream(*operands, **{**keywords, **alone})[0])
    return upstream(*operands, **keywords)
