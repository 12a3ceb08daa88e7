"""Lists the statistics that a layer's features collect of a tensor, and finds the one that a condition reads.

known = collected(schemas_of_a_layer, "activation")    # label -> Collected
read_by(parse_condition("mxfp8_mse > 5"), known)       # the statistic that the condition reads
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from te_precision_callbacks.base.vocabulary import RECIPES, RESULT
from te_precision_callbacks.config.conditions import Threshold
from te_precision_callbacks.config.keys import LoggedTensor
from te_precision_callbacks.config.levels import FeatureSchema, holding
from te_precision_callbacks.config.schemas import LogGemmError
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.statistics.table import GEMM_STATISTICS, STATISTICS


@dataclass(frozen=True)
class Collected:
    """A statistic that is collected of a tensor.

    Attributes:
        request: the request.
        labels: its names in the log. In a layer that runs no recipe, a statistic of the layer's own recipe gets a
            recipe's name as prefix.
        schedules: when the statistic is collected.
        of_own_recipe: whether it was requested for the layer's own recipe, while a condition on it names a recipe.
    """

    request: Request
    labels: tuple[str, ...]
    schedules: tuple[Schedule, ...]
    of_own_recipe: bool = False


def collected(features: Sequence[FeatureSchema], tensor: str) -> dict[str, Collected]:
    """The statistics that the features of a layer collect of a tensor, by the requested names."""
    asked: dict[str, tuple[Request, list[Schedule]]] = {}
    for options in (options for feature in features for options in holding(feature.targets, tensor, None)):
        if isinstance(options, LoggedTensor):
            for request in options.requests:
                asked.setdefault(request.label, (request, []))[1].append(options.schedule)
    for item in (
        target.options for feature in features if isinstance(feature, LogGemmError) for target in feature.targets
    ):
        if RESULT[item.gemm] == tensor:
            for label in GEMM_STATISTICS:
                asked.setdefault(label, (Request(label, STATISTICS[label]), []))[1].append(item.schedule)
    return {
        label: Collected(request, (label, *_under_recipes(request, asked)), tuple(schedules))
        for label, (request, schedules) in asked.items()
    }


def _under_recipes(request: Request, asked: Iterable[str]) -> Iterable[str]:
    """The labels of a request in a layer that runs no recipe, without those that are requested separately."""
    labels = [request.under(recipe).label for recipe in RECIPES if request.recipe == OWN_RECIPE]
    return [label for label in labels if label not in asked]


def read_by(condition: Threshold, known: Mapping[str, Collected], recipe: str | None = None) -> Collected | None:
    """The statistic that a condition reads, among those that are collected of a tensor; None if it is not collected.

    A condition on a statistic with a recipe's name also matches the statistic that was requested without one: in a
    layer that runs that recipe the two are the same number.

    Args:
        condition: the condition.
        known: the result of :func:`collected`.
        recipe: the recipe that the tensor was quantized with; None if it was not quantized, and before the run.
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
