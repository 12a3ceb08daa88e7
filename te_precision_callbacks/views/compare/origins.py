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
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.departures import SeriesDeparture
from te_precision_callbacks.views.compare.result import Parting

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
    """The execution order of a model, from several runs; the first run with a layer determines its place.

    ``seen``: whether the order was recorded; otherwise layers are in the order of their first values.
    """

    def __init__(self, runs: Sequence[RecordedRun]) -> None:
        self._forward: dict[tuple[str, str], float] = {}
        self._backward: dict[tuple[str, str], float] = {}
        for row in itertools.chain(*(run.layers.to_pylist() for run in runs)):
            layer = (row["scope"] or "", row["layer"])
            if row["exec_fwd"] is not None:
                self._forward.setdefault(layer, row["exec_fwd"])
            if row["exec_bwd"] is not None:
                self._backward.setdefault(layer, row["exec_bwd"])
        self.seen = bool(self._forward)
        # Layers without a recorded place follow, in the order of the records.
        behind = max(self._forward.values(), default=-1.0) + 1
        for subject in itertools.chain(*(run.subjects for run in runs)):
            if subject.layer:
                self._forward.setdefault((subject.scope, subject.layer), behind + len(self._forward))

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


_Tensor = tuple[str, str, str, int | None]


def _tensor_of(subject: Subject) -> _Tensor:
    # Metrics of the trainer or of a custom feature have no source, so the statistic is part of the key.
    return subject.scope, subject.layer, subject.tensor or f"\0{subject.statistic}", subject.rank


def partings(departures: Iterable[SeriesDeparture], order: Order) -> list[Parting]:
    """Return the tensors that depart, by iteration, then by execution order."""
    tensors = group_by_key((_tensor_of(departed.subject), departed) for departed in departures)
    for group in tensors.values():
        group.sort(key=lambda departed: -departed.departure.strength)
    sources = _Sources(tensors, order)
    source_of = {tensor: sources.find(group) for tensor, group in tensors.items()}
    began = _first_iterations(tensors, source_of)
    ordered = sorted(tensors, key=lambda tensor: (began[tensor], order.place(tensors[tensor][0].subject)))
    return [_parting(tensors[tensor], source_of[tensor]) for tensor in ordered]


def _first_iterations(
    tensors: Mapping[_Tensor, Sequence[SeriesDeparture]], source_of: Mapping[_Tensor, SeriesDeparture | None]
) -> dict[_Tensor, int]:
    """The iteration of each tensor's first difference; a source is moved before the tensors that inherit from it.

    For example, a weight with values in every fifth step may seem to depart after the activations it affects.
    """
    began = {tensor: _first(group).departure.iteration for tensor, group in tensors.items()}
    for _ in range(_MOST_LINKS):
        previous = dict(began)
        for tensor, source in source_of.items():
            if source is not None:
                origin = _tensor_of(source.subject)
                began[origin] = min(began[origin], max(source.since, began[tensor]))
        if began == previous:
            break
    return began


def _first(group: Sequence[SeriesDeparture]) -> SeriesDeparture:
    return min(group, key=lambda departed: departed.departure.iteration)


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

    def __init__(self, tensors: Mapping[_Tensor, Sequence[SeriesDeparture]], order: Order) -> None:
        self._tensors = tensors
        self._order = order
        placed = [
            (self._place(departed, tensor), departed, tensor)
            for tensor in _THROUGH_LAYERS
            for departed in itertools.chain(*tensors.values())
            if departed.subject.tensor in _SOURCES[tensor]
        ]
        self._lines = group_by_key(
            ((tensor, departed.subject.rank, departed.subject.statistic), (place, departed))
            for place, departed, tensor in sorted(placed, key=itemgetter(0))
        )

    def find(self, group: Sequence[SeriesDeparture]) -> SeriesDeparture | None:
        """Find the source of a tensor's difference, by the strongest statistic that departs in a source too."""
        for departed in group:
            candidates = list(self._candidates(departed))
            own = departed.departure.difference
            for source in candidates:
                difference = source.departure.difference
                if difference * own > 0 and abs(difference) >= _SHARE * abs(own):
                    return source
            if candidates:
                break
        return None

    def _place(self, departed: SeriesDeparture, tensor: str) -> StepPlace:
        return self._order.place(departed.subject._replace(tensor=tensor))

    def _candidates(self, departed: SeriesDeparture) -> Iterator[SeriesDeparture]:
        """Yield differences of the same statistic at that time, of earlier layers, nearest first; for outputs and
        weights, of the same layer.
        """
        scope, layer, tensor, _, statistic, rank = departed.subject
        if tensor in _THROUGH_LAYERS:
            line = self._lines.get((tensor, rank, statistic), [])
            end = bisect_left(line, self._place(departed, tensor), key=itemgetter(0))
            sources = [source for _, source in reversed(line[:end])]
        else:
            names = [(scope, layer, source_tensor, rank) for source_tensor in _SOURCES.get(tensor, ())]
            in_layer = itertools.chain(*(self._tensors.get(name, ()) for name in names))
            sources = [source for source in in_layer if source.subject.statistic == statistic]
        for source in sources:
            if tensor == "weight":  # the optimizer has run between them
                existed = source.departure.iteration < departed.since
            else:
                existed = source.since <= departed.departure.iteration <= source.departure.until
            if existed:
                yield source
