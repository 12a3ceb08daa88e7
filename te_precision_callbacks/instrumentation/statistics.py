"""Collects statistics of GEMMs on Transformer Engine's fused path, by the features that are due.

A GEMM goes to the features as an event, and leaves a prepared launch under a key: the formats of its operands and of
its result, and the features. A later GEMM with this key, in this step or another, is measured by the same launch, into
the same slots, without an event.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import nvdlfw_inspect.api as debug_api

from te_precision_callbacks.base.errors import QuantizationError
from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.base.vocabulary import GEMM_OF_LAYOUT, OPERANDS, RESULT, TENSORS
from te_precision_callbacks.engine.engine import PreparedLaunch, Source, StatisticsEngine
from te_precision_callbacks.features.base import StatisticsFeature
from te_precision_callbacks.instrumentation.current_call import Forward
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent, GemmOperand, Watched
from te_precision_callbacks.layers.naming import NamedModule, modules_by_layer
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.tensors import FORM_READERS, form_of, is_quantized, quantizer_of, scaling_mode

if TYPE_CHECKING:
    from te_precision_callbacks.features.base import Watcher

Key: TypeAlias = tuple[object, ...]

_OPERANDS = {
    (gemm, index): ((index, tensors[1]), (index, tensors[0]))
    for gemm, tensors in OPERANDS.items()
    for index in range(2)
}
"""GEMM and index of its layer -> layer index and name of operands A and B."""


@dataclass(eq=False)
class Due:
    """The features that observe a module's tensors in an iteration, shared by modules with the same options.

    Attributes:
        layers: of each layer: tensor -> features.
        tensors: the tensors, as (layer index, tensor name).
        only_measures: whether the features do nothing but request statistics.
    """

    layers: Sequence[Mapping[str, Sequence[Watcher]]]
    tensors: frozenset[tuple[int, str]]
    only_measures: bool


_NOTHING = Due((), frozenset(), True)


@dataclass(eq=False)
class _Observers:
    """The features that may observe the tensors of modules with the same options.

    Attributes:
        watchers: layer index, tensor, feature, and index of the decision whether it is due.
        decisions: the schedules.
        answer: of the last query: the features that are due, and the next iterations to query.
        combinations: decisions -> the features that are due.
    """

    layers: int
    watchers: Sequence[tuple[int, str, Watcher, int]]
    decisions: Sequence[Schedule]
    iteration: int = -1
    answer: tuple[Due, Sequence[int]] = (_NOTHING, ())
    combinations: dict[tuple[bool, ...], Due] = field(default_factory=dict)

    def query(self, iteration: int) -> None:
        answers = [schedule.at(iteration) for schedule in self.decisions]
        decided = tuple(is_due for is_due, _ in answers)
        if decided not in self.combinations:
            self.combinations[decided] = self._combine(decided)
        self.answer = self.combinations[decided], [upcoming for _, upcoming in answers if upcoming is not None]
        self.iteration = iteration

    def _combine(self, decided: Sequence[bool]) -> Due:
        layers: list[dict[str, list[Watcher]]] = [{} for _ in range(self.layers)]
        only_measures = True
        for index, tensor, watcher, decision in self.watchers:
            if decided[decision]:
                layers[index].setdefault(tensor, []).append(watcher)
                only_measures &= type(watcher.feature).observe is StatisticsFeature.observe
        tensors = frozenset((index, tensor) for index, layer in enumerate(layers) for tensor in layer)
        return Due(layers, tensors, only_measures)


class StatisticsConsumer:
    """Passes tensors from the tap to the features of layers on their fused path, or to a prepared launch.

    Attributes:
        repeated: number of GEMMs measured by a prepared launch.
        prepared: key of a GEMM -> the launch, and the place of each of its tensors: 0 for operand A, 1 for B, 2 for the
            result.
    """

    def __init__(self, engine: StatisticsEngine, report: Report) -> None:
        self._engine = engine
        self._report = report
        self._api: Any = None
        self._iteration = -1
        self._modules: dict[str, Any] = {}
        self._observers: dict[tuple[str, ...], _Observers] = {}
        self._of_options: dict[Key, _Observers] = {}
        self.prepared: dict[Key, tuple[PreparedLaunch, Sequence[int]]] = {}
        self.repeated = 0

    def watch(self, modules: Sequence[NamedModule]) -> None:
        self._modules = modules_by_layer(modules)
        self._observers.clear()
        self._of_options.clear()
        self.prepared.clear()

    def query(self, layers: tuple[str, ...], iteration: int) -> tuple[Due, Sequence[int]]:
        """Return the features that observe a module's tensors, and the next iterations to query."""
        observers = self._observers.get(layers)
        if observers is None:
            observers = self._find(layers)
            self._observers[layers] = observers
        if observers.iteration != iteration:
            observers.query(iteration)
        self._iteration = iteration
        return observers.answer

    def _find(self, layers: Sequence[str]) -> _Observers:
        self._api = debug_api.transformer_engine
        decisions: dict[Schedule, int] = {}
        watchers: list[tuple[int, str, Watcher, int]] = []
        for index, layer in enumerate(layers):
            try:
                by_tensor = [(tensor, self._api.watchers(layer, tensor)) for tensor in TENSORS]
            except Exception as error:
                self._report("finding what to observe of", layer, error)
                continue
            for tensor, tensor_watchers in by_tensor:
                for watcher in tensor_watchers:
                    decision = decisions.setdefault(watcher.schedule, len(decisions))
                    watchers.append((index, tensor, watcher, decision))
        options = [(index, tensor, watcher.name, id(watcher.options)) for index, tensor, watcher, _ in watchers]
        return self._of_options.setdefault((len(layers), *options), _Observers(len(layers), watchers, list(decisions)))

    def repeat(
        self, forward: Forward, position: int, operands: Sequence[Any], keywords: Mapping[str, Any], result: Any
    ) -> Key | None:
        """Measure a GEMM by a prepared launch; return the key of a GEMM that needs an event.

        Args:
            position: :attr:`Forward.position` before the GEMM.
        """
        gemm = GEMM_OF_LAYOUT[keywords.get("layout", "TN")]
        if forward.kind is not ForwardKind.OBSERVED or (position == 2 and gemm == "fprop"):  # recomputed
            return ()
        index = 0 if forward.order is None else forward.position
        tensors = _OPERANDS[gemm, index]
        read = forward.read
        high = forward.high or {}
        out = result[0]
        key: Key = forward.layers[index], gemm, forward.due, type(out), getattr(out, "dtype", None)
        sources: list[Source] = []
        for operand, tensor in zip(operands, tensors, strict=True):
            kind = type(operand)
            values = high.get(tensor)
            read_form = FORM_READERS.get(kind, form_of)  # mostly no Python function
            key += read_form(operand), tensor in read, None if values is None else values.dtype
            sources.append((operand if values is None else values, operand, operand))
        prepared = self.prepared.get(key)
        if prepared is None:
            return key
        launch, source_numbers = prepared
        if source_numbers:
            sources.append((out, None, None))
            observed = list(map(sources.__getitem__, source_numbers))  # a comprehension would call a Python function
            try:
                is_measured = self._engine.repeat(launch, observed, self._iteration)
            except Exception as error:
                self._report("observing", f"{forward.layers[index]} {gemm}", error)
                is_measured = True
            if not is_measured:
                return key
        self.repeated += 1
        for tensor in tensors:
            read.add(tensor)
            high.pop(tensor, None)
        return None

    def __call__(self, event: GemmEvent) -> None:
        if event.kind is not ForwardKind.OBSERVED or (not event.watchers and not event.key):
            return
        has_failed = False
        for watched, watchers in self._watched(event):
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
                    has_failed = True
                    self._report("observing", f"{event.layer} {tensor}", error)
        try:
            launch = self._engine.measure()
        except Exception as error:
            self._report("observing", f"{event.layer} {event.gemm}", error)
            return
        if event.key and launch is not None and not has_failed and all(map(_has_known_format, event.operands)):
            source_numbers: dict[str, int] = {event.a.tensor: 0, event.b.tensor: 1}
            self.prepared[event.key] = launch, [source_numbers.get(plan.tensor, 2) for plan in launch.tensors]

    def _watched(self, event: GemmEvent) -> Iterator[tuple[Watched, Sequence[Watcher]]]:
        """Yield the tensors of a GEMM with their features: operands in their first GEMM, and the result."""
        tensors: list[tuple[str, Any, Any]] = []
        for operand in event.operands:
            if operand.first:
                plain = operand.high is None and type(operand.given) in PLAIN
                tensors.append((operand.tensor, operand.given if plain else operand.high, operand.given))
        if event.out is not None:
            tensors.append((RESULT[event.gemm], event.out, None))
        for tensor, high, value in tensors:
            watchers = event.watchers.get(tensor)
            if watchers:
                group = te_modules.tensor_parallel_group(self._modules[event.layer])
                quantizer = quantizer_of(value)
                yield Watched(event.layer, tensor, self._iteration, high, value, value, quantizer, group), watchers


def _has_known_format(operand: GemmOperand) -> bool:
    tensor = operand.given
    return type(tensor) in PLAIN or (scaling_mode(tensor) is not None and not getattr(tensor, "custom", False))
