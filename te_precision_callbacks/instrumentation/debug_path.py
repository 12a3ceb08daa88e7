"""Decides for each forward of a TE module whether it takes the debug path and whether a feature acts.

Read from Transformer Engine 2.20.2: ``TransformerEngineBaseModule.is_debug_iter`` and ``no_debug_features_active``
(``pytorch/module/base.py``).

Detects stale cached weights: a forward with ``is_first_microbatch=False`` uses the low-precision weights that an
earlier forward cached. If a script never passes True again, all steps use the weights of the first (2.20.2:
``rowwise_gemm_tensor`` of ``DebugQuantizedTensor``).

Reads the state of delayed scaling, before a layer's first forward and of layers in CUDA graphs. In a layer's first step
the scale is 1, so most of a small gradient underflows, unless the run was resumed with the scales of its checkpoint.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.errors import QuantizationError
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.base.vocabulary import name_of_format
from te_precision_callbacks.coverage.model_watch import hide_operators
from te_precision_callbacks.instrumentation.current_call import CurrentForward
from te_precision_callbacks.instrumentation.refusals import (
    COMPILED,
    CUDA_GRAPH,
    DebugForward,
    RefusedLayers,
    graph_refusal,
    refusal_of,
)
from te_precision_callbacks.instrumentation.watched import LEAVES_GRAPHS, WatchedModules
from te_precision_callbacks.layers.forwards import (
    ForwardClassifier,
    ForwardKind,
    compiled_in_callers_only,
    outside_of_dynamo,
    running_forward,
)
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.statistics.names import STALE
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.statistics.series import log_name
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.debug import any_feature_enabled, debug_quantization
from te_precision_callbacks.te.state import (
    BACKWARD,
    FORWARD,
    backward_override,
    cached_weights,
    debug_iteration,
    delayed_state,
    delayed_states,
    has_quantized_input,
    is_captured,
    meta_of,
)


class DelayedScalingLayers:
    """Reads each state of delayed scaling once, in the first forward with features that uses it."""

    def __init__(self) -> None:
        self._empty: dict[int, tuple[int, torch.Tensor]] = {}  # iteration, and whether a state was empty
        self._states: dict[int, Any] = {}  # of the recipe, in the last forward in FP8 of a module

    def snapshot(self, module: Any, iteration: int) -> None:
        """Read a module's state in a training forward, without waiting for the device."""
        state = meta_of(module).get(FORWARD)
        if not module.fp8 or self._states.get(id(module)) is state:
            return
        self._states[id(module)] = state
        if states := list(delayed_states(module)):
            with hide_operators():  # in the step whose operators are counted
                self._empty[id(module)] = iteration, _any_is_empty(states)

    def unscaled(self, iteration: int, modules: Iterable[NamedModule], layers: Iterable[str]) -> frozenset[str]:
        """Return the layers that ran without a scale in a step: their state was new and empty.

        Args:
            layers: the layers with statistics; layers of other ranks count if one of this rank does.
        """
        new = {key: is_empty for key, (first, is_empty) in self._empty.items() if first == iteration}
        if not new:
            return frozenset()
        device = next(iter(new.values())).device
        empty = torch.stack([is_empty.to(device) for is_empty in new.values()]).tolist()
        without = set(itertools.compress(new, empty))
        ours: set[str] = set()
        unscaled: set[str] = set()
        for named in modules:
            ours.update(named.names)
            if id(named.module) in without:
                unscaled.update(named.names)
        if unscaled:
            unscaled |= set(layers) - ours
        return frozenset(unscaled)


def _any_is_empty(states: Sequence[Any]) -> torch.Tensor:
    """Return whether a state has scales of 1 and no earlier amax.

    The history's first row holds the current amaxes until the scales are updated. Read from Transformer Engine 2.20.2,
    ``common/recipe/delayed_scaling.cu`` and ``quantization.py: _update_amax_history``.
    """
    distances = torch._foreach_sub([state.scale for state in states], 1.0)
    sums = torch._foreach_norm([*distances, *[state.amax_history[1:] for state in states]], 1)
    return (torch.stack(sums).view(2, -1) == 0).all(0).any()


