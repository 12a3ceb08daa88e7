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

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.departures import SeriesDeparture
from te_precision_callbacks.views.compare.result import Parting

Layer = tuple[str, str]

_IN_FORWARD = {"activation": 0, "weight": 1, "output": 2}
_IN_BACKWARD = {"gradient": 0, "dgrad": 1, "wgrad": 2}

FORWARD = 0
BACKWARD = 1
AFTERWARDS = 2


class StepPlace(NamedTuple):
    phase: int
    stage: int
    layer: float
    tensor: int


class Order:
    """The execution order of a model, from several runs; the first run with a layer determines its place.

    ``seen``: whether the order was recorded; otherwise layers are in the order of their first values.
    """

    def __init__(self, runs: Iterable[RecordedRun]) -> None:
        self._forward: dict[Layer, float] = {}
        self._backward: dict[Layer, float] = {}
        runs = list(runs)
        for run in runs:
            for row in run.layers.to_pylist():
                layer = row["scope"] or "", row["layer"]
                if row["exec_fwd"] is not None:
                    self._forward.setdefault(layer, row["exec_fwd"])
                if row["exec_bwd"] is not None:
                    self._backward.setdefault(layer, row["exec_bwd"])
        self.seen = bool(self._forward)
        # Layers without a recorded place follow, in the order of the records.
        behind = max(self._forward.values(), default=-1.0) + 1
        for run in runs:
            for subject in run.subjects:
                if subject.layer:
                    self._forward.setdefault((subject.scope, subject.layer), behind + len(self._forward))

    def place(self, subject: Subject) -> StepPlace:
        layer = (subject.scope, subject.layer)
        stage = _stage(subject.scope)
        if subject.tensor in _IN_FORWARD:
            return StepPlace(FORWARD, stage, self._forward.get(layer, math.inf), _IN_FORWARD[subject.tensor])
        if subject.tensor in _IN_BACKWARD:
            backward = self._backward.get(layer, -self._forward.get(layer, -math.inf))
            return StepPlace(BACKWARD, -stage, backward, _IN_BACKWARD[subject.tensor])
        return StepPlace(AFTERWARDS, 0, self._forward.get(layer, math.inf), 0)


def _stage(scope: str) -> int:
    """The place of a pipeline stage in the forward: all stages run their first chunk, then all their second chunk."""
    numbers = dict(re.findall(r"(?:^|\.)(vpp|pp)(\d+)(?=\.|$)", scope))
    return int(numbers.get("vpp", 0)) * 1_000_000 + int(numbers.get("pp", 0))


_SHARE = 0.75
"""The minimum ratio of a source's difference to an inherited difference."""

_SOURCES: Mapping[str, tuple[str, ...]] = {
    "activation": ("activation", "weight", "output"),
    "gradient": ("gradient", "weight", "dgrad"),
    "output": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient", "activation"),
    "weight": ("wgrad", "gradient"),
}

_MOST_LINKS = 10
"""The maximum length of a chain of sources to correct, if sources have rarer values than inheriting tensors."""

_IN_ORDER = ("activation", "gradient")

_Key = tuple[str, str, str, int | None]


def partings(departures: Iterable[SeriesDeparture], order: Order) -> list[Parting]:
    tensors: dict[_Key, list[SeriesDeparture]] = {}
    for departed in departures:
        tensors.setdefault(_key(departed.subject), []).append(departed)
    for group in tensors.values():
        group.sort(key=lambda departed: -departed.departure.strength)
    sources = _Sources(tensors, order)
    source_of = {key: sources.find(group) for key, group in tensors.items()}
    began = _first_iterations(tensors, source_of)
    ordered = sorted(tensors, key=lambda key: (began[key], order.place(tensors[key][0].subject)))
    return [_parting(tensors[key], source_of[key]) for key in ordered]


