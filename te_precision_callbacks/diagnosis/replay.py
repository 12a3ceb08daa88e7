"""Diagnosis of a recorded run, with the same engine as for a live run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import merge
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import OF_SPANS, UNKNOWN, Facts, Row, Settings
from te_precision_callbacks.diagnosis.finding import SEVERITIES, Finding, Verdict
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.diagnosis.rule import Rule
from te_precision_callbacks.diagnosis.rules import ROWS
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.runs.summary import failed_starts
from te_precision_callbacks.runs.tables import REDUCED, STEP0
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.series import Series, family_of

_ON_NUMBERS = [row for row in ROWS if hasattr(row.check(), "step")]
"""The rules on statistics. All others check facts and trainer metrics, which are the same on all ranks."""

_LOG_DECIMALS = 4
_SIGNED = ("min", "mean")


class _Call(NamedTuple):
    """A call of a method of :class:`Diagnosis`, and its place in the order of an iteration."""

    iteration: float
    order: int
    method: str
    arguments: tuple[Any, ...]


FACTS, SCALARS, FINDINGS, EVENTS, STEP, AFTER_STEP = range(6)
"""The order of the calls in an iteration."""

_IN_ORDER = attrgetter("iteration", "order")


def diagnose(run: RecordedRun | str | os.PathLike[str]) -> Verdict:
    """Check a recorded run, or the path of a log folder or of an nvidia-dlfw-inspect log, by the rules.

    As in a live run, reduced values are checked together with the local values of the first rank. The local values of
    other ranks follow one rank at a time, to limit memory.

    Raises:
        RunError: the path has no readable run.
    """
    run = run if isinstance(run, RecordedRun) else open_run(run)
    rank_of_series = run.series["rank"].fill_null(REDUCED).to_numpy().astype(np.int64)
    ranks: list[int] = np.unique(rank_of_series).tolist()
    has_several = len(set(ranks) - {REDUCED}) > 1 or any(segment.world > 1 for segment in run.segments)
    first = max(0, min(ranks, default=0))  # rank 0 has checked reduced values
    logged = sorted(_logged(run), key=_IN_ORDER)

    def check(rows: Iterable[Rule], ranks: tuple[int, ...], rank: int | None, logged: Sequence[_Call]) -> Diagnosis:
        diagnosis = Diagnosis(rows)
        diagnosis.has_run = bool(len(run.steps) or run.unread or run.missing_contents)
        steps = _steps(run, np.flatnonzero(np.isin(rank_of_series, ranks)), rank_of_series, rank)
        for call in merge(_facts(run), logged, steps, key=_IN_ORDER):
            getattr(diagnosis, call.method)(*call.arguments)
        return diagnosis

    diagnosis = check(ROWS, (REDUCED, first), first if has_several else None, logged)
    for rank in ranks:
        if rank > first:
            diagnosis.add_rank(check(_ON_NUMBERS, (rank,), rank, ()))
    return dataclasses.replace(diagnosis.verdict, is_partial=bool(run.unread))


def _facts(run: RecordedRun) -> Iterator[_Call]:
    """The facts of each span of iterations."""
    tables: dict[str, list[Row]] = {name: getattr(run, name).to_pylist() for name in (*OF_SPANS, "states")}
    settings = [(segment.first_iteration, Settings.from_run(segment.facts)) for segment in run.segments]
    rows = [row for name in OF_SPANS for row in tables[name]]
    begins = {0, *(first for first, _ in settings), *(row["since"] or 0 for row in rows)}
    ends = {row["until"] + 1 for row in rows if row["until"] is not None}
    last = max(int(run.steps["iteration"].to_numpy().max(initial=0)), *begins)  # there may be no values
    for iteration in sorted(begins | ends):
        if iteration <= last:
            current = [UNKNOWN, *(entry for first, entry in settings if first <= iteration)][-1]
            facts = Facts.from_tables(tables, iteration, current)
            yield _Call(iteration, FACTS, "set_facts", (facts, iteration))


def _logged(run: RecordedRun) -> Iterator[_Call]:
    """The trainer's metrics, the events, the findings of other ranks, and how the last start of the run ended."""
    scalars: dict[int, dict[str, float]] = {}
    for name, curve in run.curves.items():
        for iteration, value in zip(curve.iterations.tolist(), curve.values.tolist(), strict=True):
            scalars.setdefault(iteration, {})[name] = value
    for iteration, values in scalars.items():
        yield _Call(iteration, SCALARS, "scalars", (iteration, values))
    for row in sorted(run.events.to_pylist(), key=lambda row: row["rank"] or 0):
        iteration = row["iteration"]
        if iteration is None:
            continue
        event = _event(row)
        if event.kind == "checkpoint_saved":
            yield _Call(-1, EVENTS, "note_checkpoint", (iteration, str(event.data.get("file", ""))))
        if event.kind == "finding":
            for finding in _recorded_finding(event.data):
                if finding.title not in {row.title for row in (_ON_NUMBERS if finding.ranks else ROWS)}:
                    yield _Call(iteration, FINDINGS, "adopt", (finding,))
                elif finding.severity == "error" and not finding.ranks and len(run.segments) > 1:
                    yield _Call(math.inf, AFTER_STEP, "adopt_missing", (finding,))
            continue
        order = EVENTS
        if event.kind == "segment_ended":
            if row["segment"] != run.segments[-1].number:
                continue
            iteration = math.inf
        elif event.phase == "step" and event.kind in ("parameters", "first_nonfinite"):
            order = AFTER_STEP  # parameters are checked after the step's statistics
        rank = None if event.data.get("of_all") else row["rank"] or None
        yield _Call(iteration, order, "event", (event, rank))
    for step, text in failed_starts(run):
        yield _Call(math.inf, EVENTS, "event", (Event("earlier_start", text, step),))
    for last in run.segments[-1:]:
        recorded = (run.steps["iteration"], run.scalars["iteration"])
        step = max((column[-1].as_py() for column in recorded if len(column)), default=0)
        text = f"{last.who_stopped} stopped after step {step} without recording an end"
        if last.lost:
            text = f"the records end after step {step}, since they could not be written: {last.lost}"
        if last.without_end or last.lost or last.status == "stopped without an end":
            stopped = Event("stopped", text, step, data={"is_lost": bool(last.lost)})
            yield _Call(math.inf, EVENTS, "event", (stopped,))


