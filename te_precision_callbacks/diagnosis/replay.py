"""Diagnosis of a recorded run, with the same engine as for a live run."""

from __future__ import annotations

import dataclasses
import json
import os
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import OF_SPANS, Facts, Row, Settings
from te_precision_callbacks.diagnosis.finding import SEVERITIES, Finding, Verdict
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.diagnosis.rules import RULE_OF_ID, RULES
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.runs.index import REDUCED
from te_precision_callbacks.runs.summary import failed_starts
from te_precision_callbacks.runs.tables import STEP0
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.statistics.series import Series, family_of

_ON_NUMBERS = {rule.id: rule for rule in RULES if type(rule.check()).step is not RuleCheck.step}
"""The rules on statistics. All others check facts and trainer metrics, which are the same on all ranks."""

_LOG_DECIMALS = 4
_SIGNED = ("min", "mean")


def diagnose(run: RecordedRun | str | os.PathLike[str]) -> Verdict:
    """Check a recorded run, or the path of a log folder or of an nvidia-dlfw-inspect log, by the rules.

    As in a live run, reduced values are checked together with the local values of the first rank. The local values of
    other ranks follow one rank at a time, to limit memory.

    Raises:
        RunError: the path has no readable run.
    """
    run = run if isinstance(run, RecordedRun) else open_run(run)
    record = _Record(run)
    ranks: list[int] = np.unique(record.rank_of_series).tolist()
    several = len(set(ranks) - {REDUCED}) > 1 or any(segment.world > 1 for segment in run.segments)
    first = max(0, min(ranks, default=0))  # rank 0 has checked reduced values
    own = _check(run, record, (REDUCED, first), first if several else None, RULES)
    others = [_check(run, record, (rank,), rank, _ON_NUMBERS.values()) for rank in ranks if rank > first]
    return dataclasses.replace(own.merge_ranks(others), is_partial=bool(run.unread))


_FromRank = tuple[str, Sighting, int]
"""A sighting of another rank: its rule, itself, and the rank."""


class _LoggedData(NamedTuple):
    scalars: dict[str, float]
    from_ranks: list[_FromRank]
    events: list[tuple[int, Event]]


