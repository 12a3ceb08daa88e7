"""Classifies forward passes of Transformer Engine modules for a session, and makes TE act accordingly.

Whether a forward is observed is decided in that forward, holds for its backward, and is not remembered for other
forwards of the same iteration. Transformer Engine decides this once per iteration, and does not distinguish evaluation
or recomputation. Two seams are replaced while a session is live, both read from Transformer Engine 2.20.2:

- ``TransformerEngineBaseModule.is_debug_iter`` and ``no_debug_features_active`` (``pytorch/module/base.py``), which
  each forward calls first.
- ``debug_quantization.DebugQuantizer`` (``debug/pytorch/debug_quantization.py``), which each forward in debug mode
  builds anew for each tensor: replaced by a subclass that knows the kind of its forward (``quantizer.py``).

Layers that Transformer Engine refuses in debug mode (``refusals.py``) are left as they are. Refusals that concern the
process, not a layer, are removed: ``TEDebugState`` of ``pytorch/cpu_offload.py`` and ``cpu_offload_v1.py``, and
``onnx_forward`` of the modules. ``torch.cuda.CUDAGraph.capture_begin`` (torch 2.13) is followed to detect CUDA graphs.
"""

from __future__ import annotations

import copy
import functools
import operator
import sys
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.gemm_events import Listener
from te_precision_callbacks.coverage.precision_audit import (
    Gemm,
    PrecisionAudit,
    backward_override,
    formats_of_fused_path,
    gemms_left_out,
    of_fprop,
)
from te_precision_callbacks.coverage.seen_products import ModelProducts
from te_precision_callbacks.engine.quantization import QuantizationError
from te_precision_callbacks.instrumentation.current_forward import CurrentForward
from te_precision_callbacks.instrumentation.delayed_scaling import DelayedScalingLayers
from te_precision_callbacks.instrumentation.execution_order import ExecutionOrder
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.fused import FusedObservation
from te_precision_callbacks.instrumentation.refusals import (
    CUDA_GRAPH,
    ONNX_EXPORT,
    DebugForward,
    DebugRefusal,
    has_quantized_input,
    is_captured,
    refusal_of,
)
from te_precision_callbacks.instrumentation.regions import AutocastRegions
from te_precision_callbacks.instrumentation.resting import RestingLayers
from te_precision_callbacks.instrumentation.running import Running
from te_precision_callbacks.instrumentation.seams import Seams, require
from te_precision_callbacks.instrumentation.tap import GemmTap
from te_precision_callbacks.instrumentation.upstream import reset_schedule
from te_precision_callbacks.layers.forwards import ForwardClassifier, ForwardKind, outside_of_dynamo, running_forward
from te_precision_callbacks.layers.naming import Model, NamedModule, NamedOperation

MOST_FORWARDS = 100
"""The number of training forwards of a module in one iteration at which the loop has probably forgotten to step."""


