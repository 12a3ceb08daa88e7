"""What is shown of a recorded run, read from its files."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.comparing.facts import precision_shares
from te_precision_callbacks.errors import PrecisionDebugError
from te_precision_callbacks.statistics.names import Request, logged_request
from te_precision_callbacks.statistics.series import Family, family_of
from te_precision_callbacks.statistics.table import Of, Worse
from te_precision_callbacks.store import RecordedRun
from te_precision_callbacks.store.tables import STEP0

MOST_LAYERS = 3
"""The layers that are shown of each statistic."""

MOST_STATISTICS = 8
"""The statistics that are shown unless some are chosen."""

MOST_EVENTS = 5

_CONSIDERED = 4
"""How many times as many series are read as are shown: the worst number of some is of a step that does not count."""

_LOST = (Of.QUANTIZED, Of.LOSSES, Of.SCALE_LIMITS)


class NothingToShowError(PrecisionDebugError, ValueError):
    """A run has no numbers, or none of a statistic that is asked for."""


@dataclass(frozen=True)
class Curve:
    """The numbers of a series.

    Attributes:
        iterations: [n], ascending.
        values: [n].
    """

    iterations: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]


@dataclass(frozen=True)
class WorstSeries:
    """A statistic of one tensor, among the worst of the run.

    Attributes:
        scope, layer, tensor: what.
        statistic: its name.
        rank: the rank whose own number it is; None if it is reduced.
        last, last_iteration: the last number.
        worst, worst_iteration: the worst one.
        low_is_worse: whether small numbers are.
        curve: all of them.
    """

    scope: str
    layer: str
    tensor: str
    statistic: str
    rank: int | None
    last: float
    last_iteration: int
    worst: float
    worst_iteration: int
    low_is_worse: bool
    curve: Curve


@dataclass(frozen=True)
class ScalarCurve:
    """A number of the trainer: its name, and its curve."""

    name: str
    curve: Curve


@dataclass(frozen=True)
class Event:
    """Something that happened, as in the store's table of events, on one rank or on several alike."""

    iteration: int | None
    ranks: tuple[int, ...]
    kind: str
    severity: str
    layer: str
    text: str


@dataclass(frozen=True)
class RunView:
    """What is shown of a run.

    Attributes:
        path, run_id, source: which run.
        status: that of its last segment.
        segments: how many process starts it has.
        facts: of the last segment, those that fit on a line: front door, recipes, GPU, ranks.
        first, last: the first and the last iteration with numbers; None without any.
        steps: how many iterations have records.
        series: how many series there are.
        coverage: precision -> its share of the multiply-adds; empty if that was not recorded.
        scalars: the trainer's numbers, the loss first.
        worst: statistic -> the tensors that are worst by it.
        more_statistics: the statistics that are not shown.
        events: the last ones, the newest last.
        notes: what is missing or damaged.
    """

    path: str
    run_id: str
    source: str
    status: str
    segments: int
    facts: dict[str, str]
    first: int | None
    last: int | None
    steps: int
    series: int
    coverage: dict[str, float]
    scalars: tuple[ScalarCurve, ...]
    worst: dict[str, tuple[WorstSeries, ...]]
    more_statistics: tuple[str, ...]
    events: tuple[Event, ...]
    notes: tuple[str, ...]

    @property
    def is_empty(self) -> bool:
        """Whether there is no number yet."""
        return not self.series and not self.scalars


def look(run: RecordedRun, statistics: Sequence[str] = (), most: int = MOST_LAYERS) -> RunView:
    """Read what is shown of a run.

    Args:
        run: the run.
        statistics: those that are shown, as in records, or without recipe and direction; none chooses what is lost in
            quantization first.
        most: the layers of each.

    Raises:
        NothingToShowError: the run has numbers, but none of a statistic that is asked for.
    """
    groups = _groups(run)
    chosen = _chosen(groups, statistics, run)
    segment = run.segments[-1] if run.segments else None
    first, last = (run.series[name].to_pylist() for name in ("first", "last"))
    return RunView(
        path=str(run.path),
        run_id=run.run_id,
        source=run.source,
        status=segment.status if segment else "unknown",
        segments=len(run.segments),
        facts={} if segment is None else _in_short(segment.facts, segment.world),
        first=min(first, default=None),
        last=max(last, default=None),
        steps=len(run.steps),
        series=len(run.series),
        coverage=precision_shares(run),
        scalars=tuple(_scalars(run)),
        worst={name: tuple(_worst(run, groups[name], most)) for name in chosen},
        more_statistics=tuple(name for name in groups if name not in chosen),
        events=tuple(_events(run)),
        notes=run.notes,
    )


_SHORT = {"front_door": "front door", "recipes": "recipe", "gpu": "GPU", "te_backend": "Transformer Engine"}