class _Record:
    """The record of a run without its statistics.

    Attributes:
        rank_of_series: [series]: the rank, or ``REDUCED``.
        saved: checkpoints: the next iteration, and the file if it is known.
        of_unknown_rules: the recorded findings of rules that this version lacks.
        ends: how the last start of the run ended, with the rank that recorded it.
        last: the last iteration with records or facts.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.rank_of_series = run.series["rank"].fill_null(REDUCED).to_numpy().astype(np.int64)
        self.ends: list[tuple[int, Event]] = []
        self.of_unknown_rules: list[Finding] = []
        events = [row for row in run.events.to_pylist() if row["iteration"] is not None]
        self.saved = [
            (row["iteration"], str(_data(row).get("file", ""))) for row in events if row["kind"] == "checkpoint_saved"
        ]
        logged: dict[tuple[int, bool], _LoggedData] = {}
        for part in run.scalars.to_batches(max_chunksize=1 << 16):  # Python objects take ten times the memory
            columns = part["iteration"], part["name"].cast(pa.string()), part["value"]
            lists = (column.to_numpy(zero_copy_only=False).tolist() for column in columns)
            for iteration, name, value in zip(*lists, strict=True):
                logged.setdefault((iteration, False), _LoggedData({}, [], [])).scalars[name] = value
        for row in sorted(events, key=lambda row: row["rank"] or 0):
            # Parameters are checked after the step's statistics.
            is_after = row["phase"] == "step" and row["kind"] in ("parameters", "first_nonfinite")
            of_step = logged.setdefault((row["iteration"], is_after), _LoggedData({}, [], []))
            event = _event(row)
            rank = 0 if event.data.get("of_all") else row["rank"] or 0
            if row["kind"] == "segment_ended":
                if row["segment"] == run.segments[-1].number:
                    self.ends.append((rank, event))
            elif row["kind"] != "finding":
                of_step.events.append((rank, event))
            elif event.data.get("rule") not in RULE_OF_ID:
                self.of_unknown_rules += _recorded_finding(event.data)
            elif (sighting := _from_rank(row)) is not None:
                of_step.from_ranks.append(sighting)
        self.ends += [(0, Event("earlier_start", text, step)) for step, text in failed_starts(run)]
        last = run.segments[-1] if run.segments else None
        if last is not None and (last.without_end or last.lost or last.status == "stopped without an end"):
            recorded = (run.steps["iteration"], run.scalars["iteration"])
            step = max((column[-1].as_py() for column in recorded if len(column)), default=0)
            text = f"{last.who_stopped} stopped after step {step} without recording an end"
            if last.lost:
                text = f"the records end after step {step}, since they could not be written: {last.lost}"
            self.ends.append((0, Event("stopped", text, step, data={"is_lost": bool(last.lost)})))
        self.logged = sorted(logged.items(), key=lambda item: item[0])
        self._tables: dict[str, list[Row]] = {name: getattr(run, name).to_pylist() for name in (*OF_SPANS, "states")}
        self._settings: list[tuple[int, Settings | None]] = []
        begins = {0}
        ends = set()
        for segment in run.segments:
            self._settings.append((segment.first_iteration, Settings.from_run(segment.facts)))
            begins.add(segment.first_iteration)
        for row in chain.from_iterable(map(self._tables.__getitem__, OF_SPANS)):
            begins.add(row["since"] or 0)
            if row["until"] is not None:
                ends.add(row["until"] + 1)
        last = run.steps["iteration"].to_numpy().max(initial=0)
        self.last = max(int(last), *begins)  # there may be no values
        self._edges = np.array(sorted(begins | ends), np.int64)

    def span_index(self, iteration: int) -> int:
        """The index of the span of iterations with the same facts."""
        return int(np.searchsorted(self._edges, iteration, side="right"))

    def facts(self, iteration: int) -> Facts:
        current = None
        for first, settings in self._settings:
            if first <= iteration:
                current = settings
        return Facts.from_tables(self._tables, iteration, current)


def _check(
    run: RecordedRun, record: _Record, ranks: tuple[int, ...], rank: int | None, rules: Iterable[Rule]
) -> Diagnosis:
    diagnosis = Diagnosis(rules)
    diagnosis.has_run = bool(len(run.steps) or run.unread or run.missing_contents)
    for iteration, file in record.saved:
        diagnosis.note_checkpoint(iteration, file)
    logged = deque(record.logged if REDUCED in ranks else ())
    place = -1

    def check_logged(until: tuple[int, bool]) -> None:
        while logged and logged[0][0] <= until:
            (iteration, _), of_step = logged.popleft()
            check_facts(iteration)
            if of_step.scalars:
                diagnosis.scalars(iteration, of_step.scalars)
            for of_rank in of_step.from_ranks:
                diagnosis.add_sighting(iteration, *of_rank)
            for rank_of_event, event in of_step.events:
                diagnosis.event(event, rank_of_event or None)

    def check_facts(iteration: int) -> None:
        nonlocal place
        if record.span_index(iteration) != place:
            place = record.span_index(iteration)
            diagnosis.set_facts(record.facts(iteration), iteration)

    chosen = np.flatnonzero(np.isin(record.rank_of_series, ranks))
    series = []
    for number in chosen.tolist():
        subject = run.subjects[number]
        family = family_of(subject.tensor, subject.statistic, subject.gemm or None)
        series.append(Series(subject.layer, family))
    splitter = Splitter(series.__getitem__)
    for iteration, numbers, values, unscaled in _steps(run, chosen):
        check_logged((iteration, False))
        check_facts(iteration)
        is_local = (record.rank_of_series[chosen[numbers]] != REDUCED).all()
        layers = frozenset(series[number].layer for number in set(numbers[unscaled].tolist()))
        diagnosis.step(splitter.step(iteration, numbers, values, layers, rank if is_local else None))
    if logged:
        check_logged(logged[-1][0])
    for finding in reversed(record.of_unknown_rules) if REDUCED in ranks else ():  # the last one is the worst
        diagnosis.adopt(finding)
    check_facts(record.last)
    for rank_of_event, event in record.ends if REDUCED in ranks else ():
        diagnosis.event(event, rank_of_event or None)
    return diagnosis


def _steps(run: RecordedRun, chosen: Ints) -> Iterator[tuple[int, npt.NDArray[np.int32], Floats, Mask]]:
    table = run.values(chosen.tolist())
    if run.missing_contents:
        table = table.filter(pa.array(_are_known(run, table["series"].to_numpy(), table["value"].to_numpy())))
    iterations = table["iteration"].to_numpy()
    order = np.argsort(iterations, kind="stable")  # within a step by series, as in the table
    iterations = iterations[order]
    values = table["value"].to_numpy()[order]
    numbers = np.searchsorted(chosen, table["series"].to_numpy()[order]).astype(np.int32)
    unscaled = (table["flags"].fill_null(0).to_numpy()[order] & STEP0) != 0
    steps, begins = np.unique(iterations, return_index=True)
    edges = [*begins.tolist(), len(iterations)]
    for iteration, begin, end in zip(steps.tolist(), edges[:-1], edges[1:], strict=True):
        yield iteration, numbers[begin:end], values[begin:end], unscaled[begin:end]


def _are_known(run: RecordedRun, series: npt.NDArray[np.int32], values: Floats) -> Mask:
    """Return False for the zeros of magnitudes in a log with four decimals, since the values may only be small."""
    finite = values[np.isfinite(values)]
    if (finite.round(_LOG_DECIMALS) != finite).any():
        return np.ones(len(values), bool)
    magnitudes = []
    for number, subject in enumerate(run.subjects):
        request = logged_request(subject.statistic) if subject.tensor else None
        if request is not None and request.statistic.name not in _SIGNED and "the tensor" in request.statistic.unit:
            magnitudes.append(number)
    are_known: Mask = (values != 0) | ~np.isin(series, magnitudes)
    return are_known


def _event(row: Row) -> Event:
    return Event(
        row["kind"],
        row["text"] or "",
        row["iteration"],
        row["severity"],
        row["phase"],
        row["layer"] or "",
        row["tensor"] or "",
        row["gemm"] or "",
        _data(row),
        wall_time=0.0,
    )


def _data(row: Row) -> dict[str, Any]:
    try:
        data = json.loads(row["data"] or "{}")
    except (ValueError, RecursionError):
        return {}
    if isinstance(data, dict):
        return data
    return {}


def _recorded_finding(data: Mapping[str, Any]) -> list[Finding]:
    """The finding in an event, as a list; empty if the event is incomplete."""
    try:
        known = {field.name: data[field.name] for field in dataclasses.fields(Finding)}
        finding = Finding(**{**known, "layers": tuple(data["layers"]), "ranks": tuple(data["ranks"])})
    except (TypeError, KeyError):
        return []
    return [finding] if finding.severity in SEVERITIES else []


def _from_rank(row: Row) -> _FromRank | None:
    """The sighting in an event of another rank; None if that rank's values are recorded, and so checked directly."""
    try:
        data = _data(row)
        rule, (rank, *_), severity = data["rule"], data["ranks"], data["severity"]
        texts: dict[str, Any] = {name: str(data[name]) for name in ("seen", "tensor", "statistic", "patch", "remedy")}
        sighting = Sighting(layers=tuple(map(str, data["layers"])), since=data["since"], severity=severity, **texts)
    except (ValueError, TypeError, KeyError):
        return None
    if rule not in _ON_NUMBERS and severity in SEVERITIES:
        return (rule, sighting, rank)
    return None