_STATES = ((FORWARD, "activation", 0), (FORWARD, "weight", 1), (BACKWARD, "gradient", 0))
"""State, tensor, and its position among the tensors of a layer (2.20.2, ``quantization.py: FP8FwdTensorIdx``)."""


def scales_in_graph(module: torch.nn.Module, layers: Sequence[str]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield ``<layer>_<tensor>_scale_inv_max`` and ``_cur_amax`` of layers in a CUDA graph, which replays update.

    The history's last row has the amaxes of the last forward and backward, once the scales are updated.

    Args:
        layers: the names of the module's layers.
    """
    for direction, tensor, position in _STATES:
        state = delayed_state(meta_of(module), direction)
        if state is not None:
            scales = state.scale.chunk(len(layers))
            histories = state.amax_history.chunk(len(layers), 1)
            for layer, scale, history in zip(layers, scales, histories, strict=True):
                yield f"{layer}_{tensor}_scale_inv_max", 1 / scale[position]
                if len(history) > 1:
                    yield f"{layer}_{tensor}_cur_amax", history[-1, position]


class DebugPathDecisions:
    """The replacements of ``is_debug_iter`` and ``no_debug_features_active``.

    Attributes:
        unwatched: modules with a training forward that the session does not watch.
        ran_elsewhere: whether a module of Transformer Engine ran that the session does not watch.
        ran: ids of watched modules with a training forward in this iteration.
        current: the current forward of each thread.
        refused: the layers that Transformer Engine's debug path refuses.
    """

    def __init__(
        self,
        classify: ForwardClassifier,
        failures: ObservationFailures,
        scalars: ScalarBuffer,
        *,
        strict: bool,
    ) -> None:
        self.watched = WatchedModules(self.is_debug_iter)
        self.unwatched: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()
        self.ran_elsewhere = False
        self.delayed_scaling = DelayedScalingLayers()
        self.current = CurrentForward()
        self.refused = RefusedLayers(strict=strict)
        self._classify = classify
        self._scalars = scalars
        self._upstream_is_debug_iter: Callable[[Any], bool] = bool
        self.ran: set[int] = set()
        self._checked_cache: set[int] = set()
        self._failures = failures
        self._idle_in_evaluation: dict[int, int] = {}
        self._captured: dict[int, tuple[torch.nn.Module, tuple[Schedule, ...] | None]] = {}

    def forget_forwards(self) -> None:
        self.ran.clear()
        self._checked_cache.clear()

    def forget_modules(self) -> None:
        self.unwatched.clear()
        self._idle_in_evaluation.clear()
        self._captured.clear()

    def forget(self) -> None:
        self.unwatched.clear()
        self.current = CurrentForward()

    @outside_of_dynamo
    def is_debug_iter(self, module: Any) -> bool:
        kind = self._classify(module)
        if kind is not ForwardKind.UNTOUCHED and self.watched.is_on_fused_path(module, debug_iteration()):
            return False  # the tap enters it
        frame = running_forward(module)
        tensor = None if frame is None else frame.f_locals.get(frame.f_code.co_varnames[1])  # its input in TE 2.20.2
        self._enter(module, kind, tensor)
        if kind is ForwardKind.UNTOUCHED:
            return False
        if kind is ForwardKind.EVALUATION:
            return self._idle_in_evaluation.get(id(module)) != debug_iteration()
        return bool(self._upstream_is_debug_iter(module))

    def _enter(self, module: Any, kind: ForwardKind, tensor: Any) -> None:
        module.__dict__["name"] = self.watched.names[id(module)]  # the script may have renamed it
        current = self.current
        current.kind = kind
        current.module = module
        current.input_needs_gradient = kind is not ForwardKind.OBSERVED or bool(getattr(tensor, "requires_grad", True))
        current.has_quantized_input = type(tensor) not in PLAIN and has_quantized_input(module, tensor)
        if kind is ForwardKind.OBSERVED:
            self.ran.add(id(module))
            if cached_weights(module):
                self._check_cached(module)

    def enter_fused(self, module: Any, kind: ForwardKind, tensor: Any) -> bool:
        """Note a forward on the fused path, with its input; return False in a graph's capture, which excludes it."""
        self._enter(module, kind, tensor)
        if is_captured():
            self._exclude_captured(module)
            return False
        return True

    def enter_compiled(self, module: Any, kind: ForwardKind, arguments: Any) -> None:
        """Note a forward in a compiled graph, which only its fused path has; the tap sees all of its formats."""
        self.current.kind = kind
        self.current.module = module
        self.current.has_quantized_input = False
        self.current.input_needs_gradient = arguments.input_requires_grad
        if kind is ForwardKind.OBSERVED:
            self.ran.add(id(module))
        if not self.watched.is_on_fused_path(module, debug_iteration()):
            module.__dict__["next_iter_when_debug_should_be_run"] = None
            self.refused.note(module, COMPILED)

    def _check_cached(self, module: Any) -> None:
        """Check once per iteration whether the weights that a forward reads from the cache are stale."""
        if id(module) in self._checked_cache:
            return
        with self._failures.guard("looking at the cached weights of", str(module.name)):
            for name, percentage in stale_shares(module, self.watched.layers[id(module)], running_forward(module)):
                self._checked_cache.add(id(module))
                self._scalars.add(name, percentage)

    def make_is_debug_iter(self, upstream: Callable[[Any], bool]) -> Callable[[Any], bool]:
        self._upstream_is_debug_iter = upstream
        unwatched = self.unwatched
        classify = self._classify
        watched = self.watched

        @outside_of_dynamo
        def note_unwatched(module: Any) -> bool:
            self.ran_elsewhere = True
            if module.training and torch.is_grad_enabled() and not classify.paused:
                unwatched.add(module)
            return False

        def is_debug_iter(module: Any) -> bool:
            if torch.compiler.is_dynamo_compiling():
                return hasattr(module, LEAVES_GRAPHS)  # True makes Transformer Engine leave the graph for the call
            if id(module) in watched.modules:  # one that may be in a graph; others answer by themselves
                is_asked = id(module) in watched.due and not watched.is_always_fused(module)
                return is_asked and self.is_debug_iter(module)
            return note_unwatched(module)

        return compiled_in_callers_only(is_debug_iter)

    def make_no_debug_features_active(self, upstream: Any) -> Any:
        def no_debug_features_active(module: Any, quantizers: Any) -> bool:
            kind = self.current.kind
            forward = DebugForward(module, quantizers, self.current.has_quantized_input)
            _forget_cached_weights(module, quantizers)
            if kind is not ForwardKind.EVALUATION:
                idle = self._stays_idle(forward, idle=bool(upstream(module, quantizers)))
                if kind is not ForwardKind.UNTOUCHED and not idle:
                    self._report_left_out(module, quantizers)
                    self.check_scales(module, debug_iteration())
                    if forward.has_quantized_input:
                        inputs = [quantizer for quantizer in quantizers if quantizer.tensor_name == "activation"]
                        if any_feature_enabled(inputs):
                            self.report_quantized_input(module)
                return idle
            # Evaluation must not change training's schedule.
            idle = not any_feature_enabled(quantizers)
            if idle:
                self._idle_in_evaluation[id(module)] = debug_iteration()
            return self._stays_idle(forward, idle=idle)

        return no_debug_features_active

    def _report_left_out(self, module: Any, quantizers: Iterable[Any]) -> None:
        without_effect = dict.fromkeys(quantizer.tensor_name for quantizer in quantizers if quantizer.is_left_out())
        if without_effect:
            self._report_unreached(
                module,
                ", ".join(without_effect),
                f"the recipe has backward_override={backward_override(module)!r}, so the backward runs in high"
                " precision outside of the debug path, where no feature is called",
            )

    def check_scales(self, module: Any, iteration: int) -> None:
        """Read a module's state of delayed scaling, if it is new."""
        try:
            self.delayed_scaling.snapshot(module, iteration)
        except Exception as error:
            self._failures.report("reading the scales of", str(module.name), error)

    def report_quantized_input(self, module: Any) -> None:
        self._report_unreached(
            module,
            "activation",
            "its input is already quantized (fp8_output or FP8 attention), so Transformer Engine calls no feature"
            " for it",
        )

    def _report_unreached(self, module: Any, tensors: str, why: str) -> None:
        self._failures.report(f"What features do with {tensors}", f"of {module.name}", QuantizationError(why))

    def _stays_idle(self, forward: DebugForward, *, idle: bool) -> bool:
        module = forward.module
        refusal = refusal_of(forward)
        if refusal is None or (idle and not refusal.lasts):
            return idle
        if refusal is CUDA_GRAPH:
            self._exclude_captured(module)
        else:
            self.refused.note(module, refusal)
        return True

    def _exclude_captured(self, module: torch.nn.Module) -> None:
        """Exclude a module from observation during a graph capture; :meth:`resolve_captured` decides afterwards."""
        self._captured[id(module)] = module, self.watched.fused.get(id(module))
        self.watched.exclude(module)
        if self.refused.strict:
            self.refused.note(module, CUDA_GRAPH)

    def resolve_captured(self, bypassable: Collection[int], refused: Iterable[tuple[torch.nn.Module, str]]) -> None:
        """Refuse modules captured in a step, except in graphs that can be bypassed.

        Args:
            bypassable: ids of modules in such graphs.
            refused: modules in other graphs, with reasons.
        """
        for module, why_not in refused:
            if id(module) in self.watched.modules and id(module) not in self.watched.refused:
                self.watched.exclude(module)
                self.refused.note(module, graph_refusal(why_not))
            self._captured.pop(id(module), None)
        captured = self._captured
        self._captured = {}
        for key, (module, changed_steps) in captured.items():
            if key in bypassable:
                self.watched.watch_again(module, changed_steps)
            else:
                self.refused.note(module, CUDA_GRAPH)


def _forget_cached_weights(module: Any, quantizers: Sequence[Any]) -> None:
    """Drop weights cached with ``is_first_microbatch`` in another iteration or in an evaluation.

    Transformer Engine would write the new weight with the cached weight's quantizer, which has the features and the
    precision of an earlier iteration. Read from 2.20.2, ``pytorch/module/base.py: quantize_weight``.
    """
    cached_by_name = cached_weights(module)
    quantizer = quantizers[0]
    for name, cached in list(cached_by_name.items()):
        if isinstance(cached, debug_quantization.DebugQuantizedTensor):
            cached_quantizer = cached.quantizer
            # With an fsdp_group, TE reads attributes that this weight lacks.
            if (
                cached_quantizer.iteration != quantizer.iteration
                or cached_quantizer.kind is not quantizer.kind
                or module.fsdp_group is not None
            ):
                del cached_by_name[name]


_ROUNDING = {"FP8": 2.0**-3, "MXFP8": 2.0**-3, "NVFP4": 2.0**-1}
"""First word of the format -> twice the largest rounding error, relative to the element."""

_SMALL = {"FP8": 2.0**-16, "MXFP8": 2.0**-10, "NVFP4": 2.0**-4}
"""The same for small elements, relative to the tensor's largest element."""


def stale_shares(module: Any, layers: tuple[str, ...], frame: Any) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield log name and :data:`STALE` percentage of each weight that the forward in ``frame`` reads from the cache."""
    cached = cached_weights(module)
    if not cached or frame is None or frame.f_locals.get("is_first_microbatch") is not False:
        return
    for key, held in cached.items():
        weight = getattr(module, key, None)
        codes = getattr(held, "rowwise_gemm_tensor", held)
        if isinstance(weight, torch.Tensor) and codes is not None:
            percentage = _stale_percentage(weight.detach(), codes)
            if percentage is not None:
                yield log_name(te_modules.of(module).layer_of(key, layers), "weight", STALE), percentage


@torch.no_grad()
def _stale_percentage(weight: torch.Tensor, codes: Any) -> torch.Tensor | None:
    name = (name_of_format(codes) or "").partition(" ")[0]
    weight = getattr(weight, "_local_tensor", weight)
    if name not in _ROUNDING or name_of_format(weight) is not None:
        return None
    values = weight.float()
    cached_values = codes.dequantize(dtype=torch.float32)
    if values.shape != cached_values.shape:
        return None
    size = values.abs()
    percentage: torch.Tensor = (
        100 * ((cached_values - values).abs() > _ROUNDING[name] * size + _SMALL[name] * size.max()).float().mean()
    )
    return percentage
