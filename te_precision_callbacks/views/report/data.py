"""What of a run goes into its page, and what the page can say exactly.

    data = PageData.of(run, most=8_000_000)
    data.told                               # for JSON
    data.arrays                             # the texts of its arrays

A page has a bounded size. It always has the overview: of each statistic one byte for a cell of layer and time, which is
the worst number of its steps; the worst and the last number of each layer as they are; and some steps as they are. The
rest of the size goes to whole curves and histograms: those that show findings first, then those of the worst layers,
then of their other statistics, then of all others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.coverage.recorded import other_steps_of_run
from te_precision_callbacks.diagnosis.finding import Finding, Verdict
from te_precision_callbacks.diagnosis.replay import diagnose
from te_precision_callbacks.runs.answers import (
    no_step_in_words,
    not_measured_in_words,
    outcome_in_words,
    why_nothing_to_show,
)
from te_precision_callbacks.runs.index import REDUCED
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.sinks.worst import worst_beside
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.statistics.table import Worse
from te_precision_callbacks.views.report import facts
from te_precision_callbacks.views.report.format_limits import (
    FORMATS,
    OwnFormat,
    format_by_name,
    formats_of,
    one_scale_by_name,
    reach,
)
from te_precision_callbacks.views.report.histograms import PERCENTS, histograms
from te_precision_callbacks.views.report.overview import Columns, Overview, overviews, pieces
from te_precision_callbacks.views.report.packing import LEVELS, Packed, PackedScale, narrowed, steps_between
from te_precision_callbacks.views.report.speed import speed_facts
from te_precision_callbacks.views.report.subjects import (
    FamilySeries,
    ReportError,
    Subjects,
    folder_name,
    layer_name,
)

_CELLS = 4_000_000
"""The most cells of all overviews."""

_MOST_COLUMNS, _FEWEST_COLUMNS = 400, 24

_HISTOGRAM_COLUMNS = 60

_EXACT_STEPS = 5

WORST = 5
"""The layers of each statistic that a summary names."""

_FIRST = ("nonfinite_num", "overflows%", "underflows%", "sqnr_db", "saturated_scales%", "flushed_scales%")
"""The statistics that a summary has first."""


_OF_FINITE_ELEMENTS = frozenset({"min", "max", "mean", "std", "l1_norm", "l2_norm", "cur_amax", "dynamic_range"})


@dataclass(frozen=True)
class PageData:
    """The data of a page.

    Attributes:
        told: what goes into its JSON.
        arrays: the texts of its arrays.
    """

    told: dict[str, Any]
    arrays: list[str]

    @classmethod
    def of(cls, run: RecordedRun, most: int, device: Device | None = None) -> PageData:
        """Choose what goes into a page.

        Args:
            run: the run.
            most: the most characters of its arrays.
            device: the device that times are expected for; None for the run's own GPU.

        Raises:
            ReportError: the run has no numbers at all.
        """
        subjects, verdict = nonempty(run), diagnose(run)
        run = _with_nan(run)
        packed = Packed(most)
        chosen, columns, left_out = _fitted(run, subjects)
        steps = _exact_steps(columns) if len(columns) else []
        made = []
        for overview in overviews(run, chosen, columns, steps):
            made.append(_FamilyOnPage(overview, packed))
            overview.cells.clear()
            overview.present.clear()
        told: dict[str, Any] = {
            "version": version("te-precision-callbacks"),
            "made": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "levels": LEVELS,
            "run": _run(run),
            "notes": [
                visible(note) for note in (*no_step_in_words(run), *run.notes, *not_measured_in_words(run), *left_out)
            ],
            "layers": _layers(run, subjects),
            "scalars": _scalars(run, packed),
            "formats": {
                name: {"max": each.max, "normal": each.min_normal, "least": each.min_subnormal, "reach": reach(each)}
                for name, each in FORMATS.items()
            },
            "percents": list(PERCENTS),
            "verdict": _verdict(verdict, run, subjects),
            "speed": speed_facts(run, device),
            "worst_layers": worst_layers([one.overview for one in made]),
        }
        for one in made:
            one.put_steps()
        histogram_families = _Histograms(run, subjects, packed)
        found = {layer for finding in told["verdict"]["findings"] for layer in finding["places"]}
        worst = [*found, *(item["layer"] for listed in told["worst_layers"] for item in listed["items"])]
        histogram_families.put_ranges()
        histogram_families.put_counts(worst, packed.size + (packed.most - packed.size) // 3)
        curves = _put_curves(run, made, packed, verdict)
        told["families"] = [one.told for one in made]
        told["histograms"] = histogram_families.told
        told["free"] = _free(run, subjects, packed)
        told["exact"] = {
            "curves": curves,
            "series": sum(len(one.overview.of.series) for one in made),
            "steps": steps,
            "widest": int(np.max(columns.last - columns.first) + 1) if len(columns) else 0,
        }
        return cls(told, packed.texts)


def _with_nan(run: RecordedRun) -> RecordedRun:
    """The run, with nan in place of 0 where a statistic of finite elements is 0 beside inf or nan: such a tensor has no
    finite element, or none but zeros."""
    number = {subject: place for place, subject in enumerate(run.subjects)}
    counts = {place: number.get(subject._replace(statistic="nonfinite_num")) for subject, place in number.items()
              if subject.statistic in _OF_FINITE_ELEMENTS}  # fmt: skip
    table = run.values(place for place in counts.values() if place is not None)
    bad = table.filter(pc.greater(table["value"], 0))
    iterations: dict[int, list[int]] = {}
    for place, iteration in zip(bad["series"].to_pylist(), bad["iteration"].to_pylist(), strict=True):
        iterations.setdefault(place, []).append(iteration)
    sick = {series: iterations[place] for series, place in counts.items() if place in iterations}

    def read(wanted: list[int] | None) -> pa.Table:
        table = run.read_values(wanted)
        series, steps, values = (table[name].to_numpy() for name in ("series", "iteration", "value"))
        values = values.copy()
        for one in sick.keys() & set(np.unique(series).tolist()):
            begin, end = np.searchsorted(series, (one, one + 1))
            own = values[begin:end]
            own[(own == 0) & np.isin(steps[begin:end], sick[one])] = np.nan
        return table.set_column(table.schema.get_field_index("value"), "value", pa.array(values))

    return replace(run, read_values=read) if sick else run


def nonempty(run: RecordedRun) -> Subjects:
    """The subjects of a run.

    Raises:
        ReportError: nothing was recorded.
    """
    why = why_nothing_to_show(run)
    if why:
        raise ReportError(why)
    return Subjects(run)


def worst_layers(made: Sequence[Overview]) -> list[dict[str, Any]]:
    """The worst layers of each statistic that has a direction in which it gets worse, most severe first.

    What is as good as it can be is not listed. A layer that is listed for what another statistic shows it to lose has
    ``lost``, see :func:`~te_precision_callbacks.sinks.worst.worst_first`.
    """
    worst = {
        overview.family: {int(overview.layers[row]): number for row, number in overview.worst_of_rows().items()}
        for overview in made
    }
    values = {family: {layer: number.value for layer, number in numbers.items()} for family, numbers in worst.items()}
    found = []
    for place, overview in enumerate(made):
        family = overview.family
        if not family.has_direction or family.request is None:
            continue
        items = []
        for layer, lost in worst_beside(WORST, family, values[family], values).items():
            value, rank, at = worst[family][layer]
            is_good = (family.worse is Worse.HIGH and value == 0) or (family.worse is Worse.LOW and np.isposinf(value))
            if is_good and lost is None:
                continue
            item: dict[str, Any] = {"layer": layer, "rank": rank, "value": value, "at": at}
            items.append(item if lost is None else {**item, "lost": lost._asdict()})
        found.append({"family": place, "items": items, "counted": bool(worst[family])})

    def gravity(listed: dict[str, Any]) -> tuple[int, int]:
        request = made[listed["family"]].family.request
        name = "" if request is None else request.statistic.name
        return (_FIRST.index(name) if name in _FIRST else len(_FIRST), listed["family"])

    return sorted(found, key=gravity)


MOST_PLACES = 200
"""The layers of a finding that a page names."""


def _verdict(verdict: Verdict, run: RecordedRun, subjects: Subjects) -> dict[str, Any]:
    """The verdict for the page, as ``Verdict.as_json`` has it without its text, except that findings have places in the
    page's list of layers instead of names."""
    index = {layer.name: place for place, layer in enumerate(subjects.layers)}
    columns = ((table["scope"].to_pylist(), table["layer"].to_pylist()) for table in (run.series, run.layers))
    places: dict[str, int] = {}
    for scopes, layers in columns:
        for scope, layer in set(zip(scopes, layers, strict=True)):
            place = index.get(layer_name(scope, layer))
            if place is not None:
                places[layer] = min(place, places.get(layer, place))
    return {
        **{name: value for name, value in verdict.as_json().items() if name != "verdict"},
        "findings": [finding_on_page(finding, places) for finding in verdict],
    }


