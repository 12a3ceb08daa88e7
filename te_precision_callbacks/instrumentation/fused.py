"""Observes layers on Transformer Engine's fused path.

Transformer Engine calls features only on its debug path, which rounds some tensors differently. With
``observe="fused"`` or ``"auto"`` features receive the GEMMs' operands from the tap (``tap.py``), quantized and
unquantized, and training stays bit-identical.

Values that a fused norm or activation function writes only in the GEMM's format are recomputed (``tap_parts.py``).
``te/modules.py`` lists the available tensors. Read from Transformer Engine 2.20.2
(``pytorch/module``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from te_precision_callbacks.base.counts import group_by_key, some_of
from te_precision_callbacks.base.vocabulary import Observe
from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.keys import Dumped, LoggedTensor
from te_precision_callbacks.config.levels import ObservingFeatureSchema
from te_precision_callbacks.config.planning import LayerPlan, Plan
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.config.schemas import LogGemmError
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.statistics.names import OWN_RECIPE
from te_precision_callbacks.statistics.schedule import EVERY_STEP, Schedule
from te_precision_callbacks.statistics.table import SCALE_SOURCES
from te_precision_callbacks.te import modules as te_modules

_OVERLAPPING = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad")


class NotFused(NamedTuple):
    """Reason why a module cannot be observed on its fused path; ``layer`` is empty for the whole module."""

    reason: str
    layer: str = ""

    def __str__(self) -> str:
        if self.layer:
            return f"{self.layer}: {self.reason}"
        return self.reason


def _why_not_fused(
    named: NamedModule, planned: Mapping[str, LayerPlan], only_observes: Callable[[str], bool]
) -> Iterator[NotFused]:
    """Yield why a module cannot be observed on its fused path; ``planned`` has only layers with features."""
    module: Any = named.module
    if module.sequence_parallel:
        yield NotFused("with sequence parallelism its GEMMs read tensors gathered from all ranks")
    if any(value for name, value in vars(module).items() if name.startswith(_OVERLAPPING)):
        yield NotFused("communication overlaps with its GEMMs")
    grouped = ("use_grouped_tensor", "single_grouped_weight", "single_grouped_bias")
    if any(getattr(module, name, False) for name in grouped):
        yield NotFused("the tensors of its experts are one grouped tensor")
    for layer, available in zip(named.names, te_modules.of(module).before_quantization(module), strict=True):
        if layer in planned:
            for name, options in planned[layer].features.get(NAMESPACE, {}).items():
                if options.get("enabled", False):
                    for reason in _why_feature_not_fused(name, options, available, module, only_observes):
                        yield NotFused(reason, layer)


def _why_feature_not_fused(
    name: str, options: Any, available: frozenset[str], module: Any, only_observes: Callable[[str], bool]
) -> Iterator[str]:
    schema = options.schema if isinstance(options, ReadOptions) else None
    if schema is None or (isinstance(schema, ObservingFeatureSchema) and not only_observes(name)):
        yield f"Transformer Engine calls your own feature {name} only on its debug path"
    elif isinstance(schema, LogGemmError):
        return  # statistics of unavailable tensors are skipped
    elif not isinstance(schema, ObservingFeatureSchema):
        if EVERY_STEP in (schema.effect().schedules.values() or (EVERY_STEP,)):
            yield f"{name} changes precision, which needs the debug path"
    else:
        for target in schema.targets:
            tensor = str(target.tensor)
            item = target.options
            if tensor == "wgrad" and getattr(module, "fuse_wgrad_accumulation", False):
                yield f"{name}: with fuse_wgrad_accumulation=True its wgrad exists only as part of a sum"
            if tensor in available:
                continue
            why = f"{name}: {tensor} of {type(module).__name__} never exists in high precision on the fused path"
            if isinstance(item, Dumped) and item.high_precision_tensor:
                yield why
            if isinstance(item, LoggedTensor):
                for request in item.requests:
                    if request.recipe != OWN_RECIPE or request.statistic.source not in SCALE_SOURCES:
                        yield f"{why}, which {request.label!r} needs"


def _changed_steps(named: NamedModule, planned: Mapping[str, LayerPlan]) -> tuple[Schedule, ...]:
    changed: dict[Schedule, None] = {}
    for layer in named.names:
        if layer in planned:
            for options in planned[layer].features.get(NAMESPACE, {}).values():
                if isinstance(options, ReadOptions):
                    changed.update(dict.fromkeys(options.schema.effect().schedules.values()))
    return tuple(changed)


def choose(
    observe: Observe,
    modules: Sequence[NamedModule],
    plan: Plan,
    only_observes: Callable[[str], bool] = lambda name: True,
) -> tuple[dict[int, tuple[Schedule, ...]], dict[str, NotFused]]:
    """Choose the modules to observe on their fused path.

    Returns:
        Id of a chosen module -> steps on the debug path, since features change its precision; name of another module
        with features -> reason.

    Raises:
        ConfigError: with ``"fused"``, if a module with features cannot be observed on its fused path.
    """
    if observe == "debug":
        return {}, {}
    planned = {entry.layer.name: entry for entry in plan.layers}
    chosen: dict[int, tuple[Schedule, ...]] = {}
    refused: dict[str, NotFused] = {}
    for named in modules:
        if planned.keys().isdisjoint(named.names):
            continue
        reason = next(_why_not_fused(named, planned, only_observes), None)
        if reason is None:
            chosen[id(named.module)] = _changed_steps(named, planned)
        else:
            refused[named.name] = reason
    if observe == "fused" and refused:
        first = next(iter(refused.values()))
        raise ConfigError(
            f'observe="fused": {some_of(refused, 1)} cannot be observed on the fused path: {first}. observe="auto"'
            " uses Transformer Engine's debug path for such layers."
        )
    return chosen, refused


def format_paths(fused: int, not_fused: Mapping[str, NotFused]) -> str:
    text = f"{fused} of {fused + len(not_fused)} modules with features keep their fused path."
    if not not_fused:
        return text
    by_reason = group_by_key((why.reason, name) for name, why in not_fused.items())
    reasons = "; ".join(f"{some_of(names, 1)}: {reason}" for reason, names in by_reason.items())
    return f"{text} Transformer Engine's debug path runs {reasons}"
