"""Separates differences a layer introduces from those it inherits.

A tensor inherits a difference if one of its sources departed too: as early, in the same direction and by as much. The
sources of an activation are the activations, outputs and weights before it; of a gradient, the gradients and weights
that the backward has passed; of an output, the layer's activation and weight; of a weight, its gradients in earlier
steps. Records do not contain the connections of layers, so all earlier layers of the step are candidates. A step runs
the forwards, the backwards, then the optimizer and the trainer.
"""

from __future__ import annotations

import itertools
import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.recorded import sort_by_position
from te_precision_callbacks.runs.tables import Subject
from te_precision_callbacks.views.compare.result import Parting, StatisticDeparture

FORWARD = 0
BACKWARD = 1
AFTERWARDS = 2

_PHASES = {
    "activation": (FORWARD, 0),
    "weight": (FORWARD, 1),
    "output": (FORWARD, 2),
    "gradient": (BACKWARD, 0),
    "dgrad": (BACKWARD, 1),
    "wgrad": (BACKWARD, 2),
}
"""Tensor -> its phase of the step, and its place in the layer."""

_SOURCES: Mapping[str, tuple[str, ...]] = {
    "activation": ("activation", "weight", "output"),
    "gradient": ("gradient", "weight", "dgrad"),
    "output": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient", "activation"),
    "weight": ("wgrad", "gradient"),
}

_THROUGH_LAYERS = ("activation", "gradient")
"""The tensors whose sources are in earlier layers; those of all others are in the same layer."""

_SHARE = 0.75
"""The minimum ratio of a source's difference to an inherited difference."""

_MOST_LINKS = 10
"""The maximum length of a chain of sources to correct, if sources have rarer values than inheriting tensors."""


class StepPlace(NamedTuple):
    phase: int
    stage: int
    layer: float
    tensor: int


class Order:
    """The execution order of a model, from several runs.

    ``seen``: whether the order was recorded; otherwise layers are in the order of their first values.
    """

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self._backward: dict[tuple[str, str], float] = {}
        positions: list[tuple[tuple[str, str], float | None]] = []
        for row in itertools.chain(*(run.layers.to_pylist() for run in runs)):
            layer = (row["scope"] or "", row["layer"])
            positions.append((layer, row["exec_fwd"]))
            if row["exec_bwd"] is not None:
                self._backward.setdefault(layer, row["exec_bwd"])
        self.seen = any(position is not None for _, position in positions)
        positions += [((subject.scope, subject.layer), None) for run in runs for subject in run.subjects]
        self._forward = {layer: position for position, layer in enumerate(sort_by_position(positions))}

    def place(self, subject: Subject) -> StepPlace:
        layer = (subject.scope, subject.layer)
        phase, tensor = _PHASES.get(subject.tensor, (AFTERWARDS, 0))
        forward = self._forward.get(layer, math.inf)
        if phase == BACKWARD:
            return StepPlace(phase, -_stage(subject.scope), self._backward.get(layer, -forward), tensor)
        return StepPlace(phase, _stage(subject.scope), forward, tensor)


def _stage(scope: str) -> int:
    """The place of a pipeline stage in the forward: all stages run their first chunk, then all their second chunk."""
    numbers = dict(re.findall(r"(?:^|\.)(vpp|pp)(\d+)(?=\.|$)", scope))
    return int(numbers.get("vpp", 0)) * 1_000_000 + int(numbers.get("pp", 0))


def partings(departures: Iterable[tuple[Subject, StatisticDeparture]], order: Order) -> list[Parting]:
    """Return the tensors that depart, by iteration, then by execution order."""
    # Metrics of the trainer or of a custom feature have no source, so the statistic is part of the key.
    tensors = group_by_key(
        (subject._replace(gemm="", statistic="" if subject.tensor else subject.statistic), departure)
        for subject, departure in departures
    )
    for group in tensors.values():
        group.sort(key=lambda departure: -departure.strength)
    sources = _Sources(tensors, order)
    source_of = {tensor: sources.find(tensor) for tensor in tensors}
    began = {tensor: _first(group).iteration for tensor, group in tensors.items()}
    # A source is moved before the tensors that inherit from it: a weight with values in every fifth step may seem to
    # depart after the activations that it affects.
    for _ in range(_MOST_LINKS):
        for tensor, source in source_of.items():
            if source is not None:
                began[source.tensor] = min(began[source.tensor], max(source.departure.since, began[tensor]))
    parted = []
    for tensor in sorted(tensors, key=lambda tensor: (began[tensor], order.place(tensor))):
        first = _first(tensors[tensor])
        source = source_of[tensor]
        parting = Parting(
            tensor.scope,
            tensor.layer,
            tensor.tensor,
            tensor.rank,
            first.iteration,
            first.since,
            tuple(tensors[tensor]),
            "made here" if source is None else "inherited",
            "" if source is None else f"{source.tensor.layer} {source.tensor.tensor}",
        )
        parted.append(parting)
    return parted


def _first(group: Sequence[StatisticDeparture]) -> StatisticDeparture:
    return min(group, key=lambda departure: departure.iteration)


class _Source(NamedTuple):
    tensor: Subject
    departure: StatisticDeparture


class _Sources:
    """Finds where a difference between two runs comes from: an earlier tensor that differs first."""

    def __init__(self, tensors: Mapping[Subject, Sequence[StatisticDeparture]], order: Order) -> None:
        self._tensors = tensors
        self._order = order
        # What the activations and gradients of later layers inherit from, by rank and statistic.
        self._lines: dict[tuple[str, int | None, str], list[tuple[StepPlace, _Source]]] = {}
        for kind in _THROUGH_LAYERS:
            for tensor in tensors:
                if tensor.tensor in _SOURCES[kind]:
                    position = order.place(tensor._replace(tensor=kind))
                    for departure in tensors[tensor]:
                        line = self._lines.setdefault((kind, tensor.rank, departure.statistic), [])
                        line.append((position, _Source(tensor, departure)))
        for line in self._lines.values():
            line.sort(key=itemgetter(0))

    def find(self, tensor: Subject) -> _Source | None:
        """Find the source of a tensor's difference, by the strongest statistic that departs in a source too."""
        for departure in self._tensors[tensor]:
            has_candidate = False
            for source in self._candidates(tensor, departure):
                other = source.departure
                if tensor.tensor == "weight":  # the optimizer has run between them
                    existed = other.iteration < departure.since
                else:
                    existed = other.since <= departure.iteration <= other.until
                same_sign = other.difference * departure.difference > 0
                if existed and same_sign and abs(other.difference) >= _SHARE * abs(departure.difference):
                    return source
                has_candidate |= existed
            if has_candidate:
                break
        return None

    def _candidates(self, tensor: Subject, departure: StatisticDeparture) -> Iterator[_Source]:
        """Yield differences of the same statistic, of earlier layers, nearest first; for outputs and weights, of the
        same layer.
        """
        if tensor.tensor in _THROUGH_LAYERS:
            line = self._lines.get((tensor.tensor, tensor.rank, departure.statistic), [])
            for number in reversed(range(bisect_left(line, self._order.place(tensor), key=itemgetter(0)))):
                yield line[number][1]
            return
        for kind in _SOURCES.get(tensor.tensor, ()):
            source = tensor._replace(tensor=kind)
            for other in self._tensors.get(source, ()):
                if other.statistic == departure.statistic:
                    yield _Source(source, other)