def _steps(run: RecordedRun, chosen: Ints, rank_of_series: Ints, rank: int | None) -> Iterator[_Call]:
    """The values of some series; ``rank``: the rank of series that are not reduced."""
    series = {}
    for number in chosen.tolist():
        subject = run.subjects[number]
        series[number] = Series(subject.layer, family_of(subject.tensor, subject.statistic, subject.gemm or None))
    table = run.values(list(series))
    if run.missing_contents:
        table = table.filter(pa.array(_are_known(series, table["series"].to_numpy(), table["value"].to_numpy())))
    iterations = table["iteration"].to_numpy()
    order = np.argsort(iterations, kind="stable")  # within a step by series, as in the table
    values = table["value"].to_numpy()[order]
    numbers = table["series"].to_numpy()[order]
    unscaled = (table["flags"].fill_null(0).to_numpy()[order] & STEP0) != 0
    splitter = Splitter(series.__getitem__)
    steps, begins = np.unique(iterations[order], return_index=True)
    edges = [*begins.tolist(), len(iterations)]
    for iteration, begin, end in zip(steps.tolist(), edges[:-1], edges[1:], strict=True):
        part = numbers[begin:end]
        is_local = (rank_of_series[part] != REDUCED).all()
        layers = frozenset(series[number].layer for number in part[unscaled[begin:end]].tolist())
        step = splitter.step(iteration, part, values[begin:end], layers, rank if is_local else None)
        yield _Call(iteration, STEP, "step", (step,))


def _are_known(series: Mapping[int, Series], numbers: npt.NDArray[np.int32], values: Floats) -> Mask:
    """Return False for the zeros of magnitudes in a log with four decimals, since the values may only be small."""
    magnitudes = []
    for number, (_, family) in series.items():
        statistic = family.request and family.request.statistic
        if statistic and statistic.name not in _SIGNED and "the tensor" in statistic.unit:
            magnitudes.append(number)
    finite = values[np.isfinite(values)]
    are_known: Mask = (values != 0) | ~np.isin(numbers, magnitudes) | (finite.round(_LOG_DECIMALS) != finite).any()
    return are_known


def _event(row: Row) -> Event:
    columns = ("kind", "text", "iteration", "severity", "phase", "layer", "tensor", "gemm")
    values: dict[str, Any] = {name: row[name] for name in columns if row[name] is not None}
    try:
        data = json.loads(row["data"] or "{}")
    except (ValueError, RecursionError):
        data = {}
    return Event(**{"text": "", **values}, data=data if isinstance(data, dict) else {}, wall_time=0.0)


def _recorded_finding(data: Mapping[str, Any]) -> list[Finding]:
    """The finding in an event, as a list; empty if the event is incomplete."""
    try:
        values = {field.name: data[field.name] for field in dataclasses.fields(Finding)}
        finding = Finding(**{**values, "layers": tuple(data["layers"]), "ranks": tuple(data["ranks"])})
    except (TypeError, KeyError):
        return []
    return [finding] if finding.severity in SEVERITIES else []
