"""Observes layers on Transformer Engine's fused path.

Transformer Engine calls features only on its debug path, which rounds some tensors differently. With
``observe="fused"`` or ``"auto"`` features receive the GEMMs' operands from the tap (``tap.py``), quantized and
unquantized, and training stays bit-identical.

Values that a fused norm or activation function writes only in the GEMM's format are recomputed (``tap_parts.py``).
``te/modules.py`` lists the available tensors. Read from Transformer Engine 2.20.2
(``pytorch/module``).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from te_precision_callbacks.base.counts import group_by_key, some_of
from te_precision_callbacks.base.errors import QuantizationError
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.numerics.layouts import PLAIN, has_scale, is_quantized
from te_precision_callbacks.base.vocabulary import RESULT, TENSORS, Observe
from te_precision_callbacks.config.checking import ReadOptions
from te_precision_callbacks.config.effects import NAMESPACE
from te_precision_callbacks.config.keys import Dumped, LoggedTensor
from te_precision_callbacks.config.levels import ObservingFeatureSchema
from te_precision_callbacks.config.planning import LayerPlan, Plan
from te_precision_callbacks.config.problems import ConfigError
from te_precision_callbacks.config.schemas import LogGemmError
from te_precision_callbacks.engine.engine import Prepared, PreparedGemm, StatisticsEngine
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent, Watched
from te_precision_callbacks.layers.naming import NamedModule, modules_by_layer
from te_precision_callbacks.statistics.names import OWN_RECIPE
from te_precision_callbacks.statistics.schedule import EVERY_STEP, Schedule
from te_precision_callbacks.statistics.table import SCALE_SOURCES
from te_precision_callbacks.te import modules as te_modules

if TYPE_CHECKING:
    from te_precision_callbacks.features.base import Watcher

_OVERLAPPING = ("ub_overlap_ag", "ub_overlap_rs", "ub_bulk_dgrad", "ub_bulk_wgrad")


class NotFused(NamedTuple):
    """Reason why a module cannot be observed on its fused path; ``layer`` is empty for the whole module."""

    reason: str
    layer: str = ""

    def __str__(self) -> str:
        if self.layer:
            return f"{self.layer}: {self.reason}"
        return self.reason


def why_not_fused(
    named: NamedModule, planned: Mapping[str, LayerPlan], only_observes: Callable[[str], bool]
) -> NotFused | None:
    """Return why a module cannot be observed on its fused path; None if it can.

    ``planned`` has only layers with features.
    """
    module: Any = named.module
    if module.sequence_parallel:
        return NotFused("with sequence parallelism its GEMMs read tensors gathered from all ranks")
    if any(value for name, value in vars(module).items() if name.startswith(_OVERLAPPING)):
        return NotFused("communication overlaps with its GEMMs")
    grouped = ("use_grouped_tensor", "single_grouped_weight", "single_grouped_bias")
    if any(getattr(module, name, False) for name in grouped):
        return NotFused("the tensors of its experts are one grouped tensor")
    for layer, available in zip(named.names, te_modules.of(module).before_quantization(module), strict=True):
        entry = planned.get(layer)
        if entry is None:
            continue
        for name, options in entry.features.get(NAMESPACE, {}).items():
            if options.get("enabled", False):
                reason = _why_feature_not_fused(name, options, available, module, only_observes)
                if reason:
                    return NotFused(reason, layer)
    return None


def _why_feature_not_fused(
    name: str, options: Any, available: frozenset[str], module: Any, only_observes: Callable[[str], bool]
) -> str:
    schema = options.schema if isinstance(options, ReadOptions) else None
    if schema is None or (isinstance(schema, ObservingFeatureSchema) and not only_observes(name)):
        return f"Transformer Engine calls your own feature {name} only on its debug path"
    if isinstance(schema, LogGemmError):
        return ""  # statistics of unavailable tensors are skipped
    if not isinstance(schema, ObservingFeatureSchema):
        if EVERY_STEP in (schema.effect().schedules.values() or (EVERY_STEP,)):
            return f"{name} changes precision, which needs the debug path"
        return ""
    for target in schema.targets:
        tensor = str(target.tensor)
        item = target.options
        if tensor == "wgrad" and getattr(module, "fuse_wgrad_accumulation", False):
            return f"{name}: with fuse_wgrad_accumulation=True its wgrad exists only as part of a sum"
        if tensor in available:
            continue
        if isinstance(item, Dumped) and item.high_precision_tensor:
            return f"{name}: {_format_unavailable(tensor, module)}"
        if isinstance(item, LoggedTensor):
            for request in item.requests:
                if request.recipe != OWN_RECIPE or request.statistic.source not in SCALE_SOURCES:
                    return f"{name}: {_format_unavailable(tensor, module)}, which {request.label!r} needs"
    return ""


def _changed_steps(named: NamedModule, planned: Mapping[str, LayerPlan]) -> tuple[Schedule, ...]:
    changed: dict[Schedule, None] = {}
    for layer in named.names:
        if layer in planned:
            for options in planned[layer].features.get(NAMESPACE, {}).values():
                if isinstance(options, ReadOptions):
                    changed.update(dict.fromkeys(options.schema.effect().schedules.values()))
    return tuple(changed)


def _format_unavailable(tensor: str, module: Any) -> str:
    return f"{tensor} of {type(module).__name__} never exists in high precision on the fused path"


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
    watched = [named for named in modules if not planned.keys().isdisjoint(named.names)]
    why = [(named, why_not_fused(named, planned, only_observes)) for named in watched]
    refused = {named.name: reason for named, reason in why if reason is not None}
    if observe == "fused" and refused:
        reason = next(iter(refused.values()))
        raise ConfigError(
            f'observe="fused": {some_of(refused, 1)} cannot be observed on the fused path: {reason}. observe="auto"'
            " uses Transformer Engine's debug path for such layers."
        )
    return {id(named.module): _changed_steps(named, planned) for named, reason in why if reason is None}, refused


def format_paths(fused: int, not_fused: Mapping[str, NotFused]) -> str:
    text = f"{fused} of {fused + len(not_fused)} modules with features keep their fused path."
    if not not_fused:
        return text
    by_reason = group_by_key((why.reason, name) for name, why in not_fused.items())
    reasons = "; ".join(f"{some_of(names, 1)}: {reason}" for reason, names in by_reason.items())
    return f"{text} Transformer Engine's debug path runs {reasons}"


class _Due(NamedTuple):
    """Features that observe tensors in an iteration, shared by layers with the same options.

    Attributes:
        upcoming: the next iteration that must query features, if any.
        number: equal for equal watchers.
    """

    watchers: Mapping[str, Sequence[Watcher]]
    upcoming: int | None
    number: int = -1


_NOTHING_DUE = _Due({}, None)

_Watchers = tuple[tuple[str, tuple["Watcher", ...]], ...]
"""The tensors of a layer, with the features that may observe them."""


class FusedObservation:
    """Passes tensors from the tap to the features of layers on their fused path.

    A layer's features are looked up once, and queried once per iteration for all layers with the same options.

    Attributes:
        iteration: the debug iteration of the last query.
        due: layer -> the features that observe its tensors.
    """

    def __init__(self, engine: StatisticsEngine, report: Report) -> None:
        self._engine = engine
        self._report = report
        self._api: Any = None
        self.iteration = -1
        self._modules: dict[str, Any] = {}
        self._watchers: dict[str, _Watchers] = {}
        self._shared: dict[tuple[object, ...], _Watchers] = {}
        self._due_of_watchers: dict[int, _Due] = {}
        self._answers: dict[int, tuple[bool, int | None]] = {}  # in this iteration, by what decides
        self.due: dict[str, _Due] = {}
        self._numbers: dict[tuple[object, ...], int] = {}
        self._needed: dict[tuple[int, ...], frozenset[tuple[int, str]]] = {}

    def watch(self, modules: Sequence[NamedModule]) -> None:
        self._modules = modules_by_layer(modules)
        for cache in (self._watchers, self._shared, self._due_of_watchers, self.due, self._numbers, self._needed):
            cache.clear()

    def query(self, layers: Sequence[str], iteration: int) -> tuple[frozenset[tuple[int, str]], list[int]]:
        """Query the tensors that a module's features observe, and the next iterations to query.

        Returns:
            The tensors, as (layer index, tensor name); and the iterations.
        """
        if iteration != self.iteration:
            import nvdlfw_inspect.api as debug_api

            self._api = debug_api.transformer_engine
            self.iteration = iteration
            self._due_of_watchers.clear()
            self._answers.clear()
        upcoming: list[int] = []
        numbers: list[int] = []
        for layer in layers:
            due = self._due_of_watchers.get(id(self._watchers.get(layer)))
            due = self._query_layer(layer, iteration) if due is None else due
            self.due[layer] = due
            numbers.append(due.number)
            if due.upcoming is not None:
                upcoming.append(due.upcoming)
        needed = self._needed.get(tuple(numbers))
        if needed is None:
            tensors: set[tuple[int, str]] = set()
            for index, layer in enumerate(layers):
                tensors.update((index, tensor) for tensor in self.due[layer].watchers)
            needed = frozenset(tensors)
            self._needed[tuple(numbers)] = needed
        return needed, upcoming

    def leave(self, layers: Sequence[str]) -> None:
        """Stop observing layers until the next query, since their module takes the debug path."""
        for layer in layers:
            self.due.pop(layer, None)

    def _query_layer(self, layer: str, iteration: int) -> _Due:
        watchers = self._watchers.get(layer)
        if watchers is None:
            try:
                of_tensors = tuple((tensor, self._api.watchers(layer, tensor)) for tensor in TENSORS)
            except Exception as error:
                self._report("finding what to observe of", layer, error)
                return _NOTHING_DUE
            key: list[object] = []
            for tensor, of_tensor in of_tensors:
                key += [tensor, *((watcher.name, id(watcher.options)) for watcher in of_tensor)]
            watchers = self._shared.setdefault(tuple(key), of_tensors)
            self._watchers[layer] = watchers
        answer = self._due_of_watchers.get(id(watchers))
        if answer is None:
            answer = self._query_watchers(watchers, iteration)
            same: list[object] = []
            for name, watching in answer.watchers.items():
                same += [name, *map(id, watching)]
            number = self._numbers.setdefault(tuple(same), len(self._numbers))
            answer = answer._replace(number=number)
            self._due_of_watchers[id(watchers)] = answer
        return answer

    def _query_watchers(self, watchers: _Watchers, iteration: int) -> _Due:
        due: dict[str, list[Watcher]] = {}
        upcoming: list[int] = []
        for tensor, of_tensor in watchers:
            for watcher in of_tensor:
                answer = self._answers.get(id(watcher.decides))
                if answer is None:
                    answer = watcher.feature.due(watcher.options, iteration)
                    self._answers[id(watcher.decides)] = answer
                is_wanted, next_iteration = answer
                if is_wanted:
                    due.setdefault(tensor, []).append(watcher)
                upcoming += [] if next_iteration is None else [next_iteration]
        return _Due(due, min(upcoming, default=None))

    def __call__(self, event: GemmEvent) -> None:
        due = self.due.get(event.layer)
        if due is None or not due.watchers or event.kind is not ForwardKind.OBSERVED:
            return
        for watched, watchers in self._watched(event, due):
            tensor = watched.tensor
            never_high = tensor == RESULT[event.gemm] and is_quantized(watched.values)
            for name, feature, options, _ in watchers:
                try:
                    if never_high:
                        raise QuantizationError(
                            "its GEMM writes it quantized (fp8_output, fp8_grad or FP8 attention), so the tensor"
                            " never exists in high precision"
                        )
                    feature.observe(options, watched)
                    self._api.note_once(name, (event.layer, "inspect_tensor", tensor, None))
                except Exception as error:
                    self._report("observing", f"{event.layer} {tensor}", error)
        try:
            self._engine.measure()
        except Exception as error:
            self._report("observing", f"{event.layer} {event.gemm}", error)

    def _watched(self, event: GemmEvent, due: _Due) -> Iterator[tuple[Watched, Sequence[Watcher]]]:
        module = self._modules[event.layer]
        group = te_modules.tensor_parallel_group(module)
        for tensor, high, given in _tensors(event):
            watchers = due.watchers.get(tensor)
            if watchers:
                quantizer = getattr(given, "_quantizer", None)
                yield Watched(event.layer, tensor, self.iteration, high, given, given, quantizer, group), watchers

    def prepare(self, event: GemmEvent) -> PreparedGemm | None:
        """Prepare to measure tensors like a GEMM's: at 0 operand A, at 1 B, at 2 the result.

        None if a feature does more than measure, or a statistic needs more than a pass over its tensor.
        """
        from te_precision_callbacks.features.base import StatisticsFeature

        due = self.due.get(event.layer)
        if due is None:
            return self._engine.prepare_gemm([])
        watching = itertools.chain.from_iterable(due.watchers.values())
        if any(type(feature).observe is not StatisticsFeature.observe for _, feature, _, _ in watching):
            return None
        places: dict[str, int] = {event.a.tensor: 0, event.b.tensor: 1}
        tensors: list[tuple[int, Prepared]] = []
        for watched, watchers in self._watched(event, due):
            requested = [options.requests_for(is_quantized=has_scale(watched.rowwise)) for _, _, options, _ in watchers]
            asked = [requests for requests in requested if requests]
            prepared = self._engine.prepare(watched, asked) if asked else None
            if prepared is not None:
                tensors.append((places.get(watched.tensor, 2), prepared))
            elif asked:
                return None
        return self._engine.prepare_gemm(tensors)


def _tensors(event: GemmEvent) -> Iterator[tuple[str, Any, Any]]:
    """Yield a GEMM's tensors by name, in high precision and as passed: operands in their first GEMM, and the result."""
    for operand in event.operands:
        if operand.first:
            plain = operand.high is None and type(operand.given) in PLAIN
            yield operand.tensor, operand.given if plain else operand.high, operand.given
    if event.out is not None:
        yield RESULT[event.gemm], event.out, None
