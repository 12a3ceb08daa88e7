"""Options that Transformer Engine's debug path refuses, and the layers that use them.

With these options the debug path raises or silently skips features. A session keeps such a layer on the ordinary path,
unobserved and without features. Above each row of :data:`REFUSALS` is the refusing function in Transformer Engine
2.20.2.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from te_precision_callbacks.base.counts import first_of, group_by_key
from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.config.effects import Effect
from te_precision_callbacks.config.planning import Plan
from te_precision_callbacks.instrumentation.graphs import why_not_bypassed
from te_precision_callbacks.layers.naming import Model, NamedModule, modules_of
from te_precision_callbacks.te.debug import debug_quantization
from te_precision_callbacks.te.state import has_quantized_weights, is_captured, offloads_activations

logger = logging.getLogger(__name__)

MAX_NAMED = 20
"""Maximum number of layers in a warning per reason; ``session.layers`` lists all."""


@dataclass(frozen=True)
class DebugForward:
    """A forward that is about to take the debug path.

    Attributes:
        quantizers: the quantizers of all of its layers in a row.
        has_quantized_input: whether its input is already quantized.
    """

    module: Any
    quantizers: Sequence[Any]
    has_quantized_input: bool


def _never(*_: Any) -> bool:
    return False


@dataclass(frozen=True)
class DebugRefusal:
    """A row of the table.

    Attributes:
        what: the refused option, by its name in TE.
        why: the effect in debug mode.
        applies_to_module: whether the row applies to a module, before the first step.
        applies_to_effects: the same, given its features' effects on GEMMs.
        applies_to_forward: whether it applies to a forward about to take the debug path.
        lasts: whether it applies to all later forwards, and to forwards without active features.
    """

    what: str
    why: str
    applies_to_module: Callable[[Any], bool] = _never
    applies_to_effects: Callable[[Any, Collection[Effect]], bool] = _never
    applies_to_forward: Callable[[DebugForward], bool] = _never
    lasts: bool = False

    def __str__(self) -> str:
        return f"{self.what}: {self.why}"


def _changes_quantized_weights(module: torch.nn.Module, effects: Collection[Effect]) -> bool:
    gemms: set[str] = set()
    for effect in effects:
        gemms.update(effect.high_precision)
        gemms.update(gemm for gemm, tensor in effect.modifies if tensor == "weight")
    return not gemms.isdisjoint(("fprop", "dgrad")) and has_quantized_weights(module)


def _changes_quantized_weights_now(forward: DebugForward) -> bool:
    """Return whether a GEMM that reads a quantized weight does not get the recipe's quantized result."""
    plans: set[str] = set()
    for quantizer in forward.quantizers:
        if quantizer.tensor_name == "weight" and quantizer.parent_quantizer is not None:
            plans |= {quantizer.rowwise_tensor_plan, quantizer.columnwise_tensor_plan}
    return not plans <= {debug_quantization.STANDARD_QUANTIZE} and has_quantized_weights(forward.module)


def _mixes_quantized_input(forward: DebugForward) -> bool:
    if not forward.has_quantized_input:
        return False
    plans: dict[str, str] = {}
    for quantizer in forward.quantizers:
        if quantizer.tensor_name in ("weight", "gradient"):
            plans[quantizer.rowwise_gemm_name] = quantizer.rowwise_tensor_plan
            plans[quantizer.columnwise_gemm_name] = quantizer.columnwise_tensor_plan
    return {plans["fprop"], plans["wgrad"]} != {debug_quantization.STANDARD_QUANTIZE}


