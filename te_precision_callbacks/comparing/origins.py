"""Tells differences that are made in a layer from those that it is given.

A tensor inherits a difference if one of the tensors that it is made of has departed too, as early, in the same
direction and by as much. An activation is made of the activations, outputs and weights before it; a gradient of the
gradients and weights that the backward has passed; an output of the layer's activation and weight; a weight, in the
steps after, of its own gradients. Which layers feed a layer is not recorded: all that ran before it in the step count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.comparing.departures import Found
from te_precision_callbacks.comparing.model import Departure, Origin, Parting
from te_precision_callbacks.comparing.order import Order
from te_precision_callbacks.comparing.scales import MAGNITUDE, scale_of

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

_ALONG = ("activation", "gradient")
"""Those that come from other layers, of which those count that ran before in the forward, or in the backward."""

_Key = tuple[str, str, str, int | None]


def partings(found: Iterable[Found], order: Order) -> list[Parting]:
    """The tensors that depart, with where their differences come from, in the order in which they part."""
    tensors: dict[_Key, list[Found]] = {}
    for each in found:
        subject = each.subject
        # Each number of the trainer, and of a user's own feature, stands for itself.
        tensor = subject.tensor or f"\0{subject.statistic}"
        tensors.setdefault((subject.scope, subject.layer, tensor, subject.rank), []).append(each)
    for group in tensors.values():
        group.sort(key=lambda each: -abs(each.difference) / each.bound)
    sources = _Sources(tensors, order)
    made = [_parting(group, sources) for group in tensors.values()]
    turns = [order.place(group[0].subject) for group in tensors.values()]
    ordered = sorted(zip(made, turns, strict=True), key=lambda both: (both[0].iteration, both[1]))
    return [parting for parting, _ in ordered]


def _parting(group: Sequence[Found], sources: _Sources) -> Parting:
    subject = group[0].subject
    origin, source = sources.of(group)
    return Parting(
        subject.scope,
        subject.layer,
        subject.tensor,
        subject.rank,
        min(each.iteration for each in group),
        tuple(map(_departure, group)),
        origin,
        source,
    )


def _departure(found: Found) -> Departure:
    return Departure(
        statistic=found.subject.statistic,
        gemm=found.subject.gemm,
        iteration=found.iteration,
        until=found.until,
        steps=found.steps,
        to_the_end=found.to_the_end,
        a=found.a,
        b=found.b,
        difference=-found.difference if _is_factor_below_zero(found) else found.difference,
        unit=scale_of(found.subject.tensor, found.subject.statistic).unit,
        spread=None if math.isnan(found.spread) else found.spread,
        bound=found.bound,
    )


def _is_factor_below_zero(found: Found) -> bool:
    """Whether both sides are below 0, where the smaller magnitude is the larger number."""
    return scale_of(found.subject.tensor, found.subject.statistic) is MAGNITUDE and found.a < 0 and found.b < 0


class _Line(NamedTuple):
    """The differences of one statistic along the forward or the backward, in the order of the step.

    Attributes:
        turns: [n]: the place of each one's layer among the layers that have any.
        found: what they are.
        first, last: [n]: their iterations.
        differences: [n].
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
        self._lines: dict[tuple[str, int | None, str], _Line] = {}
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
                self._lines[line, rank, statistic] = _Line(
                    np.array([turns[each.subject[:2]] for each in those]),
                    those,
                    np.array([each.iteration for each in those]),
                    np.array([each.until for each in those]),
                    np.array([each.difference for each in those]),
                )

    def of(self, group: Sequence[Found]) -> tuple[Origin, str]:
        """Where a tensor's difference comes from: by the strongest of its statistics that departs in a source too."""
        for each in group:
            sources = self._along(each) if each.subject.tensor in _ALONG else self._in_layer(each)
            for source in sources:
                if source.difference * each.difference > 0 and abs(source.difference) >= _SHARE * abs(each.difference):
                    return "inherited", f"{source.subject.layer} {source.subject.tensor}"
            if sources:
                break
        return "made here", ""

    def _along(self, found: Found) -> list[Found]:
        """The same statistic's differences in the layers that ran before, the nearest first."""
        subject = found.subject
        line = self._lines.get((subject.tensor, subject.rank, subject.statistic))
        if line is None:
            return []
        before = line.turns < self._turns[subject.tensor][subject.scope, subject.layer]
        standing = before & (line.first <= found.iteration) & (found.iteration <= line.last)
        alike = standing & (line.differences * found.difference > 0)
        enough = alike & (np.abs(line.differences) >= _SHARE * abs(found.difference))
        # One that accounts for it, or any, to say that there are some.
        chosen = np.flatnonzero(enough if enough.any() else standing)
        return [line.found[chosen[-1]]] if len(chosen) else []

    def _in_layer(self, found: Found) -> list[Found]:
        """The same statistic's differences in the tensors of its own layer."""
        subject = found.subject
        sources = (
            each
            for tensor in _MADE_OF.get(subject.tensor, ())
            for each in self._by_key.get((subject.scope, subject.layer, tensor, subject.rank), ())
            if each.subject.statistic == subject.statistic
        )
        if subject.tensor == "weight":  # the optimizer has run between them
            return [each for each in sources if each.iteration < found.iteration]
        return [each for each in sources if each.iteration <= found.iteration <= each.until]