def _in_short(facts: Any, world: int) -> dict[str, str]:
    told = {}
    for key, name in _SHORT.items():
        value = facts.get(key)
        if value:
            told[name] = ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
    return {**told, "ranks": str(world)}


@dataclass(frozen=True)
class _Series:
    """A row of the table of series, with how bad its worst number is."""

    number: int
    scope: str
    layer: str
    rank: int | None
    family: Family
    bad: float


def _groups(run: RecordedRun) -> dict[str, list[_Series]]:
    """Statistic -> its series, the worst first; the statistics as they are shown. What has no worse direction is left
    out."""
    columns = ("scope", "layer", "tensor", "statistic", "gemm", "rank", "low", "high", "count")
    rows = zip(*(run.series[name].to_pylist() for name in columns), strict=True)
    families: dict[tuple[str, str, str], Family] = {}
    found: dict[str, list[_Series]] = {}
    for number, (scope, layer, tensor, statistic, gemm, rank, low, high, count) in enumerate(rows):
        key = (tensor or "", statistic, gemm or "")
        family = families.get(key)
        if family is None:
            family = families[key] = family_of(*key)
        if family.worse in (None, Worse.NEITHER) or not count:
            continue
        bad = max((family.badness(value) for value in (low, high) if value is not None), default=math.inf)
        found.setdefault(statistic, []).append(_Series(number, scope or "", layer or "", rank, family, bad))
    for group in found.values():
        group.sort(key=lambda series: -series.bad)
    return {name: found[name] for name in sorted(found, key=lambda name: _rank(found[name][0].family.request))}


def _rank(request: Request | None) -> tuple[int, str]:
    if request is None:
        return 3, ""
    if request.statistic.name == "nonfinite_num":
        return 0, request.label
    return (1 if request.statistic.of in _LOST else 2), request.label


def _chosen(groups: dict[str, list[_Series]], wanted: Sequence[str], run: RecordedRun) -> list[str]:
    if not wanted:
        # What is the same everywhere, such as no overflow at all, tells no layer.
        telling = [name for name in groups if len({series.bad for series in groups[name]}) > 1]
        return (telling or list(groups))[:MOST_STATISTICS]
    found = []
    for name in wanted:
        matching = [label for label in groups if name in (label, _plain(label))]
        if not matching and groups:
            raise NothingToShowError(
                f"{run.path} has no numbers of {name!r} that have a worst layer. It has: {', '.join(groups)}."
            )
        found += matching
    return list(dict.fromkeys(found))


def _plain(label: str) -> str:
    request = logged_request(label)
    return label if request is None else request.statistic.name


def _worst(run: RecordedRun, group: Sequence[_Series], most: int) -> Iterable[WorstSeries]:
    """The worst series by a statistic, by their numbers that count: those of delayed scaling's first step do not."""
    considered = {series.number: series for series in group[: most * _CONSIDERED]}
    table = run.values(considered)
    numbers, iterations = table["series"].to_numpy(), table["iteration"].to_numpy()
    values, flags = table["value"].to_numpy(), table["flags"].fill_null(0).to_numpy()
    found: list[tuple[float, WorstSeries]] = []
    for number, series in considered.items():
        chosen = slice(*np.searchsorted(numbers, (number, number + 1)).tolist())
        curve = Curve(iterations[chosen], values[chosen])
        if not len(curve.values):
            continue
        bad = [series.family.badness(value) for value in curve.values.tolist()]
        if series.family.is_of_delayed_scaling and not (flags[chosen] & STEP0).all():
            bad = np.where(flags[chosen] & STEP0, -np.inf, bad).tolist()
        place = int(np.argmax(bad))
        worst = WorstSeries(
            series.scope,
            series.layer,
            series.family.tensor,
            series.family.statistic,
            series.rank,
            float(curve.values[-1]),
            int(curve.iterations[-1]),
            float(curve.values[place]),
            int(curve.iterations[place]),
            series.family.worse is Worse.LOW,
            curve,
        )
        found.append((series.family.badness(worst.worst), worst))
    found.sort(key=lambda both: -both[0])
    return [worst for _, worst in found[:most]]


def _scalars(run: RecordedRun) -> Iterable[ScalarCurve]:
    names = np.array(run.scalars["name"].to_pylist(), dtype=object)
    iterations, values = run.scalars["iteration"].to_numpy(), run.scalars["value"].to_numpy()
    for name in sorted(set(names.tolist()), key=lambda name: ("loss" not in name, name)):
        chosen = names == name
        yield ScalarCurve(name, Curve(iterations[chosen], values[chosen]))


def _events(run: RecordedRun) -> Iterable[Event]:
    for row in run.events_of_ranks()[-MOST_EVENTS:]:
        yield Event(
            row["iteration"],
            tuple(row["ranks"]),
            row["kind"] or "",
            row["severity"] or "",
            row["layer"] or "",
            row["text"] or "",
        )
