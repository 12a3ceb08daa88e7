"""Separates differences a layer introduces from those it inherits.

A tensor inherits a difference if one of its sources has departed too, as early, in the same direction and by as much.
The sources of an activation are the activations, outputs and weights before it; of a gradient the gradients and weights
that the backward has passed; of an output the layer's activation and weight; of a weight, in later steps, its
gradients. The records do not have the connections of layers: all earlier layers of the step count.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.departures import Found
from te_precision_callbacks.views.compare.order import Order
from te_precision_callbacks.views.compare.result import Parting

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
"""A tensor -> the tensors that it is made of."""

_MOST_LINKS = 10
"""The sources behind one another that are seen later than what inherits them."""

_ALONG = ("activation", "gradient")
"""Those that come from other layers, of which those count that ran before in the forward, or in the backward."""

_Key = tuple[str, str, str, int | None]


def partings(found: Iterable[Found], order: Order) -> list[Parting]:
    """The tensors that depart, in order, with the origins of their differences."""
    tensors: dict[_Key, list[Found]] = {}
    for each in found:
        tensors.setdefault(_key(each.subject), []).append(each)
    for group in tensors.values():
        group.sort(key=lambda each: -each.departure.strength)
    sources = _Sources(tensors, order)
    source_of = {key: sources.of(group) for key, group in tensors.items()}
    began = _began(tensors, source_of)
    made = {key: _parting(group, source_of[key]) for key, group in tensors.items()}
    return [made[key] for key in sorted(made, key=lambda key: (began[key], order.place(tensors[key][0].subject)))]


def _began(tensors: Mapping[_Key, Sequence[Found]], source_of: Mapping[_Key, Found | None]) -> dict[_Key, int]:
    """The iteration of each tensor's first difference; a source is not later than the tensors that inherit from it.

    A weight with values in every fifth step may seem to depart after its activations.
    """
    began = {key: min(each.departure.iteration for each in group) for key, group in tensors.items()}
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
    first = min(group, key=lambda each: each.departure.iteration)
    return Parting(
        subject.scope,
        subject.layer,
        subject.tensor,
        subject.rank,
        first.departure.iteration,
        first.since,
        tuple(each.departure for each in group),
        "made here" if source is None else "inherited",
        "" if source is None else f"{source.subject.layer} {source.subject.tensor}",
    )


class _StatisticLine(NamedTuple):
    """The differences of one statistic along the forward or the backward, in the order of the step.

    Attributes:
        turns: [n]: the place of the layer among the layers with differences.
        found: [n]: the differences.
        first, last: [n]: the iterations between which each may have existed.
        differences: [n]: their values.
    """

    turns: npt.NDArray[np.int64]
    found: list[Found]
    first: npt.NDArray[np.int64]
    last: npt.NDArray[np.int64]
    differences: npt.NDArray[np.float64]


class _Sources:
    """All differences, by what may inherit them."""

    def __init__(self, tensors: Mapping[_Key, Sequence[Found]], order: Order) -> None:
        self._by_key = tensors
        self._turns: dict[str, dict[tuple[str, str], int]] = {}
        self._lines: dict[tuple[str, int | None, str], _StatisticLine] = {}
        for line in _ALONG:
            subjects = {
                (scope, layer): order.place(group[0].subject._replace(tensor=line))
                for (scope, layer, _, _), group in tensors.items()
            }
            turns = {layer: turn for turn, layer in enumerate(sorted(subjects, key=lambda layer: subjects[layer]))}
            self._turns[line] = turns
            found: dict[tuple[int | None, str], list[Found]] = {}
            for key in sorted(tensors, key=lambda key: turns[key[:2]]):
                for each in tensors[key]:
                    if each.subject.tensor in _MADE_OF[line]:
                        found.setdefault((each.subject.rank, each.subject.statistic), []).append(each)
            for (rank, statistic), those in found.items():
                self._lines[line, rank, statistic] = _StatisticLine(
                    np.array([turns[each.subject[:2]] for each in those]),
                    those,
                    np.array([each.since for each in those]),
                    np.array([each.departure.until for each in those]),
                    np.array([each.departure.difference for each in those]),
                )

    def of(self, group: Sequence[Found]) -> Found | None:
        """The source of a tensor's difference, by the strongest statistic that departs in a source too; None if the
        difference is made there.
        """
        for each in group:
            sources = self._along(each) if each.subject.tensor in _ALONG else self._in_layer(each)
            for source in sources:
                theirs, own = source.departure.difference, each.departure.difference
                if theirs * own > 0 and abs(theirs) >= _SHARE * abs(own):
                    return source
            if sources:
                break
        return None

    def _along(self, found: Found) -> list[Found]:
        """The same statistic's differences in the layers that ran before, the nearest first."""
        subject = found.subject
        line = self._lines.get((subject.tensor, subject.rank, subject.statistic))
        if line is None:
            return []
        before = line.turns < self._turns[subject.tensor][subject.scope, subject.layer]
        at, difference = found.departure.iteration, found.departure.difference
        standing = before & (line.first <= at) & (at <= line.last)
        enough = standing & (line.differences * difference > 0)
        enough &= np.abs(line.differences) >= _SHARE * abs(difference)
        # One that accounts for it, or any, to say that there are some.
        chosen = np.flatnonzero(enough if enough.any() else standing)
        return [line.found[chosen[-1]]] if len(chosen) else []

    def _in_layer(self, found: Found) -> list[Found]:
        """The same statistic's differences in the other tensors of the layer."""
        subject = found.subject
        sources = (
            each
            for tensor in _MADE_OF.get(subject.tensor, ())
            for each in self._by_key.get((subject.scope, subject.layer, tensor, subject.rank), ())
            if each.subject.statistic == subject.statistic
        )
        if subject.tensor == "weight":  # the optimizer has run between them
            return [each for each in sources if each.departure.iteration < found.since]
        return [each for each in sources if each.since <= found.departure.iteration <= each.departure.until]
