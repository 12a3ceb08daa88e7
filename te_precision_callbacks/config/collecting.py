"""Lists the statistics that a layer's features collect of a tensor, and finds the one that a condition reads.

known = collected(schemas_of_a_layer, "activation")    # label -> Collected
read_by(parse_condition("mxfp8_mse > 5"), known)       # what is collected, under which names, and when
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from te_precision_callbacks.config.conditions import Threshold
from te_precision_callbacks.config.keys import LoggedTensor
from te_precision_callbacks.config.levels import FeatureSchema, holding
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.vocabulary import RECIPES


@dataclass(frozen=True)
class Collected:
    """A statistic that is collected of a tensor.

    Attributes:
        request: what was asked for.
        labels: its names in the log. One of the layer's own recipe gets that recipe's name before it in a layer that
            runs none.
        schedules: when.
        of_own_recipe: whether it was asked for of the layer's recipe, and a condition on it names another one.
    """

    request: Request
    labels: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    of_own_recipe: bool = False


def collected(features: Iterable[FeatureSchema], tensor: str) -> dict[str, Collected]:
    """What the features of a layer collect of a tensor, by the names that were asked for."""
    asked: dict[str, tuple[Request, list[Schedule]]] = {}
    for options in (options for feature in features for options in holding(feature.targets, tensor, None)):
        if isinstance(options, LoggedTensor):
            for request in options.requests:
                asked.setdefault(request.label, (request, []))[1].append(options.schedule)
    return {
        label: Collected(request, (label, *_under_recipes(request, asked)), tuple(schedules))
        for label, (request, schedules) in asked.items()
    }


def _under_recipes(request: Request, asked: Iterable[str]) -> Iterable[str]:
    """The labels of a request in a layer that runs no recipe, but for those that are asked for by themselves."""
    labels = [request.under(recipe).label for recipe in RECIPES if request.recipe == OWN_RECIPE]
    return [label for label in labels if label not in asked]


def read_by(condition: Threshold, known: Mapping[str, Collected], recipe: str | None = None) -> Collected | None:
    """The statistic that a condition reads, among those that are collected of a tensor; None where it is not.

    With the name of a recipe in front, a statistic that was asked for without one is meant too: where the layer runs
    that recipe the two are the same number.

    Args:
        condition: the condition.
        known: as of :func:`collected`.
        recipe: the one that the tensor was quantized with; None where it was not, and before the run.
    """
    wanted = condition.statistic
    if wanted.label in known:
        return known[wanted.label]
    for found in known.values():
        if condition.reads(found.request):
            return found
    for label, found in known.items():
        if wanted.spelled_out in found.labels:
            own = (label,) if recipe == wanted.recipe else ()
            return Collected(found.request, (wanted.spelled_out, *own), found.schedules, of_own_recipe=not own)
    return None
