"""What a format can hold of a tensor, layer by layer, and which magnitudes are known to be outside of it.

    found = magnitudes(run, subjects, "weight", step=5)
    limits = Limits(run, subjects, found, "E4M3")
    limits.is_outside(found.rows[0])        # as the page's depth profile marks it

The page chooses the format, the step and the rank in the browser: ``page/ranges.js`` and ``page/profile.js`` look up
the limits as :class:`Limits` does, and a test compares both. The format and the kind of scale of a statistic are
decided here alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from te_precision_callbacks.base.vocabulary import ONE_SCALE
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.statistics.names import OWN_RECIPE, Request
from te_precision_callbacks.views.report import facts
from te_precision_callbacks.views.report.magnitudes import Magnitudes, TensorMagnitudes, last
from te_precision_callbacks.views.report.ranges import FORMATS, Window
from te_precision_callbacks.views.report.subjects import FamilySeries, Subjects

_KINDS = {"scale_inv_max": "high", "scale_inv_min": "low", "underflows%": "below", "overflows%": "above"}

_ROUNDING = 2e-6
"""What a scale's rounding may move a limit by, as a power of two."""

_FEW_BELOW = 1.0
"""The percentage of underflows from which on the 1st percentile is below the format."""


class Limits:
    """What a format holds of a tensor at a step: at the recorded scales, else as if the largest magnitude became the
    format's largest number.

    It decides as ``windowOf`` and ``isOutside`` in ``page/ranges.js`` and ``page/profile.js`` do.

    Args:
        run: the run.
        subjects: its subjects.
        of: the magnitudes.
        name: the format.
    """

    def __init__(self, run: RecordedRun, subjects: Subjects, of: TensorMagnitudes, name: str) -> None:
        self._run, self._step, self._name, self._format = run, of.step, name, FORMATS[name]
        self._scales = Scales(run, subjects, of.tensor)
        self._read: dict[int, dict[int, float]] = {}

    def window(self, row: Magnitudes) -> Window:
        """The limits that are drawn in a layer."""
        scales = self._scales.of(row.layer, self._name)
        high = self._number(row.layer, scales.get("high"))
        low = self._number(row.layer, scales.get("low", scales.get("high")))
        if high is not None and low is not None and high > 0 and low > 0:
            return Window.at(self._format, low, high)
        return Window.assumed(self._format, 2.0**row.most)

    def is_outside(self, row: Magnitudes) -> bool:
        """Whether the largest magnitude or the 1st percentile of a layer is known to be outside: by the recorded
        overflows and underflows, else where all of their bins are."""
        scales = self._scales.of(row.layer, self._name)
        high, low = (self._number(row.layer, scales.get(kind)) for kind in ("high", "low"))
        if high is None or not 0 < high < math.inf or (low is not None and not low > 0):
            assumed = Window.assumed(self._format, 2.0**row.high)
            return row.low_end <= assumed.bottom - 1
        above, below = (self._number(row.layer, scales.get(kind)) for kind in ("above", "below"))
        is_above = row.high > math.log2(self._format.max * high) + _ROUNDING if above is None else above > 0
        if is_above or below is not None:
            return is_above or (below is not None and below >= _FEW_BELOW)
        if low is None:
            low = high if self._scales.is_one(scales["high"], row.layer) else 0.0
        return low > 0 and row.low_end <= math.log2(self._format.min_subnormal * low) - 1

    def _number(self, layer: int, one: FamilySeries | None) -> float | None:
        if one is None:
            return None
        if id(one) not in self._read:
            self._read[id(one)] = last(self._run, one, self._step)
        return self._read[id(one)].get(layer)


class Scales:
    """The recorded statistics that say where the limits of a format were in a tensor, and what was beyond them.

    Args:
        run: the run.
        subjects: its subjects.
        tensor: the tensor.
    """

    def __init__(self, run: RecordedRun, subjects: Subjects, tensor: str) -> None:
        self._tensor = tensor
        self._layers, self._products = subjects.layers, facts.gemms(run)
        self._recorded = [
            _Recorded(one, request, frozenset(one.layer.tolist()))
            for one in subjects.families
            if one.family.tensor == tensor and (request := one.family.request) is not None
            if request.statistic.name in _KINDS and not request.columnwise
        ]

    def of(self, layer: int, name: str) -> dict[str, FamilySeries]:
        """Of a format ``high`` and ``low``, the scale factors, ``below`` and ``above``: statistics of one recipe, that
        of the layer itself where it has a scale factor."""
        found: dict[str, dict[str, FamilySeries]] = {}
        formats = self._formats(layer)
        for one, request, layers in self._recorded:
            if layer in layers and _format(request, formats) == name:
                of_recipe = found.setdefault(request.recipe or OWN_RECIPE, {})
                of_recipe.setdefault(_KINDS[request.statistic.name], one)
        own = found.get(OWN_RECIPE)
        listed = [*([] if own is None else [own]), *found.values()]
        return next((each for each in listed if "high" in each), listed[0] if listed else {})

    def is_one(self, factor: FamilySeries, layer: int) -> bool:
        """Whether there is one scale for the whole tensor: by the recipe in the factor's name, else by the layer's
        operands."""
        by_name = one_scale_by_name(factor.family.request)
        return OwnFormat.of(self._formats(layer)).one_scale if by_name is None else by_name

    def _formats(self, layer: int) -> list[str]:
        """The formats of the tensor in the layer's products."""
        return formats_of(self._products.get(self._layers[layer].name, []), self._tensor)


class _Recorded(NamedTuple):
    """A statistic of a tensor's scales or losses, and the layers that have it."""

    series: FamilySeries
    request: Request
    layers: frozenset[int]


def formats_of(products: Sequence[Mapping[str, Any]], tensor: str) -> list[str]:
    """The formats of a tensor in a layer's products, as :func:`facts.gemms` gives these."""
    return [found for each in products if (found := each["operands"].get(tensor))]


class OwnFormat(NamedTuple):
    """What a tensor is quantized to in a layer's own products.

    Attributes:
        format: the format.
        fp8: the format in FP8, for statistics of another recipe.
        one_scale: whether there is one scale for the whole tensor.
    """

    format: str
    fp8: str
    one_scale: bool

    @classmethod
    def of(cls, formats: Sequence[str]) -> OwnFormat:
        """From the formats of the tensor in the products; E4M3 where there are none."""
        own = " ".join(formats)
        fp8 = "E5M2" if "E5M2" in own and "E4M3" not in own else "E4M3"
        one_scale = bool(formats) and all(each.startswith("FP8 E") for each in formats)
        return cls("E2M1" if "NVFP4" in own else fp8, fp8, one_scale)


def format_by_name(request: Request | None) -> str | None:
    """The format that a statistic's name says; None where it is that of the layer's own operands."""
    if request is not None and request.recipe == "nvfp4":
        return "E2M1"
    if request is None or request.e5m2 is None:
        return None
    return "E5M2" if request.e5m2 else "E4M3"


def one_scale_by_name(request: Request | None) -> bool | None:
    """Whether the recipe in a statistic's name has one scale for the whole tensor; None where it names no recipe."""
    return request.recipe in ONE_SCALE if request is not None and request.recipe else None


def _format(request: Request, formats: Sequence[str]) -> str:
    own = OwnFormat.of(formats)
    return format_by_name(request) or (own.fp8 if request.recipe else own.format)