# debug.pytorch.debug_quantization:DebugQuantizedTensor.quantize_
CUDA_GRAPH = DebugRefusal(
    "CUDA graph",
    "a graph replay runs no Python, so no feature is called, and cached weights cannot be updated in debug mode",
    applies_to_forward=lambda forward: is_captured(),
    lasts=True,
)
# pytorch.module.linear:Linear._compile_eager_fallback_reason
COMPILED = DebugRefusal(
    "torch.compile",
    "te.Linear is one operator of the compiled graph (torch 2.14 and newer), so features that change precision cannot"
    " act on it; train without torch.compile",
)
REFUSALS = (
    # pytorch.module.base:TransformerEngineBaseModule.is_debug_iter
    DebugRefusal(
        "delay_wgrad_compute",
        "the wgrad GEMM runs after the backward, which debug mode does not support",
        applies_to_module=lambda module: module.wgrad_store is not None and module.wgrad_store.delay_wgrad_compute(),
    ),
    # pytorch.module.grouped_linear:GroupedLinear.forward
    DebugRefusal(
        "single_grouped_weight or single_grouped_bias",
        "the debug path needs separate parameters for each GEMM",
        applies_to_module=lambda module: any(
            getattr(module, name, False) for name in ("single_grouped_weight", "single_grouped_bias")
        ),
    ),
    CUDA_GRAPH,
    # debug.pytorch.debug_quantization:DebugQuantizer.wrap_quantized_tensor
    DebugRefusal(
        "quantized_model_init",
        "the weight exists only in quantized form, so no feature can replace it or run fprop or dgrad in high"
        " precision",
        applies_to_effects=_changes_quantized_weights,
        applies_to_forward=_changes_quantized_weights_now,
    ),
    # debug.pytorch.debug_quantization:DebugQuantizer.process_gemm_output
    DebugRefusal(
        "fp8_output or fp8_grad",
        "debug mode does not support GEMMs with a quantized result, which fp8_dpa, fp8_mha and FP8 Userbuffers also"
        " need",
        applies_to_forward=lambda forward: any(
            quantizer.output_tensor and quantizer.parent_quantizer is not None for quantizer in forward.quantizers
        ),
    ),
    # pytorch.module.linear:_linear_forward_impl
    DebugRefusal(
        "quantized input",
        "features do not get an input from fp8_output or FP8 attention, so they cannot change the other operand of"
        " its GEMM",
        applies_to_forward=_mixes_quantized_input,
    ),
    # debug.pytorch.debug_quantization:DebugQuantizer.calibrate
    DebugRefusal(
        "autocast with calibrating=True",
        "debug mode does not support calibration",
        applies_to_forward=lambda forward: forward.module.fp8_calibration and not forward.module.fp8,
    ),
    # pytorch.cpu_offload:get_cpu_offload_context
    DebugRefusal(
        "get_cpu_offload_context",
        "debug mode does not support offloading of activations",
        applies_to_forward=lambda forward: offloads_activations(),
    ),
)
"""The table of refusals. A layer's reason is the first row that applies."""