class ForwardHooks:
    """Installs the session's decisions in Transformer Engine, and removes them again.

    A module is *armed* in the iterations in which a feature may act on it. In all other iterations, and if it has no
    feature, it *rests*: it runs Transformer Engine's own methods, and nothing of the session is called in its forward
    and backward.

    The class has many attributes, since the forward of each armed module reads most of them without a further call.

    Args:
        classify: decides the kind of a forward.
        failures: receives failures in observation.
        audit: receives the precision that each GEMM operand really had.

    Attributes:
        on_renamed: called with the name of a module and the other name that the script has given to it; the module has
            its own name again.
        on_many_forwards: called in the :data:`MOST_FORWARDS`-th training forward of a module without a step in between.
        on_refusal: called in each forward that is left as it is because Transformer Engine would refuse it, with the
            module and the reason.
        unwatched: the modules that are not watched, and ran a forward with gradients in training.
        delayed_scaling: the layers that have run delayed scaling without a scale.
        order: in which order layers run.
        products: the matrix products of the model's first step.
    """

    def __init__(self, classify: ForwardClassifier, failures: ObservationFailures, audit: PrecisionAudit) -> None:
        self.on_many_forwards: Callable[[torch.nn.Module], None] | None = None
        self.on_renamed: Callable[[str, str], None] | None = None
        self.on_refusal: Callable[[torch.nn.Module, DebugRefusal], None] | None = None
        self.unwatched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.delayed_scaling = DelayedScalingLayers()
        self._forwards: dict[int, int] = {}
        self._classify = classify
        self._failures = failures
        self._audit = audit
        self._current = CurrentForward()
        self._own_is_debug_iter: Callable[[Any], bool] = bool
        self._modules: dict[int, torch.nn.Module] = {}
        self._layers: dict[int, tuple[str, ...]] = {}
        self._names: dict[int, str] = {}
        self._armed: dict[int, torch.nn.Module] = {}
        self._refused: set[int] = set()
        self._waiting: dict[int, dict[int, torch.nn.Module]] = {}
        self._idle_in_evaluation: dict[int, int] = {}
        self._resting = RestingLayers(classify, audit, self._ask_again)
        self._regions = AutocastRegions()
        self._fused: frozenset[int] = frozenset()
        self._fused_observation = FusedObservation(failures.report)
        running = Running()
        self.products = ModelProducts(failures.report, lambda: classify.paused, running.in_layer)
        self._tap = GemmTap(
            classify,
            failures.report,
            running,
            enter=self._enter_fused,
            silent=self.products.note_silent,
            attention=self.products,
        )
        self.order = ExecutionOrder()
        self._seams = Seams()

    def watch(
        self,
        modules: Sequence[NamedModule],
        refused: Iterable[int] = (),
        operations: Sequence[NamedOperation] = (),
        fused: Collection[int] = (),
    ) -> None:
        """Set the modules that the session acts on; any other module runs as without a session.

        Args:
            modules: the modules.
            refused: the ids of modules that must not take the debug path.
            operations: the operations of ``te.ops`` with GEMMs.
            fused: the ids of modules that are observed on their fused path.
        """
        self._release()
        self.unwatched.clear()
        self._modules = {id(named.module): named.module for named in modules}
        self._layers = {id(named.module): tuple(layer.name for layer in named.layers) for named in modules}
        self._names = {id(named.module): named.name for named in modules}
        self._idle_in_evaluation.clear()
        self._refused = set(refused).intersection(self._modules)
        self._resting.watch(self._modules, self._layers, self._refused)
        self._tap.watch(self._layers, operations)
        self._fused = frozenset(fused)
        self._fused_observation.watch([named for named in modules if id(named.module) in self._fused])
        for key in self._refused:
            self._leave_alone(self._modules[key])
        self.arm()

    def count_products(self, model: Model, names: Mapping[int, str]) -> None:
        """Count the matrix products of a model's next step; as :meth:`ModelProducts.watch`."""
        self.products.watch(model, names, self._tap.operations.layers)
        self._listen()

    def arm(self) -> None:
        """Arm every module: all features are asked again in the next forward."""
        self._waiting.clear()
        for module in self._modules.values():
            self._ask_again(module)
        self._listen()

    def begin(self, iteration: int) -> None:
        """Arm the modules on which a feature may act in an iteration; the others rest."""
        self.forget_forwards()
        ended, was_armed = iteration - 1, frozenset(self._armed)
        other_regions = self._regions.end_step()
        new_at_rest = self._resting.take_new(was_armed)
        for module in list(self._armed.values()):
            upcoming = module.__dict__["next_iter_when_debug_should_be_run"]
            if upcoming is None or upcoming > iteration:
                self._rest(module)
            if upcoming is not None and upcoming > iteration:
                self._waiting.setdefault(upcoming, {})[id(module)] = module
        for module in self._waiting.pop(iteration, {}).values():
            self._arm(module)
        try:
            self._resting.follow(ended, was_armed, new_at_rest, all_at_once=other_regions)
        except Exception as error:
            self._failures.report("looking for changes of the precision of", f"iteration {ended}", error)
        self._classify.was_paused = False
        self._tap.begin_iteration(all_operations=other_regions)
        self._listen()

    def _listen(self) -> None:
        """See the GEMMs of armed modules in the iteration that begins, while there are any."""
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        self._audit.enter(TEDebugState.get_iteration())
        listeners: tuple[Listener, ...] = ()
        if (self._armed or self._tap.operations.has_new) and not self._classify.kept:
            listeners = (self.order, self._audit.look, self._fused_observation)
        if self.products.counting:
            listeners = (*listeners, self.products.note)
        if self.products.counting:
            self._tap.hear(self._layers, self.products.attentions)
        else:
            self._tap.hear(self._armed)
        self._tap.listen(*listeners)

    def _enter_fused(self, module: torch.nn.Module, kind: ForwardKind) -> bool:
        """Ask the features of a module that is observed on its fused path, in its forward.

        Returns:
            Whether they look at anything.
        """
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        if id(module) not in self._fused or kind not in (ForwardKind.OBSERVED, ForwardKind.SILENT):
            return False
        iteration = TEDebugState.get_iteration()
        self._note_plan(module, (), idle=True, fprop_only=kind is ForwardKind.SILENT)
        if kind is ForwardKind.SILENT:
            return False
        layers = self._layers[id(module)]
        module.__dict__["next_iter_when_debug_should_be_run"] = self._fused_observation.ask(layers, iteration)
        if not self._fused_observation.wants(layers):
            return False
        self._look_at_scales(module, iteration)
        if self._current.has_quantized_input and self._fused_observation.looks_at_activation(layers):
            self._report_quantized_input(module)
        return True

    def _ask_again(self, module: torch.nn.Module) -> None:
        if id(module) not in self._refused:
            reset_schedule(module)
            self._arm(module)

    def keep(self) -> None:
        """End observation, but keep the features that change precision, until :meth:`remove`."""
        self._classify.kept = True
        self.arm()

    def forget_forwards(self) -> None:
        """Count the forwards of each module anew."""
        self._forwards.clear()

    def install(self) -> None:
        """Replace the seams.

        Raises:
            SessionError: this Transformer Engine does not have them.
        """
        from transformer_engine.debug.pytorch import debug_quantization
        from transformer_engine.pytorch import quantization
        from transformer_engine.pytorch.module import base

        module_class = base.TransformerEngineBaseModule
        require(module_class, "is_debug_iter", "no_debug_features_active")
        require(
            debug_quantization,
            "DebugQuantizer",
            "DebugQuantizedTensor",
            "API_CALL_MODIFY",
            "HIGH_PRECISION",
            "STANDARD_QUANTIZE",
        )
        require(quantization.FP8GlobalStateManager, "autocast_enter")
        require(debug_quantization.DebugQuantizedTensor, "get_tensor")
        from te_precision_callbacks.instrumentation.quantizer import OVERRIDDEN, quantizer_of

        require(debug_quantization.DebugQuantizer, *OVERRIDDEN)
        self._own_is_debug_iter = module_class.is_debug_iter
        self._seams.replace(module_class, "is_debug_iter", self._make_is_debug_iter_of_unwatched())
        self._seams.replace(
            module_class,
            "no_debug_features_active",
            self._make_no_debug_features_active(module_class.no_debug_features_active),
        )
        manager = quantization.FP8GlobalStateManager
        self._seams.replace(manager, "autocast_enter", staticmethod(self._regions.around(manager.autocast_enter)))
        self._install_for_refusals()
        quantizer = quantizer_of(self._current, self._failures)
        self._seams.replace(debug_quantization, "DebugQuantizer", quantizer)
        for name in ("layernorm_linear", "layernorm_mlp", "linear", "grouped_linear"):
            module = sys.modules.get(f"transformer_engine.pytorch.module.{name}")
            if module is not None and hasattr(module, "DebugQuantizer"):
                self._seams.replace(module, "DebugQuantizer", quantizer)

    def _install_for_refusals(self) -> None:
        """Remove Transformer Engine's refusals for the whole process, and follow CUDA graphs."""
        import transformer_engine.pytorch as te
        from transformer_engine.pytorch import cpu_offload, cpu_offload_v1

        for module in (cpu_offload, cpu_offload_v1):
            require(module, "TEDebugState")
            self._seams.replace(module, "TEDebugState", _NotDebugging)
        for module_class in (te.Linear, te.LayerNormLinear, te.LayerNormMLP):
            require(module_class, "onnx_forward")
            self._seams.replace(module_class, "onnx_forward", self._make_onnx_forward(module_class.onnx_forward))
        if hasattr(torch.cuda.CUDAGraph, "capture_begin"):  # the reference backend has no graphs
            self._seams.replace(torch.cuda.CUDAGraph, "capture_begin", self._make_capture_begin(torch.cuda.CUDAGraph))

    def _make_onnx_forward(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        @functools.wraps(upstream)
        def onnx_forward(module: Any, *arguments: Any, **keywords: Any) -> Any:
            if id(module) not in self._fused:
                self._tell(module, ONNX_EXPORT)
            enabled, TEDebugState.debug_enabled = TEDebugState.debug_enabled, False
            try:
                return upstream(module, *arguments, **keywords)
            finally:
                TEDebugState.debug_enabled = enabled

        return onnx_forward

    def _make_capture_begin(self, graph_class: Any) -> Callable[..., Any]:
        upstream = graph_class.capture_begin

        @functools.wraps(upstream)
        def capture_begin(graph: Any, *arguments: Any, **keywords: Any) -> Any:
            # All modules are asked, so that each captured module is noticed: later its forward is no longer called.
            self.arm()
            return upstream(graph, *arguments, **keywords)

        return capture_begin

    def remove(self) -> None:
        """Restore Transformer Engine's own methods."""
        self._release()
        self._seams.put_back()
        self._modules = {}
        self.unwatched.clear()
        self._current = CurrentForward()

    def _release(self) -> None:
        for module in self._modules.values():
            module.__dict__.pop("is_debug_iter", None)
        self._armed.clear()
        self._waiting.clear()
        self.products.close()
        self._tap.listen()

    def _arm(self, module: torch.nn.Module) -> None:
        self._armed[id(module)] = module
        module.__dict__["is_debug_iter"] = _OfOneModule(self._is_debug_iter, module)

    def _leave_alone(self, module: torch.nn.Module) -> None:
        """Let a module run as in a process without debugging."""
        self._refused.add(id(module))
        self._fused -= {id(module)}
        self._armed.pop(id(module), None)
        module.__dict__["is_debug_iter"] = _never(module)

    def _tell(self, module: torch.nn.Module, refusal: DebugRefusal) -> None:
        if self.on_refusal is not None and id(module) in self._modules:
            self.on_refusal(module, refusal)

    def _is_left_alone(self, forward: DebugForward, *, idle: bool) -> bool:
        """Whether a forward takes the ordinary path, since no feature acts in it or it is refused."""
        module, refusal = forward.module, refusal_of(forward)
        if refusal is None or (idle and not refusal.lasts):
            return idle
        if refusal.lasts:
            self._leave_alone(module)
        self._tell(module, refusal)
        return True

    def _rest(self, module: torch.nn.Module) -> None:
        del self._armed[id(module)]
        self._resting.add(module)
        module.__dict__["is_debug_iter"] = _never(module)

    @outside_of_dynamo
    def _is_debug_iter(self, module: Any) -> bool:
        """Answers the first question of an armed module in each forward."""
        from transformer_engine.debug.pytorch.debug_state import TEDebugState

        name = self._names[id(module)]
        if module.name != name:
            other, module.__dict__["name"] = module.name, name
            if self.on_renamed is not None:
                self.on_renamed(name, str(other))
        kind = self._classify(module)
        self._current.kind = kind
        self._current.module = module
        tensor = _input_of(module)
        needs_gradient = bool(getattr(tensor, "requires_grad", True))
        self._current.input_needs_gradient = kind is not ForwardKind.OBSERVED or needs_gradient
        self._current.has_quantized_input = has_quantized_input(module, tensor)
        if kind is ForwardKind.UNTOUCHED:
            return False
        if kind is ForwardKind.OBSERVED and self.on_many_forwards is not None:
            count = self._forwards[id(module)] = self._forwards.get(id(module), 0) + 1
            if count == MOST_FORWARDS:
                self.on_many_forwards(module)
        if id(module) in self._fused:
            if is_captured():
                self._leave_alone(module)
                self._tell(module, CUDA_GRAPH)
            return False
        if self._classify.kept:
            return True  # the iteration no longer changes, and an idle feature may have become active in it
        if kind is ForwardKind.EVALUATION:
            return self._idle_in_evaluation.get(id(module)) != int(TEDebugState.get_iteration())
        return bool(self._own_is_debug_iter(module))

    def _make_is_debug_iter_of_unwatched(self) -> Callable[[Any], bool]:
        unwatched, classify = self.unwatched, self._classify

        @outside_of_dynamo
        def is_debug_iter(module: Any) -> bool:
            if module.training and torch.is_grad_enabled() and not (classify.paused or classify.kept):
                unwatched.add(module)
            return False

        return is_debug_iter

    def _make_no_debug_features_active(self, upstream: Any) -> Any:
        from transformer_engine.debug.pytorch.debug_state import TEDebugState
        from transformer_engine.debug.pytorch.utils import any_feature_enabled

        def no_debug_features_active(module: Any, quantizers: Any) -> bool:
            kind = self._current.kind
            forward = DebugForward(module, quantizers, self._current.has_quantized_input)
            _forget_cached_weights(module, quantizers)
            if kind is not ForwardKind.EVALUATION:
                idle = self._is_left_alone(forward, idle=bool(upstream(module, quantizers)))
                if kind is not ForwardKind.UNTOUCHED:
                    self._note_plan(module, quantizers, idle, fprop_only=kind is ForwardKind.SILENT)
                    if not idle:
                        self._look_at_scales(module, TEDebugState.get_iteration())
                    if not idle and forward.has_quantized_input and _acts_on_activation(quantizers):
                        self._report_quantized_input(module)
                return idle
            # Evaluation must not change the schedule of training: it asks separately, once per iteration.
            idle = not any_feature_enabled(quantizers)
            if idle:
                self._idle_in_evaluation[id(module)] = TEDebugState.get_iteration()
            return self._is_left_alone(forward, idle=idle)

        return no_debug_features_active

    def _note_plan(self, module: Any, quantizers: Iterable[Any], idle: bool, *, fprop_only: bool) -> None:
        """Note the GEMMs that a forward, and its backward if it has one, is going to run."""
        try:
            self._resting.note_training(module, idle=idle)
            layers, left_out = self._layers[id(module)], dict[Gemm, str]()
            if not fprop_only:
                left_out = gemms_left_out(module, layers, input_needs_gradient=self._current.input_needs_gradient)
                self._audit.leave_out(left_out)
            gemms = [Gemm(layer, gemm) for layer in layers for gemm in (GEMMS[:1] if fprop_only else GEMMS)]
            self._audit.expect(gemm for gemm in gemms if gemm not in left_out)
            if idle:
                formats = formats_of_fused_path(module, layers, fp8=module.fp8)
                formats = of_fprop(formats) if fprop_only else formats
                self._audit.expect_unseen(
                    {
                        operand: made
                        for operand, made in formats.items()
                        if Gemm(operand.layer, operand.gemm) not in left_out
                    }
                )
                return
        except Exception as error:
            self._failures.report("telling the precision of", str(module.name), error)
        without_effect = [quantizer for quantizer in quantizers if quantizer.is_left_out()]
        if without_effect:
            self._report_left_out(module, without_effect)

    def _look_at_scales(self, module: Any, iteration: int) -> None:
        try:
            self.delayed_scaling.look(module, iteration)
        except Exception as error:
            self._failures.report("looking at the scales of", str(module.name), error)

    def _report_quantized_input(self, module: Any) -> None:
        self._failures.report(
            "What features do with activation",
            f"of {module.name}",
            QuantizationError(
                "its input is already quantized, by a layer with fp8_output or by FP8 attention, so Transformer"
                " Engine does not quantize it, and calls no feature for it"
            ),
        )

    def _report_left_out(self, module: Any, quantizers: Sequence[Any]) -> None:
        tensors = ", ".join(dict.fromkeys(quantizer.tensor_name for quantizer in quantizers))
        override = backward_override(module)
        self._failures.report(
            f"What features do with {tensors}",
            f"of {module.name}",
            QuantizationError(
                f"the recipe has backward_override={override!r}, with which Transformer Engine runs the backward in"
                " high precision and outside its debug path, where no feature is called"
            ),
        )


class _OfOneModule(functools.partial):  # type: ignore[type-arg]
    """The ``is_debug_iter`` of a watched module, called as fast as a method. A copy of the module is not watched."""

    def __deepcopy__(self, memo: dict[int, Any]) -> functools.partial[bool]:
        return functools.partial(_as_its_class, copy.deepcopy(self.args[0], memo))


class _NotDebugging:
    """Transformer Engine's debug state, for the parts of Transformer Engine that refuse to work during a session."""

    debug_enabled = False


def _forget_cached_weights(module: Any, quantizers: Sequence[Any]) -> None:
    """Drop weights that a forward with ``is_first_microbatch`` has cached in another iteration, or in an evaluation.

    Transformer Engine would write the new weight into the cached weight with the cached weight's old quantizer: with
    the features, and in the precision, of the iteration that made it. Read from 2.20.2, ``pytorch/module/base.py:
    quantize_weight``.
    """
    from transformer_engine.debug.pytorch.debug_quantization import DebugQuantizedTensor

    workspaces: dict[str, Any] = module.__dict__["_fp8_workspaces"]
    now = quantizers[0]
    for name, held in list(workspaces.items()):
        if isinstance(held, DebugQuantizedTensor):
            made = held.quantizer
            # With an fsdp_group Transformer Engine reads attributes that such a weight does not have.
            if made.iteration != now.iteration or made.kind is not now.kind or module.fsdp_group is not None:
                del workspaces[name]


def _acts_on_activation(quantizers: Iterable[Any]) -> bool:
    return any(quantizer.any_feature_enabled() for quantizer in quantizers if quantizer.tensor_name == "activation")


def _never(module: torch.nn.Module) -> _OfOneModule:
    """The ``is_debug_iter`` of a module that is not to be asked: always False, without a call of Python."""
    return _OfOneModule(operator.is_, module, None)


def _as_its_class(module: Any) -> bool:
    return bool(type(module).is_debug_iter(module))


def _input_of(module: torch.nn.Module) -> Any:
    """The input of the forward that a module is running; None if unknown.

    The input is the first argument of TE 2.20.2's forwards, which keep its name.
    """
    frame = running_forward(module)
    return None if frame is None else frame.f_locals.get(frame.f_code.co_varnames[1])
