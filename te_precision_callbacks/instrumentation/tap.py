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
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.failures import Guard, Report
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.replaced import AnyFunction, Replacements
from te_precision_callbacks.base.vocabulary import GEMM_OF_LAYOUT, OPERANDS, GemmName
from te_precision_callbacks.coverage.formats import recipe_of_operator, recipe_text
from te_precision_callbacks.coverage.marks import made_in_thread
from te_precision_callbacks.coverage.model_watch import ModelProducts, hide_operators, modes_are_active
from te_precision_callbacks.coverage.step_table import Unseen
from te_precision_callbacks.engine.kernels.columns import FORMATS
from te_precision_callbacks.instrumentation.arguments import (
    GEMM,
    GROUPED_GEMM,
    GROUPED_TENSOR_GEMM,
    FindTensors,
    GemmsOfCall,
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
from te_precision_callbacks.instrumentation.current_call import UNOBSERVED, Forward, Running
from te_precision_callbacks.instrumentation.every_step import EveryStep
from te_precision_callbacks.instrumentation.statistics import Key, StatisticsConsumer
from te_precision_callbacks.instrumentation.tap_parts import AttentionTap, OperationsTap, UnfusedTensors
from te_precision_callbacks.layers.forwards import (
    NO_BACKWARD,
    ForwardClassifier,
    ForwardKind,
    absent_from_graphs,
    compiled_in_callers_only,
    outside_of_dynamo,
)
from te_precision_callbacks.layers.gemm_events import BeforeSum, GemmEvent
from te_precision_callbacks.layers.naming import NamedOperation
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te import seams
from te_precision_callbacks.te.state import is_in_autocast, recipe_in_use
from te_precision_callbacks.te.tensors import is_quantized

logger = logging.getLogger(__name__)

ReadT = TypeVar("ReadT")


class GemmTap:
    """Sees each GEMM, and passes it on: first its formats and magnitudes, then an event to the features that are due.

    Args:
        consume: gets the events of GEMMs that features observe.
        before_sum: called before a GEMM accumulates into its result.
        enter: called in each forward that is due, after ``prepare_forward``, with the module, the forward, its input,
            and the arguments of its operator in a compiled graph, or None; returns the tensors that features need
            before quantization, as (layer index, tensor name); None for a forward without events.
        products: counts the products of the model.
        every_step: gets the GEMMs of all training forwards.
        statistics: measures GEMMs that need no event.
    """

    def __init__(
        self,
        classify: ForwardClassifier,
        report: Report,
        every_step: EveryStep,
        consume: Callable[[GemmEvent], None],
        *,
        before_sum: BeforeSum = lambda *_: None,
        enter: Callable[[torch.nn.Module, Forward, Any, Any], Collection[tuple[int, str]] | None] = lambda *_: (),
        products: ModelProducts | None = None,
        statistics: StatisticsConsumer | None = None,
    ) -> None:
        self._classify = classify
        self._every_step = every_step
        self._report = report
        self._running = Running()
        self._consume = consume
        self._before = before_sum
        self._enter = enter
        self._products = products
        self._statistics = statistics
        self._attention = AttentionTap(report, self._running, every_step.table, products)
        self._unfused = UnfusedTensors(self._running, report)
        self.operations = OperationsTap(classify, self._running, self._report_silent)
        self._layers: Mapping[int, Sequence[str]] = {}
        self._orders: Mapping[int, Mapping[tuple[str, int], int]] = {}
        self._may_delay_wgrad = False
        self._due: Mapping[int, Any] = {}
        self._counts = False
        self._compiled = CompiledLinears(self._begin_compiled)
        self._seams = Replacements(keeps_later=True)
        self._seams_when_due = Replacements(keeps_later=True)
        self._warned_captured = False
        self._process = os.getpid()

    @property
    def installed(self) -> bool:
        return bool(self._seams)

    def observe(self, due: Mapping[int, Any], *, counts: bool, attentions: Mapping[int, str]) -> None:
        """Choose the modules to observe in a step.

        Args:
            due: the modules with a feature that may act, by id.
            counts: whether the products of torch are counted.
            attentions: names of attention modules, by id.
        """
        self._due = due
        self._counts = counts
        self._attention.names = attentions
        self._seams_when_due.restore()
        if self._seams:
            self._install_when_due()

    def watch(
        self,
        modules: Mapping[int, Any],
        layers: Mapping[int, Sequence[str]],
        operations: Iterable[NamedOperation],
    ) -> None:
        """Set the modules and their layers by id, and the ``te.ops`` operations."""
        self._layers = layers
        orders = {key: te_modules.of(module).gemm_order for key, module in modules.items()}
        self._orders = {key: order for key, order in orders.items() if order is not None}
        self._may_delay_wgrad = any(map(te_modules.may_delay_wgrad, modules.values()))
        self._compiled.modules = [module for module in modules.values() if te_modules.is_compiled_operator(module)]
        self.operations.watch(operations)

    def begin_iteration(self) -> None:
        self._running.begin_iteration()
        self._compiled.begin_iteration()

    # ------------------------------------------------------------------ installation

    def remove(self) -> None:
        self._seams_when_due.restore()
        if self._seams:
            self._seams.restore()
            self._running.forget()

    def install(self) -> None:
        if self._seams:
            return
        self._running.forget()
        gemm_wrappers = {
            "general_gemm": lambda original: self._wrap_gemm(original, GEMM, single_gemm),
            "general_grouped_gemm": lambda original: self._wrap_gemm(
                original, GROUPED_GEMM, gemms_of_experts, grouped=True
            ),
            "general_grouped_gemm_for_grouped_tensor": lambda original: self._wrap_gemm(
                original, GROUPED_TENSOR_GEMM, gemms_of_grouped_tensors, grouped=True
            ),
        }
        wrapped: dict[int, Any] = {}
        attention_wrappers = {"fused_attn_fwd": self._attention.wrap, "fused_attn_bwd": self._attention.wrap}
        wrappers = {**gemm_wrappers, **attention_wrappers}
        for module, name in seams.callers(
            {seams.gemm: tuple(gemm_wrappers), seams.fused_attn: tuple(attention_wrappers)}
        ):
            original = getattr(module, name)
            if id(original) not in wrapped:
                wrapped[id(original)] = wrappers[name](original)
            self._seams.replace(module, name, wrapped[id(original)])
        self._seams.wrap(seams.base.TransformerEngineBaseModule, "prepare_forward", self._wrap_prepare)
        if seams.linear._linear_op is None:
            self._seams.wrap(seams.linear.Linear, "forward", outside_of_dynamo)
        attention = seams.backends.FusedAttnFunc, lambda: _find_none, ()
        for function, make_find, weights in (*autograd_functions(), attention):
            find_tensors = self._reader(function.forward, make_find)
            self._seams.replace(function, "forward", staticmethod(self._wrap_forward(function.forward, find_tensors)))
            self._seams.replace(function, "backward", staticmethod(self._wrap_backward(function.backward, weights)))
        for owner in (seams.layernorm_linear, seams.layernorm_mlp):
            self._seams.wrap(owner, "apply_normalization", self._unfused.wrap_norm)
        for owner in (seams.grouped_linear, seams.layernorm_linear, seams.linear):
            self._seams.wrap(owner, "materialize_weight_for_forward", self._wrap_gather)
        self._seams.wrap(seams._common.WeightGradStore, "put", self._wrap_put)
        self._seams.wrap(seams.fuser.OperationFuser, "__call__", self.operations.wrap_call)
        operation_wrappers = {
            "fuser_forward": self.operations.wrap_forward,
            "fuser_backward": self.operations.wrap_backward,
        }
        for operation, name, method in seams.operation_methods(tuple(operation_wrappers)):
            self._seams.replace(operation, name, operation_wrappers[name](method))

        self._install_when_due()

    def _install_when_due(self) -> None:
        """Install what only steps with features or counted products need."""
        if self._due:
            self._seams_when_due.wrap(seams.layernorm_mlp, "_act_func", self._unfused.wrap_act_func)
        if self._counts and self._attention.names:
            self._seams_when_due.wrap(te_modules.attention_class(), "end_forward", self._wrap_end)

    # ------------------------------------------------------------------ forwards and backwards

    def _wrap_prepare(self, upstream: AnyFunction) -> AnyFunction:
        in_graph = torch.compiler.is_dynamo_compiling
        callback = torch._C._dynamo.eval_frame.get_eval_frame_callback
        recipes: dict[type, str] = {}

        @functools.wraps(upstream)
        def prepare_forward(module: Any, *arguments: Any, **keywords: Any) -> Any:
            if in_graph():
                return upstream(module, *arguments, **keywords)
            if callback() is not None:  # something is compiled in this thread
                return not_compiled(module, *arguments, **keywords)
            if modes_are_active():  # in the first forward, it makes quantizers with operators that are no products
                with hide_operators():
                    result = upstream(module, *arguments, **keywords)
            else:
                result = upstream(module, *arguments, **keywords)
            key = id(module)
            state = self._running.thread_state
            state.entered = UNOBSERVED
            layers = self._layers.get(key)
            if layers is None and key not in self._attention.names:
                return result
            try:
                kind = ForwardKind.OBSERVED  # of the usual forward, without a further call
                is_training = module.training and torch.is_grad_enabled() and _task() == NO_BACKWARD
                if not is_training or self._classify.paused or os.getpid() != self._process:
                    kind = self._classify(module)
                if layers is None:
                    state.entered = self._attention.enter(key, kind)
                    return result
                call = None if self._products is None else self._products.note_forward(module, kind)
                if kind is ForwardKind.UNTOUCHED:
                    return result
                entered = Forward()
                entered.layers = layers
                entered.module = key
                entered.kind = kind
                if key in self._orders:
                    entered.order = self._orders[key]
                entered.shapes = {}
                if call is not None:
                    entered.call = call
                    entered.begun = made_in_thread()
                recipe = recipe_in_use(module)
                if recipe is not None:
                    if type(recipe) not in recipes:
                        recipes[type(recipe)] = recipe_text(recipe)
                    entered.recipe = recipes[type(recipe)]
                elif kind is ForwardKind.OBSERVED and is_in_autocast():
                    self._every_step.table.excluded.update(layers)
                if kind is ForwardKind.OBSERVED:
                    self._every_step.table.forwards[key] = result.requires_grad
                    if self._every_step.is_on:
                        entered.watched = set()
                        if self._every_step.cast_hides_nan:
                            self._read_before_cast(entered, module, result)
                state.entered = entered
                if key in self._due:
                    self._observe_forward(entered, module, arguments[0] if arguments else keywords.get("inp"), None)
            except ObservationError:
                raise
            except Exception as error:
                state.entered = UNOBSERVED
                self._report("observing the forward of", str(getattr(module, "name", "a module")), error)
            return result

        not_compiled = outside_of_dynamo(prepare_forward)
        for defaults in ("__defaults__", "__kwdefaults__"):  # which a graph that was compiled before reads
            setattr(prepare_forward, defaults, getattr(upstream, defaults))
        return compiled_in_callers_only(prepare_forward)

    def _read_before_cast(self, entered: Forward, module: Any, tensor: Any) -> None:
        """Read the activation that a module without a norm gets, which NVFP4 quantizes afterwards: its cast hides nan.

        Gradients are not read before their cast: that would cost more than all else together.
        """
        row = te_modules.of(module)
        has_values = type(tensor) in PLAIN and tensor.dtype in FORMATS and tensor.numel()
        if has_values and not row.groups and not row.has_norm:
            entered.watched = {(0, "activation")}
            entered.unread = (("activation", tensor, tensor.dtype),)

    def _observe_forward(self, entered: Forward, module: Any, tensor: Any, compiled: Any) -> None:
        """Ask the features that are due, given the module's input, and the arguments of its operator in a graph."""
        entered.read = set()
        entered.kept = {}
        wanted_tensors = self._enter(module, entered, tensor, compiled)
        entered.is_due = wanted_tensors is not None
        if wanted_tensors:
            entered.wanted = wanted_tensors
            entered.high = {}
            entered.repeats = compiled is None and entered.due.only_measures

    def _begin_compiled(self, module: Any, arguments: Any) -> Forward:
        """Make the forward of a compiled ``te.Linear``, given the arguments of its operator."""
        with self._guard("observing the forward of", str(getattr(module, "name", "a module"))):
            with torch.set_grad_enabled(arguments.is_grad_enabled):
                kind = self._classify(module)
            if kind is ForwardKind.UNTOUCHED:
                return UNOBSERVED
            entered = Forward()
            entered.layers = self._layers[id(module)]
            entered.module = id(module)
            entered.kind = kind
            entered.shapes = {}
            entered.recipe = recipe_of_operator(module, arguments)
            if kind is ForwardKind.OBSERVED:
                self._every_step.table.forwards[id(module)] = arguments.input_requires_grad
                entered.watched = set() if self._every_step.is_on else None
            if id(module) in self._due:
                self._observe_forward(entered, module, None, arguments)
            return entered
        return UNOBSERVED

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
            if entered is not None and entered.attention:
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
        running = self._running

        @functools.wraps(upstream)
        def forward(ctx: Any, *arguments: Any) -> Any:
            state = running.thread_state
            entered = state.entered or self._forward_in_graph(arguments) or UNOBSERVED
            if find_tensors is not _find_none:
                state.entered = None
            if find_tensors is None:  # its parameters have other names
                entered = UNOBSERVED
            if ctx is not None:
                ctx.te_precision_forward = entered
            if entered is UNOBSERVED:
                return running.call(entered, upstream, ctx, *arguments)
            entered.position = -1
            former_events = entered.events
            if entered.high is not None and find_tensors is not None:
                try:  # no guard: it would cost three calls in each forward
                    entered.high = find_tensors((ctx, *arguments))
                except Exception as error:
                    entered.high = {}
                    self._report("finding the tensors of", entered.layers[0], error)
            outer = state.running
            state.running = entered
            try:
                if modes_are_active():
                    with hide_operators():
                        result = upstream(ctx, *arguments)
                else:
                    result = upstream(ctx, *arguments)
            finally:
                state.running = outer
                if entered.high is not None:
                    entered.high = {}
                if entered.call is not None:
                    entered.call.nodes -= made_in_thread() - entered.begun
                    entered.call = None
            if entered.events == former_events and entered.kind is ForwardKind.OBSERVED:
                self._report_silent(entered, upstream.__qualname__.partition(".")[0].lstrip("_"), False)
            return result

        return forward

    def _wrap_backward(self, upstream: AnyFunction, weights: Sequence[int]) -> AnyFunction:
        """Wrap a backward; ``weights``: the places of the weights among its results."""
        running = self._running
        last = max(weights, default=-1)

        @functools.wraps(upstream)
        def backward(ctx: Any, *arguments: Any) -> Any:
            try:
                entered = ctx.te_precision_forward
            except AttributeError:
                entered = UNOBSERVED
            state = running.thread_state
            outer = state.running
            state.running = entered
            try:
                if entered.layers:
                    entered.position = 2
                    needs = ctx.needs_input_grad
                    entered.has_wgrad = not self._may_delay_wgrad and -1 < last < len(needs)
                    for position in weights:
                        entered.has_wgrad = entered.has_wgrad and needs[position]
                    if entered.kind is ForwardKind.EVALUATION and self._products is not None:
                        self._products.note_backward_in_evaluation(entered.module)
                if entered.high is not None:
                    try:
                        entered.high = gradients(ctx, arguments[0], len(entered.layers))
                    except Exception as error:
                        entered.high = {}
                        self._report("finding the tensors of", entered.layers[0], error)
                if not modes_are_active():
                    return upstream(ctx, *arguments)
                with hide_operators():
                    return upstream(ctx, *arguments)
            finally:
                state.running = outer
                if entered.high is not None:
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
            position = running.position
            high = running.high

            @functools.wraps(function)
            def later(*arguments: Any) -> Any:
                running.position = position
                caller_high = running.high
                running.high = high
                try:
                    return self._running.call(running, function, *arguments)
                finally:
                    running.high = caller_high

            return upstream(store, tensors, later)

        return put

    def _report_silent(self, forward: Forward, what: str, backward: bool) -> None:
        if forward.kind is ForwardKind.OBSERVED:
            why = f"the GEMMs of {what}, which runs them in a separate kernel"
            self._every_step.table.unseen.update(Unseen(layer, backward, why) for layer in forward.layers)

    # ------------------------------------------------------------------ GEMMs

    def _wrap_gemm(
        self, upstream: AnyFunction, positional_names: Sequence[str], gemms: GemmsOfCall, *, grouped: bool = False
    ) -> AnyFunction:
        """Wrap a GEMM function.

        Args:
            positional_names: the function's first parameters in TE 2.20.
            gemms: maps arguments and result to A, B and result of each GEMM.
            grouped: whether each GEMM belongs to an expert.
        """
        name_arguments = self._reader(upstream, lambda: argument_namer(upstream, positional_names))
        if name_arguments is None:
            return upstream
        running = self._running
        every_step = self._every_step

        def named(operands: Sequence[Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
            return {"layout": "TN", **name_arguments(operands), **keywords}

        @functools.wraps(upstream)
        def tapped(*operands: Any, **keywords: Any) -> Any:
            call = upstream
            accumulates = keywords.get("accumulate")
            if accumulates and hasattr(keywords.get("quantization_params"), "take_own_wgrad"):
                call = functools.partial(_with_own_wgrad, upstream)
            state = running.thread_state
            if state.in_gemm:
                return call(*operands, **keywords)
            forward = state.running or state.entered
            is_compiled = forward is None and not grouped and bool(self._compiled.modules)
            if is_compiled:
                forward = self._find_compiled(GEMM_OF_LAYOUT[named(operands, keywords)["layout"]])
            if forward is None or not forward.layers:
                return upstream(*operands, **keywords)
            if forward.is_fused:
                every_step.ring.unwatched["operations that fuse several layers"] += 1
                return upstream(*operands, **keywords)
            sums_before: Sequence[Any] = ()
            if forward.is_due and (grouped or not forward.repeats):  # a prepared launch needs no sums
                sums_before = self._before_sums(forward, named(operands, keywords), grouped=grouped)
            state.in_gemm = True
            try:
                result = call(*operands, **keywords)
            finally:
                state.in_gemm = False
            forward.events += 1
            position = forward.position
            if grouped or len(operands) != 2:
                with Guard(functools.partial(every_step.fail, forward.layers[0])):
                    self._observe(
                        forward, position, named(operands, keywords), result, gemms, sums_before, grouped=grouped
                    )
                return result
            gemm = GEMM_OF_LAYOUT[keywords.get("layout", "TN")]
            index = 0
            if forward.order is not None:
                index = forward.order[gemm, position]
                forward.position = index
            every_step.note(forward, gemm, index, operands[0], operands[1], None if accumulates else result[0])
            if forward.is_due:
                try:
                    key: Key | None = ()
                    if forward.repeats and self._statistics is not None:
                        key = self._statistics.repeat(forward, position, operands, keywords, result)
                    if key is not None:
                        self._observe(forward, position, named(operands, keywords), result, gemms, sums_before, key)
                except ObservationError:  # reported already; must be raised
                    raise
                except Exception as error:
                    self._report("observing the GEMMs of", forward.layers[0], error)
                if is_compiled and forward.high:
                    forward.high = {}
            return result

        return tapped

    def _observe(
        self,
        forward: Forward,
        position: int,
        arguments: Mapping[str, Any],
        result: Any,
        gemms: GemmsOfCall,
        sums_before: Sequence[Any],
        key: Key | None = None,
        *,
        grouped: bool = False,
    ) -> None:
        """Pass GEMMs after ``position`` to features, and to the watch of every step if their launch has no key yet."""
        ring = self._every_step.ring
        is_noted = key is not None
        if grouped and torch.cuda.is_available() and any(map(is_grouped_tensor, arguments.values())):
            ring.unwatched["GEMMs of grouped tensors"] += 1  # their rows are on the device
            is_noted = True
            if not forward.is_due:
                return
            if is_capturing():  # reading the rows from the device would end the capture
                if not self._warned_captured:
                    self._warned_captured = True
                    logger.warning(
                        "The GEMMs of %s and of other layers with grouped tensors are not observed in a CUDA graph,"
                        " because the rows per expert are unknown during capture. Capture after the first step.",
                        forward.layers[0],
                    )
                return
        layout = arguments["layout"]
        gemm = GEMM_OF_LAYOUT[layout]
        tensor_b, tensor_a = OPERANDS[gemm]
        # LayerNormMLP(checkpoint=True) recomputes fc1 in its own backward.
        is_recomputed = gemm == "fprop" and position == 2
        forward.position = position
        for number, (a, b, out) in enumerate(gemms(arguments, result)):
            expert = number if grouped else None
            index = forward.next_layer_index(gemm, expert)
            layer = forward.layers[index]
            if not is_noted:
                if grouped and gemm == "fprop" and out is not None and forward.watched is not None:
                    ring.add_tokens(layer, out.numel() // out.shape[-1])
                self._every_step.note(forward, gemm, index, a, b, None if arguments.get("accumulate") else out)
            if forward.is_due:
                event = GemmEvent(
                    layer,
                    gemm,
                    expert,
                    forward.operand(index, tensor_a, a, columnwise=layout[0] != "T"),
                    forward.operand(index, tensor_b, b, columnwise=layout[1] == "T"),
                    out,
                    ForwardKind.SILENT if is_recomputed else forward.kind,
                    forward.recipe,
                    arguments,
                    gelu_input=None if grouped else result[2],
                    before=sums_before[number] if sums_before else None,
                    kept=forward.kept,
                    watchers={} if forward.due is None else forward.due.layers[index],
                    key=key or (),
                )
                self._consume(event)

    def _guard(self, operation: str, subject: str) -> Guard:
        return Guard(functools.partial(self._report, operation, subject))

    def _find_compiled(self, gemm: GemmName) -> Forward | None:
        with self._guard("finding the layer of", "a GEMM in a compiled graph"):
            return self._compiled.find(gemm)
        return UNOBSERVED

    def _before_sums(self, forward: Forward, arguments: Mapping[str, Any], *, grouped: bool) -> Sequence[Any]:
        """Call ``before_sum`` with each tensor that a GEMM of this call accumulates into, and return the results."""
        results: list[Any] = []
        if arguments.get("accumulate"):
            with self._guard("reading the sums of", forward.layers[0]):
                gemm = GEMM_OF_LAYOUT[arguments["layout"]]
                first = 0 if forward.order is None else forward.order[gemm, forward.position]
                sums = arguments["out"] if grouped else [arguments["out"]]
                results = [
                    self._before(forward.layers[index], gemm, total, forward.kept)
                    for index, total in enumerate(sums, first)
                ]
        return results


_task = torch._C._current_graph_task_id


def _find_none(arguments: Sequence[Any]) -> PlainTensors:
    """Find the tensors of attention, which has no GEMMs."""
    return {}


def _with_own_wgrad(upstream: AnyFunction, *operands: Any, **keywords: Any) -> Any:
    """Call an accumulating ``general_gemm``; before, compute the wgrad alone, for a quantizer that needs it."""
    without_sum = {"accumulate": False, "out": None, "bias": None, "quantization_params": None}
    keywords["quantization_params"].take_own_wgrad(lambda: upstream(*operands, **{**keywords, **without_sum})[0])
    return upstream(*operands, **keywords)