def _first_iterations(
    tensors: Mapping[_Key, Sequence[SeriesDeparture]], source_of: Mapping[_Key, SeriesDeparture | None]
) -> dict[_Key, int]:
    """The iteration of each tensor's first difference; a source is moved before the tensors that inherit from it.

    For example, a weight with values in every fifth step may seem to depart after the activations it affects.
    """
    began = {key: _first(group).departure.iteration for key, group in tensors.items()}
    for _ in range(_MOST_LINKS):
        before = dict(began)
        for key, source in source_of.items():
            if source is not None:
                of = _key(source.subject)
                began[of] = min(began[of], max(source.since, began[key]))
        if began == before:
            break
    return began


def _first(group: Sequence[SeriesDeparture]) -> SeriesDeparture:
    return min(group, key=lambda departed: departed.departure.iteration)


def _key(subject: Subject) -> _Key:
    # Metrics of the trainer or of a custom feature have no source, so the statistic is part of the key.
    return subject.scope, subject.layer, subject.tensor or f"\0{subject.statistic}", subject.rank


def _parting(group: Sequence[SeriesDeparture], source: SeriesDeparture | None) -> Parting:
    subject = group[0].subject
    first = _first(group)
    return Parting(
        subject.scope,
        subject.layer,
        subject.tensor,
        subject.rank,
        first.departure.iteration,
        first.since,
        tuple(departed.departure for departed in group),
        "made here" if source is None else "inherited",
        "" if source is None else f"{source.subject.layer} {source.subject.tensor}",
    )


class _Sources:
    """Finds where a difference between two runs comes from: an earlier tensor that differs first."""

    def __init__(self, tensors: Mapping[_Key, Sequence[SeriesDeparture]], order: Order) -> None:
        self._by_key = tensors
        self._order = order
        self._lines: dict[tuple[str, int | None, str], list[tuple[StepPlace, SeriesDeparture]]] = {}
        every = list(itertools.chain.from_iterable(tensors.values()))
        for tensor in _IN_ORDER:
            placed = []
            for departed in every:
                if departed.subject.tensor in _SOURCES[tensor]:
                    place = self._place(departed, tensor)
                    placed.append((place, departed))
            for place, departed in sorted(placed, key=itemgetter(0)):
                line = tensor, departed.subject.rank, departed.subject.statistic
                self._lines.setdefault(line, []).append((place, departed))

    def find(self, group: Sequence[SeriesDeparture]) -> SeriesDeparture | None:
        """Find the source of a tensor's difference, by the strongest statistic that departs in a source too."""
        for departed in group:
            own = departed.departure.difference
            has_any = False
            for source in self._candidates(departed):
                theirs = source.departure.difference
                has_any = True
                if theirs * own > 0 and abs(theirs) >= _SHARE * abs(own):
                    return source
            if has_any:
                break
        return None

    def _place(self, departed: SeriesDeparture, tensor: str) -> StepPlace:
        return self._order.place(departed.subject._replace(tensor=tensor))

    def _candidates(self, departed: SeriesDeparture) -> Iterator[SeriesDeparture]:
        """Yield differences of the same statistic at that time, of earlier layers, nearest first; for outputs and
        weights, of the same layer.
        """
        subject = departed.subject
        at = departed.departure.iteration
        if subject.tensor in _IN_ORDER:
            line = self._lines.get((subject.tensor, subject.rank, subject.statistic), [])
            before = bisect_left(line, self._place(departed, subject.tensor), key=itemgetter(0))
            sources = [source for _, source in reversed(line[:before])]
        else:
            sources = []
            for tensor in _SOURCES.get(subject.tensor, ()):
                of_tensor = self._by_key.get((subject.scope, subject.layer, tensor, subject.rank), ())
                sources += [source for source in of_tensor if source.subject.statistic == subject.statistic]
        for source in sources:
            if subject.tensor == "weight":  # the optimizer has run between them
                existed = source.departure.iteration < departed.since
            else:
                existed = source.since <= at <= source.departure.until
            if existed:
                yield source
