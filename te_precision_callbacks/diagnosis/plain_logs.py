"""Prepares logs of plain nvidia-dlfw-inspect for the rules.

Such a log has four decimals, does not name recipes, and has the E8M0 codes of MXFP8's scales instead of the scales.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.base.numerics.bits import E4M3, E5M2
from te_precision_callbacks.diagnosis.facts import Row
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.statistics.arrays import Floats, Mask
from te_precision_callbacks.statistics.names import OWN_RECIPE, logged_request

_LEAST_CODE = 32
_LARGEST_CODE = 254
_BIAS = 127
_DECIMALS = 4
"""The codes of E8M0 that are taken for codes, the code of the scale 1, and the decimals of a log."""

_COARSE = 0.002
"""Below it, a scale of four decimals is too coarse to be compared with amax."""

_SIGNED = ("min", "mean")

_SCALES = ("scale_inv_min", "scale_inv_max")


class PlainLog(NamedTuple):
    """Facts derived from the values of a log.

    Attributes:
        gemms, operands: rows of the tables of facts, for layers with delayed or current scaling.
        codes: the series with E8M0 codes.
        magnitudes: the series where 0 means below the last decimal; empty in a log with all digits.
    """

    gemms: list[Row]
    operands: list[Row]
    codes: frozenset[int]
    magnitudes: frozenset[int]

    def adapt(self, series: npt.NDArray[np.int32], values: Floats) -> tuple[Mask, Floats]:
        known = ~((values == 0) & np.isin(series, list(self.magnitudes)))
        is_code = np.isin(series, list(self.codes))
        return known, np.where(is_code, np.exp2(np.where(is_code, values, 0) - _BIAS), values)


def read_plain_log(run: RecordedRun) -> PlainLog:
    table = run.values(list(range(len(run.subjects))))
    series = table["series"].to_numpy()
    values = table["value"].to_numpy()
    iterations = table["iteration"].to_numpy()
    finite = values[np.isfinite(values)]
    is_rounded = bool((np.round(finite, _DECIMALS) == finite).all())
    columns: dict[tuple[str, str], dict[str, Mapping[int, float]]] = {}
    magnitudes = set()
    scales: dict[tuple[str, str], list[int]] = {}  # layer and tensor -> series of scale_inv_min and scale_inv_max
    quantized: dict[str, set[str | None]] = {}  # layer -> the recipes of its statistics
    for number, subject in enumerate(run.subjects):
        request = logged_request(subject.statistic) if subject.tensor else None
        if request is None:
            continue
        if is_rounded and request.statistic.name not in _SIGNED and "the tensor" in request.statistic.unit:
            magnitudes.add(number)
        rows = slice(*np.searchsorted(series, (number, number + 1)).tolist())
        if request.recipe is not None:
            quantized.setdefault(subject.layer, set()).add(request.recipe)
        if request.recipe in (None, OWN_RECIPE, "fp8_delayed_scaling") and not request.columnwise:
            if request.statistic.name in _SCALES:
                scales.setdefault((subject.layer, subject.tensor), []).append(number)
            known = columns.setdefault((subject.layer, subject.tensor), {})
            known.setdefault(
                request.statistic.name, dict(zip(iterations[rows].tolist(), values[rows].tolist(), strict=True))
            )
    nvfp4 = [layer for layer, recipes in quantized.items() if recipes == {"nvfp4"}]  # other layers do not log them
    codes: list[int] = []
    for place, numbers in scales.items():
        if _are_codes(columns[place]):
            codes += numbers
    return PlainLog(*_facts(columns, nvfp4), frozenset(codes), frozenset(magnitudes))


def _are_codes(statistics: Mapping[str, Mapping[int, float]]) -> bool:
    """Return whether the least and the largest scales of a tensor are codes: real scales may be powers of two."""
    values = np.array(list(chain(*(statistics.get(name, {}).values() for name in _SCALES))))
    in_range = (values >= _LEAST_CODE) & (values <= _LARGEST_CODE) & (values == np.round(values))
    return bool(in_range.all() and (np.frexp(values)[0] != 0.5).any())


def _facts(
    columns: Mapping[tuple[str, str], Mapping[str, Mapping[int, float]]], nvfp4: Iterable[str]
) -> tuple[list[Row], list[Row]]:
    of_columns = {place: _recipe(place[1], statistics) for place, statistics in columns.items()}
    span = {"since": None, "until": None}
    recipes = dict.fromkeys(nvfp4, "nvfp4")
    for (layer, _), (recipe, _) in of_columns.items():
        if recipe and recipes.get(layer) != "fp8_delayed_scaling":
            recipes[layer] = recipe
    # The log does not show whether a layer without a gradient has a trainable weight.
    row = {"gemm": "wgrad", "family": "", "runs": "never", "not_run": "not in the log", "calls": 1, **span}
    operands: list[Row] = []
    for (layer, tensor), (_, text) in of_columns.items():
        shown = "NVFP4" if recipes.get(layer) == "nvfp4" else text
        if layer in recipes:
            operands.append({"layer": layer, "tensor": tensor, "format": shown, **span})
    layers = dict.fromkeys([*recipes, *(layer for layer, _ in columns)])
    gemms: list[Row] = [{"layer": layer, "recipe": recipes.get(layer, ""), **row} for layer in layers]
    return gemms, operands


def _recipe(tensor: str, statistics: Mapping[str, Mapping[int, float]]) -> tuple[str, str]:
    text = "FP8 E5M2" if tensor == "gradient" else "FP8 E4M3"
    largest = statistics.get("scale_inv_max", {})
    least = statistics.get("scale_inv_min", {})
    scales = np.array(list(largest.values()))
    if (
        not len(scales)
        or _are_codes(statistics)
        or any(least.get(step, value) != value for step, value in largest.items())
    ):
        return "", text
    amaxes = np.array([_amax(statistics, step) for step in largest])
    ranges = np.divide(amaxes, scales, out=np.full(len(scales), np.nan), where=scales >= _COARSE)
    ranges[scales == 1] = np.nan  # before the first update
    known = ranges[np.isfinite(ranges)]
    if len(known):
        text = "FP8 E5M2" if known.max() > 4 * E4M3.max else "FP8 E4M3"
    if scales[0] == 1:
        return "fp8_delayed_scaling", text
    if not len(known):
        return "", text
    limit = E5M2.max if text == "FP8 E5M2" else E4M3.max
    fits = np.abs(known / limit - 1) <= _COARSE / 4 / scales[np.isfinite(ranges)] + 0.01
    return "fp8_current_scaling" if fits.all() else "fp8_delayed_scaling", text


def _amax(statistics: Mapping[str, Mapping[int, float]], step: int) -> float:
    ends = [abs(statistics.get(name, {}).get(step, np.nan)) for name in ("max", "min")]
    return statistics.get("cur_amax", {}).get(step, max(ends))
