"""Replaces the functions of Transformer Engine that start its debug path.

Each forward decides whether it and its backward are observed. Transformer Engine decides once per iteration, without
distinguishing evaluation or recomputation. A live session replaces, as read from Transformer Engine 2.20.2:

- ``TransformerEngineBaseModule.is_debug_iter`` and ``no_debug_features_active`` (``pytorch/module/base.py``), called
  first in each forward (``debug_path.py``).
- ``debug_quantization.DebugQuantizer`` (``debug/pytorch/debug_quantization.py``), built for each tensor of a forward in
  debug mode, by a subclass with the kind of the forward (``quantizer.py``).

Layers that Transformer Engine refuses in debug mode (``refusals.py``) stay unchanged. The process-wide refusal of CPU
offloading is removed: ``TEDebugState`` of ``pytorch/cpu_offload.py`` and ``cpu_offload_v1.py``.
``FP8GlobalStateManager.autocast_enter`` (``pytorch/quantization.py``) is wrapped to see regions of ``te.autocast``,
``torch.cuda.CUDAGraph.capture_begin`` (torch 2.13) is wrapped to detect CUDA graphs, and ``set_capture_start`` and
``set_capture_end`` (``pytorch/graph.py``), between which ``make_graphed_callables`` runs layers without training.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.errors import ObservationError, SessionError
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.replaced import AnyFunction, Replacements
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.coverage.model_watch import ModelProducts
from te_precision_callbacks.coverage.step_table import StepTable
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.instrumentation.current_call import Forward
from te_precision_callbacks.instrumentation.debug_path import DebugPathDecisions, scales_in_graph
from te_precision_callbacks.instrumentation.every_step import EveryStep
from te_precision_callbacks.instrumentation.gemm_errors import SelectedGemms
from te_precision_callbacks.instrumentation.graphs import CudaGraphs
from te_precision_callbacks.instrumentation.quantizer import OVERRIDDEN, make_quantizer_class
from te_precision_callbacks.instrumentation.statistics import StatisticsConsumer
from te_precision_callbacks.instrumentation.tap import GemmTap
from te_precision_callbacks.layers.forwards import ForwardClassifier, ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent
from te_precision_callbacks.layers.naming import Model, NamedModule, NamedOperation
from te_precision_callbacks.parameters.watch import is_due as weights_are_sampled
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.te import debug, seams
from te_precision_callbacks.te.state import debug_iteration, is_captured

_STAGE_INFERENCE = "_forward_metadata_inference"


class ForwardHooks:
    """Replaces functions of Transformer Engine during a session, and prepares the observation of each step.

    Attributes:
        answers: decides which forwards take the debug path.
        has_entered_autocast: whether a region of ``te.autocast`` was entered in this step.
        has_enabled_autocast: whether one with ``enabled=True`` was entered.
        selected_gemms: measures errors of GEMMs, and records GEMMs.
        statistics: passes GEMMs on the fused path to features.
        products: counts the matrix products of the model.
    """

    def __init__(
        self,
        classify: ForwardClassifier,
        failures: ObservationFailures,
        table: StepTable,
        scalars: ScalarBuffer,
        engine: StatisticsEngine,
        *,
        strict: bool,
        every_step: bool,
    ) -> None:
        self._classify = classify
        self._watches_every_step = every_step
        self._failures = failures
        self._table = table
        self._scalars = scalars
        self.answers = DebugPathDecisions(classify, failures, scalars, strict=strict)
        self._watched = self.answers.watched
        self.has_entered_autocast = False
        self.has_enabled_autocast = False
        self.statistics = StatisticsConsumer(engine, failures.report)
        self.selected_gemms = SelectedGemms(engine, failures.report)
        self.every_step = EveryStep(Ring(), table, failures.report)
        self.products = ModelProducts(failures.report, lambda: classify.paused, table, self._observe_step)
        if every_step:
            self.products.begin_call = self.every_step.ring.begin_call
            self.products.on_failure = self.every_step.ring.forget_calls
        self.products.is_tapped = every_step
        self.products.is_evaluation_mode = lambda: classify.eval_mode_counts
        classify.in_training_call = lambda: self.products.calls.current is not None
        self._tap = GemmTap(
            classify,
            failures.report,
            self.every_step,
            self._consume,
            before_sum=self.selected_gemms.before_sum,
            enter=self._enter_fused,
            products=self.products,
            statistics=self.statistics,
        )
        self._consumers: list[Callable[[GemmEvent], None]]
        self._consumers = [self.statistics, self.selected_gemms]
        self._graphs = CudaGraphs()
        self._seams = Replacements()
        self._is_capturing = False
        self._paused_before = False
        self._has_gemms = False

    def watch(
        self,
        modules: Sequence[NamedModule],
        refused: Iterable[int],
        operations: Sequence[NamedOperation],
        fused: Mapping[int, tuple[Schedule, ...]],
        roots: Iterable[torch.nn.Module],
    ) -> None:
        """Set the modules that the session acts on.

        Args:
            refused: the ids of modules that must not take the debug path.
            operations: ``te.ops`` operations with GEMMs.
            fused: id of a module observed on its fused path -> steps with features that change its precision.
            roots: the models that are searched for CUDA graphs.
        """
        self._release()
        self.answers.forget_modules()
        self._watched.watch(modules, refused, fused)
        self._watched.leave_graphs(self.answers.refused.acting)
        self._table.watch(modules, operations)
        self._tap.watch(self._watched.modules, self._watched.layers, operations)
        self._has_gemms = bool(modules or operations)
        self.every_step.is_on = self._watches_every_step and self._has_gemms
        self.selected_gemms.watch(modules)
        self.statistics.watch([named for named in modules if id(named.module) in self._watched.fused])
        in_graphs = *self._watched.modules, *(id(operation.module) for operation in operations)
        self._graphs.watch(roots, frozenset(in_graphs))
        self._observe_step()

    def count_products(self, model: Model, names: Mapping[int, str]) -> None:
        self.products.watch_model(model, names)
        self._observe_step()

    def query_all(self) -> None:
        self._watched.query_all()
        self._observe_step()

    def begin(self, iteration: int) -> None:
        if self._is_capturing:  # the capture has raised
            self._end_capture()
        self._table.leave(iteration - 1)
        self._graphs.restore(self._watched.due, self.answers.ran)
        self.answers.forget_forwards()
        self.selected_gemms.forget_operands()
        self.has_entered_autocast = False
        self.products.unobserved.end_step()
        self._watched.begin(iteration)
        self._tap.begin_iteration()
        self._observe_step()

    def _observe_step(self) -> None:
        """Tell the tap and the graphs which modules are due, and whether products are counted."""
        self._table.enter(debug_iteration())
        due = self._watched.due
        counts = self.products.counting
        self._tap.observe(due, counts=counts, attentions=self.products.attentions)
        if self._has_gemms and (self._watches_every_step or due or counts):
            self._tap.install()
        else:
            self._tap.remove()
        # Bypass the CUDA graphs of layers to observe in this step only.
        if (due or counts) and not is_captured():
            self._graphs.bypass(due, all_graphs=counts)
            self.products.calls.has_graphs = bool(self._graphs)
        self._table.is_complete = not self._has_gemms or (self._tap.installed and (counts or not self._graphs))

    def _consume(self, event: GemmEvent) -> None:
        """Pass an event on; a consumer that fails gets no more."""
        for consumer in list(self._consumers):
            try:
                consumer(event)
            except ObservationError:  # reported already; must be raised
                raise
            except Exception as error:
                self._consumers.remove(consumer)
                self._failures.report("observing the GEMMs of", event.layer, error)

    def end_step(self) -> None:
        self._graphs.find()
        self.answers.resolve_captured(self._graphs.bypassable, self._graphs.refused())
        if weights_are_sampled(debug_iteration()):
            for key, module in self.answers.refused.in_graphs.items():
                try:
                    for name, value in scales_in_graph(module, self._watched.layers[key]):
                        self._scalars.add(name, value)
                except Exception as error:
                    self._failures.report("reading the scales of", self._watched.names[key], error)

    def _enter_fused(
        self, module: torch.nn.Module, forward: Forward, tensor: Any, compiled: Any
    ) -> Collection[tuple[int, str]] | None:
        """Query a module's features on its fused path; return the tensors they need as (layer index, tensor name).

        None for a module that is captured in a CUDA graph.

        Args:
            tensor: the module's input.
            compiled: the arguments of the module's operator in a compiled graph, which skips ``is_debug_iter``.
        """
        if self._classify.abandoned is not None:
            self._classify.abandoned()  # restores the debug manager, which the features need
        iteration = debug_iteration()
        watched = self._watched
        layers = watched.layers[id(module)]
        kind = forward.kind
        if compiled is not None and kind is not ForwardKind.EVALUATION:
            self.answers.enter_compiled(module, kind, compiled)
        changed = watched.fused.get(id(module))
        if changed != () and not watched.is_on_fused_path(module, iteration):
            return ()
        if compiled is None and not self.answers.enter_fused(module, kind, tensor):
            return None
        if kind is not ForwardKind.OBSERVED:
            return ()
        due, upcoming = self.statistics.query(layers, iteration)
        forward.due = due
        if changed:
            upcoming = [*upcoming, *(step for schedule in changed if (step := schedule.at(iteration)[1]) is not None)]
        module.__dict__["next_iter_when_debug_should_be_run"] = min(upcoming, default=None)
        needed = due.tensors
        if not needed:
            return ()
        self.answers.check_scales(module, iteration)
        if self.answers.current.has_quantized_input and (0, "activation") in needed:
            self.answers.report_quantized_input(module)
        return needed

    def install(self) -> None:
        """Install the replacements.

        Raises:
            SessionError: this Transformer Engine lacks a replaced function.
        """
        debug_quantization = debug.debug_quantization
        module_class = seams.base.TransformerEngineBaseModule
        require(module_class, "is_debug_iter", "no_debug_features_active")
        require(
            debug_quantization,
            "DebugQuantizer",
            "DebugQuantizedTensor",
            "API_CALL_MODIFY",
            "HIGH_PRECISION",
            "STANDARD_QUANTIZE",
        )
        require(seams.state_manager, "autocast_enter")
        require(debug_quantization.DebugQuantizedTensor, "get_tensor")
        require(debug_quantization.DebugQuantizer, *OVERRIDDEN)
        self._seams.wrap(module_class, "is_debug_iter", self.answers.make_is_debug_iter)
        self._seams.wrap(module_class, "no_debug_features_active", self.answers.make_no_debug_features_active)
        autocast_enter = self._wrap_autocast_enter(seams.state_manager.autocast_enter)
        self._seams.replace(seams.state_manager, "autocast_enter", staticmethod(autocast_enter))
        # torch.distributed.pipelining (2.13) runs each stage once before its micro-batches, on uninitialized memory.
        pipelining: Any = sys.modules.get("torch.distributed.pipelining.stage")
        if pipelining is not None and hasattr(pipelining.PipelineStage, _STAGE_INFERENCE):
            self._seams.wrap(pipelining.PipelineStage, _STAGE_INFERENCE, self._classify.pause_during)
        self._install_for_refusals()
        quantizer = make_quantizer_class(self.answers.current, self._failures)
        self._seams.replace(debug_quantization, "DebugQuantizer", quantizer)
        for module in (seams.layernorm_linear, seams.layernorm_mlp, seams.linear, seams.grouped_linear):
            if hasattr(module, "DebugQuantizer"):
                self._seams.replace(module, "DebugQuantizer", quantizer)

    def _wrap_autocast_enter(self, upstream: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(upstream)
        def autocast_enter(enabled: bool = False, *arguments: Any, **keywords: Any) -> Any:
            if not torch.compiler.is_compiling():
                self.has_entered_autocast = True
                self.has_enabled_autocast |= enabled
            return upstream(enabled, *arguments, **keywords)

        return autocast_enter

    def _install_for_refusals(self) -> None:
        for module in (seams.cpu_offload, seams.cpu_offload_v1):
            require(module, debug.STATE_NAME)
            self._seams.replace(module, debug.STATE_NAME, _NotDebugging)
        graph = seams.graph
        require(graph, "set_capture_start", "set_capture_end", "is_graph_capturing")
        self._seams.wrap(graph, "set_capture_start", _after(self._begin_capture))
        self._seams.wrap(graph, "set_capture_end", self._make_capture_end)
        if hasattr(torch.cuda.CUDAGraph, "capture_begin"):  # the reference backend has no graphs
            # Query all modules, so that each captured one is noticed: a replay does not call its forward.
            query = _after(lambda: None if graph.is_graph_capturing() else self.query_all())
            self._seams.wrap(torch.cuda.CUDAGraph, "capture_begin", query)

    def _begin_capture(self) -> None:
        self._paused_before = self._classify.paused
        self._classify.paused = True
        self._is_capturing = True
        self._graphs.restore()
        self._watched.query_none()
        self._tap.remove()

    def _end_capture(self) -> None:
        self._classify.paused = self._paused_before
        self._is_capturing = False
        self.query_all()

    def _make_capture_end(self, upstream: Callable[[], None]) -> Callable[[], None]:
        @functools.wraps(upstream)
        def set_capture_end() -> None:
            upstream()
            self._end_capture()

        return set_capture_end

    def remove(self) -> None:
        self._release()
        self._seams.restore()
        self.answers.forget()
        self._table.write()
        self._table.modules = {}

    def _release(self) -> None:
        self._graphs.restore()
        self._watched.release()
        self.products.close()
        self._tap.remove()


def _after(action: Callable[[], None]) -> Callable[[AnyFunction], AnyFunction]:
    """Return what makes a function run after an action."""

    def wrap(upstream: AnyFunction) -> AnyFunction:
        @functools.wraps(upstream)
        def after(*arguments: Any, **keywords: Any) -> Any:
            action()
            return upstream(*arguments, **keywords)

        return after

    return wrap


def require(owner: Any, *names: str) -> None:
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise SessionError(
            f"This Transformer Engine has no {', '.join(missing)} in {owner.__name__}, which the session needs."
            " Install Transformer Engine 2.20, or a te-precision-callbacks release for your version."
        )


class _NotDebugging:
    """Debug state for parts of TE that would refuse to work during a session."""

    debug_enabled = False