class RefusedLayers:
    """Refused layers of a session, with reasons.

    Attributes:
        modules: modules that must never take the debug path, by id.
        in_graphs: modules in CUDA graphs that cannot be bypassed, by id.
        acting: id of a module -> its layers with features.
    """

    def __init__(self, *, strict: bool) -> None:
        self.modules: Mapping[int, DebugRefusal] = {}
        self.in_graphs: dict[int, torch.nn.Module] = {}
        self.strict = strict
        self._refused: dict[str, dict[DebugRefusal, None]] = {}
        self.acting: dict[int, list[str]] = {}
        self._notices = Notices()

    def leave(
        self,
        plan: Plan,
        model: Model,
        modules: Sequence[NamedModule],
        effects: Mapping[str, Collection[Effect]],
        fused: Collection[int],
    ) -> Plan:
        """Apply the table before a step, and return the plan without refused layers.

        Args:
            fused: ids of modules on their fused path, where only CUDA graphs are refused.

        Raises:
            ObservationError: with ``strict=True``, if a layer is refused.
        """
        planned = {entry.layer.name: entry for entry in plan.layers}
        graphed = _modules_in_graphs(model)
        refusals_by_module: dict[int, DebugRefusal] = {}
        new_refusals: dict[str, DebugRefusal] = {}
        acting: dict[int, list[str]] = {id(named.module): [] for named in modules}
        for named in modules:
            module = named.module
            refusal = graphed.get(id(module))
            if id(module) not in fused:
                refusal = next((row for row in REFUSALS if row.applies_to_module(module)), refusal)
            if refusal is not None:
                refusals_by_module[id(module)] = refusal
                self._note_graph(module, refusal)
            for layer in named.names:
                if layer not in planned:
                    continue
                layer_effects = [effect for section in planned[layer].sections for effect in effects[section]]
                first = next((row for row in REFUSALS if row.applies_to_effects(module, layer_effects)), None)
                layer_refusal = refusal or first
                if layer_refusal is not None:
                    new_refusals[layer] = layer_refusal
                elif planned[layer].features:
                    acting[id(module)].append(layer)
        if self.strict and new_refusals:
            raise _error(new_refusals)
        self.modules = refusals_by_module
        self.acting = acting
        for layer, refusal in new_refusals.items():
            self._refused.setdefault(layer, {})[refusal] = None
        return replace(plan, layers=tuple(entry for entry in plan.layers if entry.layer.name not in new_refusals))

    def note(self, module: torch.nn.Module, refusal: DebugRefusal) -> None:
        self._note_graph(module, refusal)
        refused = dict.fromkeys(self.acting.get(id(module), ()), refusal)
        if self.strict and refused:
            raise _error(refused)
        for layer in refused:
            self._refused.setdefault(layer, {})[refusal] = None

    def _note_graph(self, module: torch.nn.Module, refusal: DebugRefusal) -> None:
        if refusal.what == CUDA_GRAPH.what:
            self.in_graphs[id(module)] = module

    def why(self, layer: str) -> str:
        return "; ".join(map(str, self._refused.get(layer, ())))

    def warn(self, log: Callable[[str], None]) -> bool:
        in_graphs: list[tuple[str, DebugRefusal]] = []
        outside_of_graphs: list[tuple[str, DebugRefusal]] = []
        for layer, refusals in self._refused.items():
            for refusal in refusals:
                if self._notices.first((layer, refusal)):
                    log(f"Layer {layer} stays on its fused path. {refusal}")
                    items = in_graphs if refusal.what == CUDA_GRAPH.what else outside_of_graphs
                    items.append((layer, refusal))
        if in_graphs:
            logger.warning(
                "These layers run in a CUDA graph that cannot be bypassed, so they are not observed and no feature"
                " acts on them: %s. Use make_graphed_callables, or capture after the steps to observe.",
                _format(in_graphs),
            )
        if outside_of_graphs:
            logger.warning(
                "Transformer Engine's debug path does not support these layers, so they are not observed and no"
                " feature acts on them: %s.",
                _format(outside_of_graphs),
            )
        return bool(in_graphs or outside_of_graphs)


def _error(refused: Mapping[str, DebugRefusal]) -> ObservationError:
    return ObservationError(
        "Transformer Engine's debug path does not support layers that the config selects:"
        f" {_format(refused.items())}. Remove the layers from the config, or train them without the unsupported"
        " option. Without strict=True they train unobserved."
    )


def refusal_of(forward: DebugForward) -> DebugRefusal | None:
    return next((row for row in REFUSALS if row.applies_to_forward(forward)), None)


def _format(refused: Iterable[tuple[str, DebugRefusal]]) -> str:
    by_reason = group_by_key((refusal, name) for name, refusal in refused)
    return "; ".join(f"{', '.join(first_of(names, MAX_NAMED))} ({refusal})" for refusal, names in by_reason.items())


def graph_refusal(why_not: str) -> DebugRefusal:
    return replace(CUDA_GRAPH, why=f"{CUDA_GRAPH.why}; {why_not}")


def _modules_in_graphs(model: Model) -> dict[int, DebugRefusal]:
    refusals: dict[int, DebugRefusal] = {}
    for module in modules_of(model):
        if why_not := why_not_bypassed(module):
            refusals.update(dict.fromkeys(map(id, module.modules()), graph_refusal(why_not)))
    return refusals
