"""Conditions of DumpTensors: the statistics they read, and conditions that can never hold."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

from te_precision_callbacks.base.counts import group_by_key, some_of
from te_precision_callbacks.base.suggestions import suggestion
from te_precision_callbacks.base.vocabulary import RECIPES, RESULT, TENSORS
from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.conditions import ACTIVATION_OVERFLOW, Condition, EventCondition, Threshold
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.keys import LoggedTensor
from te_precision_callbacks.config.levels import FeatureSchema, Target, options_for
from te_precision_callbacks.config.problems import ConfigError, KeyPath
from te_precision_callbacks.config.schemas import (
    DumpTensors,
    LogGemmError,
    schema_of,
)
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.statistics.table import GEMM_SOURCES, GEMM_STATISTICS, STATISTICS

if TYPE_CHECKING:
    from te_precision_callbacks.config.planning import Plan, Section


def check_conditions(plan: Plan, sections: Iterable[Section], *, detects_overflow: bool) -> None:
    """Reject conditions of DumpTensors that can never hold.

    Raises:
        ConfigError: a statistic is not collected for the layer and tensor, or never in a step of DumpTensors; or
            activation overflow detection is off.
    """
    for hit, entries in group_by_key((entry.sections, entry) for entry in plan.layers).items():
        written = entries[0].features.get(NAMESPACE, {}).values()
        schemas = [options.schema for options in written if isinstance(options, ReadOptions)]
        layers = [entry.layer.name for entry in entries]
        targets: list[Target[Any]] = []
        for schema in schemas:
            if isinstance(schema, DumpTensors):
                targets += schema.every_target
        for target in sorted(targets, key=lambda target: TENSORS.index(str(target.tensor))):
            known = collected(schemas, str(target.tensor))
            for condition in target.options.when:
                if text := _never_holds(condition, target, known, layers, detects_overflow=detects_overflow):
                    acting = (section for section in sections if section.name in hit)
                    raise ConfigError(f"{next(_places(acting, target.nested.path('when')))}: {text}")


def _never_holds(
    condition: Condition,
    target: Target[Any],
    known: Mapping[str, Collected],
    layers: Sequence[str],
    *,
    detects_overflow: bool,
) -> str:
    if isinstance(condition, EventCondition):
        if condition is EventCondition.ACTIVATION_OVERFLOW and not detects_overflow:
            return no_detection()
        return ""
    statistic = collected_for(condition, known)
    if statistic is None:
        return missing_statistic(condition, known, layers, str(target.tensor))
    dumped = target.options.schedule
    if any(dumped.meets(schedule) for schedule in statistic.schedules):
        return ""
    due = " and ".join(dict.fromkeys(map(str, statistic.schedules)))
    return (
        f"the condition {str(condition)!r} of DumpTensors would never hold for {str(target.tensor)!r} in"
        f" {_format_layers(layers)}: the schedules share no step. DumpTensors acts in {dumped}, the statistic is"
        f" collected in {due}. Change one of the schedules ('freq', 'start_step', 'end_step', 'start_end_list')."
    )


def _places(sections: Iterable[Section], keys: KeyPath) -> Iterator[str]:
    for section in sections:
        for feature in section.features.get(NAMESPACE, {}):
            if schema_of(feature) is DumpTensors:
                yield section.place(NAMESPACE, feature, *keys)


def no_detection() -> str:
    return (
        f"the condition {ACTIVATION_OVERFLOW!r} of DumpTensors would never hold, because activation overflow"
        ' detection is off. Set debug="activation_overflow" in the session.'
    )


def missing_statistic(condition: Threshold, known: Mapping[str, Collected], layers: Sequence[str], tensor: str) -> str:
    """Message for a condition on a statistic that no feature collects; ``known`` are the tensor's statistics."""
    wanted = condition.statistic
    those = "those layers"
    if len(layers) == 1:
        those = "that layer"
    if wanted.statistic.source in GEMM_SOURCES:
        gemms = [gemm for gemm, result in RESULT.items() if result == tensor]
        return (
            f"the condition {str(condition)!r} of DumpTensors would never hold: LogGemmError does not measure the GEMM"
            f" of {tensor!r} in {_format_layers(layers)}. Add [{', '.join(gemms or RESULT)}] to the"
            f" 'gemms' of LogGemmError for {those}."
        )

    def is_same(request: Request) -> bool:
        return bool(request.recipe) and replace(request, label=wanted.label, recipe=OWN_RECIPE, e5m2=None) == wanted

    same = [label for label, statistic in known.items() if is_same(statistic.request)]
    hint = suggestion(wanted.label, list(known), known_as="Collected are")
    if same:
        hint = f" Did you mean {' or '.join(map(repr, same))}?"
    return (
        f"the condition {str(condition)!r} of DumpTensors would never hold: its statistic is not collected for"
        f" {tensor!r} in {_format_layers(layers)}. Add the statistic to 'stats' of LogTensorStats, LogFp8TensorStats or"
        f" LogNvfp4TensorStats for {those} and tensor.{hint}"
    )


def _format_layers(layers: Sequence[str]) -> str:
    if len(layers) == 1:
        return f"the layer {layers[0]!r}"
    return f"the layers {some_of(map(repr, layers))}"


@dataclass(frozen=True)
class Collected:
    """A collected statistic of a tensor.

    Attributes:
        labels: its possible names in the log. In a layer without a recipe, a statistic of the layer's own recipe is
            logged with the name of a simulated recipe as a prefix.
    """

    request: Request
    labels: tuple[str, ...]
    schedules: tuple[Schedule, ...]


def collected(features: Sequence[FeatureSchema], tensor: str) -> dict[str, Collected]:
    pairs: list[tuple[Request, Schedule]] = []
    for feature in features:
        for options in options_for(feature.targets, tensor, None):
            if isinstance(options, LoggedTensor):
                pairs += product(options.requests, [options.schedule])
    for feature in features:
        if isinstance(feature, LogGemmError):
            for target in feature.targets:
                if RESULT[target.options.gemm] == tensor:
                    schedule = target.options.schedule
                    pairs += [(Request(label, STATISTICS[label]), schedule) for label in GEMM_STATISTICS]
    known: dict[str, Collected] = {}
    labels = {request.label for request, _ in pairs}
    for request, schedule in pairs:
        label = request.label
        before = known.get(label) or Collected(request, (label, *_recipe_labels(request, labels)), ())
        known[label] = replace(before, schedules=(*before.schedules, schedule))
    return known


def _recipe_labels(request: Request, asked: Iterable[str]) -> Iterable[str]:
    """Return the labels of a request in a layer without a recipe, except labels that are requested separately."""
    if request.recipe != OWN_RECIPE:
        return []
    return [label for recipe in RECIPES if (label := request.under(recipe).label) not in asked]


def collected_for(condition: Threshold, known: Mapping[str, Collected]) -> Collected | None:
    matching = (statistic for statistic in known.values() if condition.reads(statistic.request))
    return known.get(condition.statistic.label) or next(matching, None)