def finding_on_page(finding: Finding, places: Mapping[str, int]) -> dict[str, Any]:
    """A finding for a page.

    Args:
        finding: the finding.
        places: layer, as in records -> its place in the page's list of layers.
    """
    told = {name: visible(each) if isinstance(each, str) else each for name, each in finding.as_json().items()}
    told["patch"] = "\n".join(map(visible, finding.patch.splitlines()))
    layers = [places[layer] for layer in finding.layers if layer in places]
    del told["layers"]
    return {**told, "places": layers[:MOST_PLACES], "layers_total": len(finding.layers)}


def _fitted(run: RecordedRun, subjects: Subjects) -> tuple[list[FamilySeries], Columns, list[str]]:
    """The families that the overview has, its columns, and what is said of those that are left out."""
    families = sorted(subjects.families, key=lambda one: not one.has_direction)
    notes = []

    def cells(listed: Sequence[FamilySeries]) -> int:
        return sum(len(one.rows) * (len(one.ranks) + (len(one.ranks) > 1)) for one in listed)

    kept = list(families)
    while len(kept) > 1 and cells(kept) * _FEWEST_COLUMNS > _CELLS:
        kept.pop()
    if len(kept) < len(families):
        named = ", ".join(f"{one.family.statistic} of {one.family.tensor}" for one in families[len(kept) :][:5])
        notes.append(
            f"{len(families) - len(kept)} of {len(families)} statistics have no room in this page, such as {named}."
        )
    kept.sort(key=subjects.families.index)
    number = min(max(_CELLS // max(cells(kept), 1), _FEWEST_COLUMNS), _MOST_COLUMNS)
    return kept, Columns.of(run, number), notes


def _exact_steps(columns: Columns) -> list[int]:
    """Iterations whose numbers the page has as they are: the first, the last, and some between them."""
    places = np.unique(np.linspace(0, len(columns) - 1, _EXACT_STEPS).astype(np.int64))
    return [int(columns.last[place]) if place else int(columns.first[0]) for place in places]


class _FamilyOnPage:
    """A family of the page, whose arrays are packed at once."""

    def __init__(self, overview: Overview, packed: Packed) -> None:
        self.overview = overview
        self._packed = packed
        family = overview.family
        row = None if family.request is None else family.request.statistic
        shown = np.concatenate([cells.ravel() for cells in overview.cells.values()])
        signed = family.is_signed
        scale = PackedScale.of(shown, centred=signed)
        self.told: dict[str, Any] = {
            "tensor": visible(family.tensor),
            "statistic": visible(family.statistic),
            "gemm": family.gemm,
            "base": None if row is None else row.name,
            "recipe": None if family.request is None else family.request.recipe,
            "columnwise": family.request is not None and family.request.columnwise,
            "format": format_by_name(family.request),
            "one_scale": one_scale_by_name(family.request),
            "unit": "" if row is None else row.unit,
            "formula": "" if row is None else row.formula,
            "worse": None if family.worse is None else family.worse.value,
            "left": {
                str(rank): packed.put(np.flatnonzero(left).astype(np.int32))
                for rank, left in overview.left.items()
                if left.any()
            },
            "ranks": overview.of.ranks,
            "rows": packed.put(overview.layers.astype(np.int32)),
            "first": packed.put(overview.columns.first.astype(np.int64)),
            "last": packed.put(overview.columns.last.astype(np.int64)),
            "scale": scale.described,
            "cells": {
                str(rank): packed.put(scale.bytes(cells, overview.present[rank]))
                for rank, cells in overview.cells.items()
            },
            "worst": {str(rank): packed.put(narrowed(overview.worst[rank])) for rank in overview.worst},
            "worst_at": {str(rank): packed.put(overview.worst_at[rank]) for rank in overview.worst},
            "last_value": {str(rank): packed.put(narrowed(overview.last[rank])) for rank in overview.last},
            "last_at": {str(rank): packed.put(overview.last_at[rank]) for rank in overview.last},
            "steps": {},
            "curves": {},
        }

    def put_steps(self) -> None:
        """Pack the numbers of the exact steps, as far as they fit."""
        for iteration, of_rank in self.overview.exact.items():
            found = self._packed.try_put(*(narrowed(values) for values in of_rank.values()))
            if found is not None:
                self.told["steps"][str(iteration)] = {
                    str(rank): each for rank, each in zip(of_rank, found, strict=True)
                }


_Entry = tuple[_FamilyOnPage, int, int, int, int]
"""A series: its family, its row, its rank, its number, and how many numbers it has."""


def _put_curves(run: RecordedRun, made: Sequence[_FamilyOnPage], packed: Packed, verdict: Verdict) -> int:
    """Pack whole curves until nothing more fits; those that show findings first.

    Returns:
        The number of curves that the page has.
    """
    seen = {(finding.tensor, finding.statistic): set(finding.layers) for finding in reversed(verdict.findings)}
    order = sorted(_by_interest(made), key=lambda each: not _shows_finding(each, seen, run))
    counts = np.array([count for *_, count in order], np.int64)
    found = 0
    for piece in pieces(counts, 500_000):
        wanted = order[piece]
        table = run.values([series for *_, series, _ in wanted])
        numbers, iterations, values, flags = (
            table[name].to_numpy() for name in ("series", "iteration", "value", "flags")
        )
        misses = 0
        for one, row, rank, series, _ in wanted:
            begin, end = np.searchsorted(numbers, [series, series + 1])
            own = narrowed(values[begin:end])
            arrays = [steps_between(iterations[begin:end]), own]
            left = iterations[begin:end][one.overview.family.leaves_out(flags[begin:end])]
            references = packed.try_put(*arrays, *([left] if left.size else []))
            if references is None:
                misses += 1
                continue
            one.told["curves"][f"{row}:{rank}"] = references
            found += 1
        if misses > len(wanted) // 2:
            break
    return found


def _shows_finding(entry: _Entry, seen: Mapping[tuple[str, str], set[str]], run: RecordedRun) -> bool:
    one, _, _, series, _ = entry
    layers = seen.get((one.overview.family.tensor, one.overview.family.statistic))
    return layers is not None and run.subjects[series].layer in layers


def _by_interest(made: Sequence[_FamilyOnPage]) -> Iterator[_Entry]:
    """The series: of each statistic the worst, then the second worst, ...; then those of layers that are among these,
    then all others, those that a page shows first before the others. Each with its row, rank, number and count."""
    seen: set[int] = set()
    worst_layers: set[int] = set()
    count_of = {
        int(series): int(count)
        for one in made
        for series, count in zip(one.overview.of.series, one.overview.of.count, strict=True)
    }
    directed = sorted(made, key=lambda one: not one.overview.of.has_direction)
    ranked = [one.overview.worst_rows(WORST) for one in directed]

    def entry(one: _FamilyOnPage, row: int, rank: int) -> _Entry | None:
        series = int(one.overview.series[rank][row])
        if series < 0 or series in seen:
            return None
        seen.add(series)
        return one, row, rank, series, count_of[series]

    for place in range(WORST):
        for one, rows in zip(directed, ranked, strict=True):
            if place < len(rows):
                row, rank = rows[place]
                worst_layers.add(int(one.overview.layers[row]))
                found = entry(one, row, rank)
                if found:
                    yield found
    for only_worst in (True, False):
        for one in made:
            for rank in one.overview.series:
                for row, layer in enumerate(one.overview.layers.tolist()):
                    if layer in worst_layers or not only_worst:
                        found = entry(one, row, rank)
                        if found:
                            yield found


class _Histograms:
    """The histograms of the page."""

    def __init__(self, run: RecordedRun, subjects: Subjects, packed: Packed) -> None:
        self._run = run
        self._packed = packed
        self._families = [one for one in subjects.histograms if (one.layer >= 0).all()]
        self._columns = Columns.of(run, _HISTOGRAM_COLUMNS) if self._families else None
        self.told: list[dict[str, Any]] = []
        for one in self._families:
            bins = one.family.bins
            request = one.family.request
            self.told.append(
                {
                    "tensor": visible(one.family.tensor),
                    "statistic": visible(one.family.statistic),
                    "base": None if request is None else request.statistic.name,
                    "unit": "" if request is None else request.statistic.unit,
                    "lowest": bins.lowest,
                    "steps": bins.steps,
                    "number": bins.number,
                    "ranks": one.ranks,
                    "layers": sorted({int(layer) for layer in one.layer}),
                    "counts": {},
                    "ranges": {},
                }
            )

    def put_ranges(self) -> None:
        """Pack the percentiles of the exponents of all layers."""
        for one, told in zip(self._families, self.told, strict=True):
            if told["base"] != "exponent_histogram" or self._columns is None:
                continue
            rows, columns = one.rows, self._columns
            of_rank = {rank: np.full((len(rows), 2 + len(PERCENTS), len(columns)), -1, np.int16) for rank in one.ranks}
            for histogram in histograms(self._run, one, columns):
                row = np.searchsorted(rows, histogram.layer)
                of_rank[histogram.rank][row][:, columns.column_of(histogram.columns.first)] = histogram.percentiles().T
            used = np.flatnonzero(np.any([(found >= 0).any((0, 1)) for found in of_rank.values()], 0))
            kept = columns.take(used)
            arrays = [found[:, :, used] for found in of_rank.values()]
            packed = self._packed.try_put(rows.astype(np.int32), kept.first, kept.last, *arrays)
            if packed is not None:
                told["rows"], told["first"], told["last"] = packed[:3]
                told["ranges"] = {str(rank): found for rank, found in zip(of_rank, packed[3:], strict=True)}

    def put_counts(self, worst: Sequence[int], most: int) -> None:
        """Pack the counts: of the worst layers first.

        Args:
            worst: layers.
            most: the size of all arrays that they may lead to.
        """
        if self._columns is None:
            return
        first = set(worst)
        for only_worst in (True, False):
            for one, told in zip(self._families, self.told, strict=True):
                wanted = {
                    int(series)
                    for series, layer in zip(one.series, one.layer, strict=True)
                    if (int(layer) in first) == only_worst
                }
                for histogram in histograms(self._run, one, self._columns, wanted):
                    if self._packed.size > most:
                        return
                    found = self._packed.try_put(
                        narrowed(histogram.counts), histogram.columns.first, histogram.columns.last
                    )
                    if found is None:
                        return
                    key = f"{histogram.layer}:{histogram.rank}"
                    told["counts"][key] = {"arrays": found, "lowest": histogram.lowest}


def _run(run: RecordedRun) -> dict[str, Any]:
    return {
        "path": visible(str(run.path)),
        "id": visible(run.run_id),
        "source": run.source,
        "segments": facts.segments(run),
        "name": visible(folder_name(run)),
        "duration": facts.duration(run),
        "trainer": facts.trainer_steps(run),
        "coverage": facts.coverage(run),
        "outcome": [visible(line) for line in outcome_in_words(run)],
        "other_steps": [visible(line) for line in other_steps_of_run(run)],
        "states": run.states.to_pylist(),
        "plan": facts.plan(run),
        **dict(zip(("events", "events_total"), facts.events(run), strict=True)),
    }


def _layers(run: RecordedRun, subjects: Subjects) -> list[dict[str, Any]]:
    known: Mapping[str, dict[str, Any]] = facts.layer_facts(run)
    products = facts.gemms(run)
    return [
        {
            **layer.told,
            "facts": known.get(layer.name, {}),
            "gemms": products.get(layer.name, []),
            "formats": _own_formats(products.get(layer.name, [])),
        }
        for layer in subjects.layers
    ]


def _own_formats(products: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """What each tensor is quantized to in the products of a layer."""
    tensors = dict.fromkeys(tensor for each in products for tensor in each["operands"])
    return {tensor: OwnFormat.of(formats_of(products, tensor))._asdict() for tensor in tensors}


def _scalars(run: RecordedRun, packed: Packed) -> list[dict[str, Any]]:
    found = []
    for curve in facts.scalars(run):
        arrays = packed.try_put(curve.iterations, narrowed(curve.values))
        if arrays is not None:
            found.append(
                {"name": visible(curve.name), "total": curve.total, "shown": len(curve.values), "arrays": arrays}
            )
    return found


def _free(run: RecordedRun, subjects: Subjects, packed: Packed) -> list[dict[str, Any]]:
    """The numbers that a user's features have logged under free names, without a layer."""
    found = []
    for one in subjects.free:
        for series, rank in zip(one.series.tolist(), one.rank.tolist(), strict=True):
            table = run.values([series])
            arrays = packed.try_put(table["iteration"].to_numpy(), narrowed(table["value"].to_numpy()))
            if arrays is not None:
                name = visible(one.family.statistic) + ("" if rank == REDUCED else f" (rank {rank})")
                found.append({"name": name, "total": len(table), "shown": len(table), "arrays": arrays})
    return found
