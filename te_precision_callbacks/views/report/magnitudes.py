"""The magnitudes of a tensor in all layers at a step.

found = magnitudes(run, subjects, "weight", step=5)
found.rows[0].high                      # the largest magnitude in the first layer, as a power of two
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.statistics.series import badness, sign_of
from te_precision_callbacks.views.report.histograms import histograms
from te_precision_callbacks.views.report.overview import Columns
from te_precision_callbacks.views.report.subjects import FamilySeries, ReportError, Subjects

EXPONENTS = "exponent_histogram"


class Magnitudes(NamedTuple):
    """The magnitudes of a tensor in a layer, as powers of two.

    Attributes:
        layer: the index of the layer.
        low: the 1st percentile, or where its bin begins; without a histogram the smallest magnitude that is known.
        low_end: where the bin of ``low`` ends.
        middle: the median, or the standard deviation; nan where neither is known.
        high: the largest magnitude, or where its bin begins.
        most: where the bin of ``high`` ends.
    """

    layer: int
    low: float
    low_end: float
    middle: float
    high: float
    most: float


class TensorMagnitudes(NamedTuple):
    """The magnitudes of a tensor in all layers at a step.

    Attributes:
        tensor: the tensor.
        step: the step; a layer without numbers in it has those of its last step before.
        rows: the layers that have any, in the order of execution.
    """

    tensor: str
    step: int
    rows: list[Magnitudes]


def magnitudes(run: RecordedRun, subjects: Subjects, tensor: str | None, step: int | None) -> TensorMagnitudes:
    """The magnitudes of a tensor at a step.

    Args:
        run: the run.
        subjects: its subjects.
        tensor: the tensor; None for the first with magnitudes.
        step: the step; None for the last one with magnitudes of the tensor.

    Raises:
        ReportError: the run has no magnitudes of the tensor, or none at the step.
    """
    sources = [one for one in subjects.histograms if one.family.statistic == EXPONENTS]
    sources += [one for base in ("cur_amax", "max") for one in _plain(subjects, base)]
    source = next((one for one in sources if tensor in (None, one.family.tensor)), None)
    steps = [] if source is None else _steps(run, source)
    if source is not None and step is not None and step not in steps:
        raise ReportError(_no_step(source.family.tensor, step, steps))
    rows = [] if source is None else list(_rows(run, subjects, source, steps[-1] if step is None else step))
    if source is None or not rows:
        what = "any tensor" if tensor is None else f"the tensor {tensor!r}"
        raise ReportError(
            f"The run has no magnitudes of {what}: a depth profile needs exponent_histogram, cur_amax, or min and max."
        )
    return TensorMagnitudes(source.family.tensor, steps[-1] if step is None else step, rows)


def _plain(subjects: Subjects, base: str, tensor: str | None = None) -> Iterator[FamilySeries]:
    for one in subjects.families:
        if one.family.statistic == base and tensor in (None, one.family.tensor):
            yield one


def _steps(run: RecordedRun, one: FamilySeries) -> list[int]:
    read = run.vectors if one.is_histogram else run.values
    return list(map(int, np.unique(read(one.series.tolist())["iteration"].to_numpy())))


def _no_step(tensor: str, step: int, steps: Sequence[int]) -> str:
    nearest = [*[each for each in steps if each < step][-1:], *[each for each in steps if each > step][:1]]
    named = f"The nearest {'is' if len(nearest) == 1 else 'are'} {' and '.join(map(str, nearest))}"
    return f"The run has no magnitudes of {tensor} at step {step}. {named}, of steps {steps[0]} to {steps[-1]}."


def _rows(run: RecordedRun, subjects: Subjects, source: FamilySeries, step: int) -> Iterator[Magnitudes]:
    tensor = source.family.tensor

    def at(base: str) -> dict[int, float]:
        return {layer: value for one in _plain(subjects, base, tensor) for layer, value in last(run, one, step).items()}

    largest = at("cur_amax")
    if not largest:
        least = at("min")
        largest = {layer: max(abs(value), abs(least[layer])) for layer, value in at("max").items() if layer in least}
    highs = {layer: math.log2(value) for layer, value in largest.items() if value > 0 and math.isfinite(value)}
    ranges, stds = at("dynamic_range"), at("std")
    rows = {
        layer: Magnitudes(layer, low := high - ranges.get(layer, 0.0), low, _power(stds.get(layer, 0.0)), high, high)
        for layer, high in highs.items()
    }
    if source.is_histogram:
        rows |= {row.layer: row for row in _of_histograms(run, source, step, highs)}
    yield from (rows[layer] for layer in sorted(rows))


def _power(value: float) -> float:
    return math.log2(value) if value > 0 else math.nan


def _of_histograms(run: RecordedRun, one: FamilySeries, step: int, highs: dict[int, float]) -> Iterator[Magnitudes]:
    """The magnitudes by the histograms; the largest is the recorded one, if there is any."""
    bins, seen = one.family.bins, set[int]()
    for histogram in histograms(run, one, Columns.of(run, 10**9)):
        layer = histogram.layer
        place = int(np.searchsorted(histogram.columns.first, step, "right")) - 1
        if layer in seen or place < 0:
            continue
        seen.add(layer)
        found = histogram.percentiles()[place]
        if found[0] >= 0:
            _, low, middle, _, high = (bins.lowest + found / bins.steps).tolist()
            end = 1 / bins.steps
            yield Magnitudes(
                layer, low, low + end, middle + end / 2, highs.get(layer, high), highs.get(layer, high + end)
            )


def last(run: RecordedRun, one: FamilySeries, step: int) -> dict[int, float]:
    """Layer -> its number at a step, or its last one before it; of several ranks the worst."""
    table = run.values(one.series.tolist())
    layer_of = dict(zip(one.series.tolist(), one.layer.tolist(), strict=True))
    kept = table["iteration"].to_numpy() <= step
    series, iterations, values = (table[name].to_numpy()[kept] for name in ("series", "iteration", "value"))
    places = np.flatnonzero(np.diff(series, append=-1))
    bad = badness(values, sign_of(one.family.worse))
    found: dict[int, int] = {}
    for place in sorted(places.tolist(), key=lambda place: (iterations[place], bad[place])):
        found[layer_of[int(series[place])]] = place
    return {layer: float(values[place]) for layer, place in found.items()}
