"""Separates differences a layer introduces from those it inherits.

A tensor inherits a difference if one of its sources has departed too, as early, in the same direction and by as much.
The sources of an activation are the activations, outputs and weights before it; of a gradient the gradients and weights
that the backward has passed; of an output the layer's activation and weight; of a weight, in later steps, its
gradients. The records do not have the connections of layers: all earlier layers of the step count, in the order of a
step: the forwards of layers, their backwards, then the optimizer and the trainer.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.departures import Found
from te_precision_callbacks.views.compare.result import Parting

Layer = tuple[str, str]

_IN_FORWARD = {"activation": 0, "weight": 1, "output": 2}
_IN_BACKWARD = {"gradient": 0, "dgrad": 1, "wgrad": 2}

FORWARD, BACKWARD, AFTERWARDS = 0, 1, 2


class StepPlace(NamedTuple):
    phase: int
    stage: int
    layer: float
    tensor: int


class Order:
    """The order of execution of some runs of one model; the first run with a layer decides about its place.

    ``seen``: the order was recorded; otherwise layers are in the order of their first values.
    """

    def __init__(self, runs: Iterable[RecordedRun]) -> None:
        self._forward: dict[Layer, float] = {}
        self._backward: dict[Layer, float] = {}
        runs = list(runs)
        for run in runs:
            columns = (run.layers[name].to_pylist() for name in ("scope", "layer", "exec_fwd", "exec_bwd"))
            for scope, layer, forward, backward in zip(*columns, strict=True):
                if forward is not None:
                    self._forward.setdefault((scope or "", layer), forward)
                if backward is not None:
                    self._backward.setdefault((scope or "", layer), backward)
        self.seen = bool(self._forward)
        # Behind those that were seen come the others, as they come first in the records.
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
    """The turn of a pipeline stage in the forward: all stages run their first chunk, then their second one."""
    numbers = {name: int(number) for name, number in re.findall(r"(?:^|\.)(vpp|pp)(\d+)(?=\.|$)", scope)}
    return numbers.get("vpp", 0) * 1_000_000 + numbers.get("pp", 0)


_SHARE = 0.75
"""A tensor that has departed by this share of another one's difference accounts for it."""

_MADE_OF: Mapping[str, tuple[str, ...]] = {
    "activation": ("activation", "weight", "output"),
    "gradient": ("gradient", "weight", "dgrad"),
    "output": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("gradient", "activation"),
    "weight": ("wgrad", "gradient"),
}

_MOST_LINKS = 10
"""The sources behind one another that are seen later than what inherits them."""

_IN_ORDER = ("activation", "gradient")

_Key = tuple[str, str, str, int | None]


def partings(departures: Iterable[Found], order: Order) -> list[Parting]:
    tensors: dict[_Key, list[Found]] = {}
    for departed in departures:
        tensors.setdefault(_key(departed.subject), []).append(departed)
    for group in tensors.values():
        group.sort(key=lambda departed: -departed.departure.strength)
    sources = _Sources(tensors, order)
    source_of = {key: sources.of(group) for key, group in tensors.items()}
    began = _began(tensors, source_of)
    made = {key: _parting(group, source_of[key]) for key, group in tensors.items()}
    return [made[key] for key in sorted(made, key=lambda key: (began[key], order.place(tensors[key][0].subject)))]


def _began(tensors: Mapping[_Key, Sequence[Found]], source_of: Mapping[_Key, Found | None]) -> dict[_Key, int]:
    """The iteration of each tensor's first difference; a source is not later than the tensors that inherit from it.

    A weight with values in every fifth step may seem to depart after its activations.
    """
    began = {key: min(departed.departure.iteration for departed in group) for key, group in tensors.items()}
    for _ in range(_MOST_LINKS):
        before = dict(began)
        for key, source in source_of.items():
            if source is not None:
                of = _key(source.subject)
                began[of] = min(began[of], max(source.since, began[key]))
        if began == before:
            break
    return began


def _key(subject: Subject) -> _Key:
    # A number of the trainer, or of a user's own feature, has no other that it could come from.
    return subject.scope, subject.layer, subject.tensor or f"\0{subject.statistic}", subject.rank


def _parting(group: Sequence[Found], source: Found | None) -> Parting:
    subject = group[0].subject
    first = min(group, key=lambda departed: departed.departure.iteration)
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
    def __init__(self, tensors: Mapping[_Key, Sequence[Found]], order: Order) -> None:
        self._by_key = tensors
        self._order = order
        self._lines: dict[tuple[str, int | None, str], list[tuple[StepPlace, Found]]] = {}
        for tensor in _IN_ORDER:
            placed = [
                (self._place(departed, tensor), departed)
                for group in tensors.values()
                for departed in group
                if departed.subject.tensor in _MADE_OF[tensor]
            ]
            for place, departed in sorted(placed, key=lambda pair: pair[0]):
                line = tensor, departed.subject.rank, departed.subject.statistic
                self._lines.setdefault(line, []).append((place, departed))

    def of(self, group: Sequence[Found]) -> Found | None:
        """The source of a tensor's difference, by the strongest statistic that departs in a source too."""
        for departed in group:
            own, has_any = departed.departure.difference, False
            for source in self._possible(departed):
                theirs, has_any = source.departure.difference, True
                if theirs * own > 0 and abs(theirs) >= _SHARE * abs(own):
                    return source
            if has_any:
                break
        return None

    def _place(self, departed: Found, tensor: str) -> StepPlace:
        return self._order.place(departed.subject._replace(tensor=tensor))

    def _possible(self, departed: Found) -> Iterator[Found]:
        """The differences of the same statistic that existed then: of earlier layers, the nearest first, or of the own
        layer.
        """
        subject, at = departed.subject, departed.departure.iteration
        if subject.tensor in _IN_ORDER:
            line = self._lines.get((subject.tensor, subject.rank, subject.statistic), [])
            before = bisect_left(line, self._place(departed, subject.tensor), key=itemgetter(0))
            sources: Iterable[Found] = (source for _, source in reversed(line[:before]))
        else:
            sources = (
                source
                for tensor in _MADE_OF.get(subject.tensor, ())
                for source in self._by_key.get((subject.scope, subject.layer, tensor, subject.rank), ())
                if source.subject.statistic == subject.statistic
            )
        for source in sources:
            if subject.tensor == "weight":  # the optimizer has run between them
                existed = source.departure.iteration < departed.since
            else:
                existed = source.since <= at <= source.departure.until
            if existed:
                yield source
