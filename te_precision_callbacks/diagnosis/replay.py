"""Diagnosis of a recorded run, with the same engine as for a live run."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from operator import methodcaller
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import OF_SPANS, UNKNOWN, Facts, Row, Settings
from te_precision_callbacks.diagnosis.finding import SEVERITIES, Finding, Verdict
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck
from te_precision_callbacks.diagnosis.rules import ROWS
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.runs.summary import failed_starts
from te_precision_callbacks.runs.tables import REDUCED, STEP0
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.statistics.series import Series, family_of

_ON_NUMBERS = [row for row in ROWS if type(row.check()).step is not RuleCheck.step]
"""The rules on statistics. All others check facts and trainer metrics, which are the same on all ranks."""

_LOG_DECIMALS = 4
_SIGNED = ("min", "mean")


_Call = tuple[float, int, Callable[[Diagnosis], object]]
"""A call of a diagnosis: the iteration, its place in the order of an iteration, and the call."""

FACTS, SCALARS, FINDINGS, EVENTS, STEP, AFTER_STEP = range(6)
"""The order of the calls in an iteration."""


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
    facts = list(_facts(run))

    def check(rows: Iterable[Rule], ranks: tuple[int, ...], rank: int | None, logged: Sequence[_Call]) -> Diagnosis:
        diagnosis = Diagnosis(rows)
        diagnosis.has_run = bool(len(run.steps) or run.unread or run.missing_contents)
        steps = _steps(run, np.flatnonzero(np.isin(rank_of_series, ranks)), rank_of_series, rank)
        for _, _, call in sorted([*facts, *logged, *steps], key=lambda call: call[:2]):
            call(diagnosis)
        return diagnosis

    diagnosis = check(ROWS, (REDUCED, first), first if has_several else None, list(_logged(run)))
    others = [check(_ON_NUMBERS, (rank,), rank, ()) for rank in ranks if rank > first]
    return dataclasses.replace(diagnosis.merge_ranks(others), is_partial=bool(run.unread))


def _facts(run: RecordedRun) -> Iterator[_Call]:
    """The facts of each span of iterations."""
    tables: dict[str, list[Row]] = {name: getattr(run, name).to_pylist() for name in (*OF_SPANS, "states")}
    settings = [(segment.first_iteration, Settings.from_run(segment.facts)) for segment in run.segments]
    rows = [*chain.from_iterable(map(tables.__getitem__, OF_SPANS))]
    begins = {0, *(first for first, _ in settings), *(row["since"] or 0 for row in rows)}
    ends = {row["until"] + 1 for row in rows if row["until"] is not None}
    last = max(int(run.steps["iteration"].to_numpy().max(initial=0)), *begins)  # there may be no values

    def set_facts(iteration: int, diagnosis: Diagnosis) -> None:
        current = [UNKNOWN, *(entry for first, entry in settings if first <= iteration)]
        facts = Facts.from_tables(tables, iteration, current[-1])
        diagnosis.set_facts(facts, iteration)

    for iteration in begins | ends:
        if iteration <= last:
            yield iteration, FACTS, partial(set_facts, iteration)


def _logged(run: RecordedRun) -> Iterator[_Call]:
    """The trainer's metrics, the events, the findings of other ranks, and how the last start of the run ended."""
    scalars: dict[int, dict[str, float]] = {}
    for name, curve in run.curves.items():
        for iteration, value in zip(curve.iterations.tolist(), curve.values.tolist(), strict=True):
            scalars.setdefault(iteration, {})[name] = value
    for iteration, values in scalars.items():
        yield iteration, SCALARS, methodcaller("scalars", iteration, values)
    for row in sorted(run.events.to_pylist(), key=lambda row: row["rank"] or 0):
        iteration = row["iteration"]
        if iteration is None:
            continue
        event = _event(row)
        rank = None if event.data.get("of_all") else row["rank"] or None
        call = methodcaller("event", event, rank)
        if row["kind"] == "checkpoint_saved":
            yield -1, EVENTS, methodcaller("note_checkpoint", iteration, str(event.data.get("file", "")))
        if row["kind"] == "finding":
            for finding in _recorded_finding(event.data):
                yield iteration, FINDINGS, methodcaller("adopt", finding)
        elif row["kind"] != "segment_ended":
            # Parameters are checked after the step's statistics.
            is_after = row["phase"] == "step" and row["kind"] in ("parameters", "first_nonfinite")
            yield iteration, AFTER_STEP if is_after else EVENTS, call
        elif row["segment"] == run.segments[-1].number:
            yield math.inf, EVENTS, call
    for step, text in failed_starts(run):
        yield math.inf, EVENTS, methodcaller("event", Event("earlier_start", text, step))
    last = run.segments[-1] if run.segments else None
    if last is not None and (last.without_end or last.lost or last.status == "stopped without an end"):
        recorded = (run.steps["iteration"], run.scalars["iteration"])
        step = max((column[-1].as_py() for column in recorded if len(column)), default=0)
        text = f"{last.who_stopped} stopped after step {step} without recording an end"
        if last.lost:
            text = f"the records end after step {step}, since they could not be written: {last.lost}"
        data = {"is_lost": bool(last.lost)}
        yield math.inf, EVENTS, methodcaller("event", Event("stopped", text, step, data=data))


def _steps(run: RecordedRun, chosen: Ints, rank_of_series: Ints, rank: int | None) -> Iterator[_Call]:
    """The values of some series; ``rank``: the rank of series that are not reduced."""
    table = run.values(chosen.tolist())
    if run.missing_contents:
        table = table.filter(pa.array(_are_known(run, table["series"].to_numpy(), table["value"].to_numpy())))
    iterations = table["iteration"].to_numpy()
    order = np.argsort(iterations, kind="stable")  # within a step by series, as in the table
    values = table["value"].to_numpy()[order]
    numbers = np.searchsorted(chosen, table["series"].to_numpy()[order]).astype(np.int32)
    unscaled = (table["flags"].fill_null(0).to_numpy()[order] & STEP0) != 0
    series = [
        Series(subject.layer, family_of(subject.tensor, subject.statistic, subject.gemm or None))
        for subject in map(run.subjects.__getitem__, chosen.tolist())
    ]
    splitter = Splitter(series.__getitem__)

    def step(iteration: int, part: slice, diagnosis: Diagnosis) -> None:
        is_local = (rank_of_series[chosen[numbers[part]]] != REDUCED).all()
        layers = frozenset(series[number].layer for number in set(numbers[part][unscaled[part]].tolist()))
        numbers_of_step = splitter.step(iteration, numbers[part], values[part], layers, rank if is_local else None)
        diagnosis.step(numbers_of_step)

    steps, begins = np.unique(iterations[order], return_index=True)
    edges = [*begins.tolist(), len(iterations)]
    for iteration, begin, end in zip(steps.tolist(), edges[:-1], edges[1:], strict=True):
        yield iteration, STEP, partial(step, iteration, slice(begin, end))


def _are_known(run: RecordedRun, series: npt.NDArray[np.int32], values: Floats) -> Mask:
    """Return False for the zeros of magnitudes in a log with four decimals, since the values may only be small."""
    finite = values[np.isfinite(values)]
    if (finite.round(_LOG_DECIMALS) != finite).any():
        return np.ones(len(values), bool)
    requests = [logged_request(subject.statistic) if subject.tensor else None for subject in run.subjects]
    magnitudes = [
        number
        for number, request in enumerate(requests)
        if request and request.statistic.name not in _SIGNED and "the tensor" in request.statistic.unit
    ]
    are_known: Mask = (values != 0) | ~np.isin(series, magnitudes)
    return are_known


def _event(row: Row) -> Event:
    try:
        data = json.loads(row["data"] or "{}")
    except (ValueError, RecursionError):
        data = {}
    return Event(
        row["kind"],
        row["text"] or "",
        row["iteration"],
        row["severity"],
        row["phase"],
        row["layer"] or "",
        row["tensor"] or "",
        row["gemm"] or "",
        data if isinstance(data, dict) else {},
        wall_time=0.0,
    )


def _recorded_finding(data: Mapping[str, Any]) -> list[Finding]:
    """The finding in an event, as a list; empty if the event is incomplete, or if the records show it again."""
    try:
        values = {field.name: data[field.name] for field in dataclasses.fields(Finding)}
        finding = Finding(**{**values, "layers": tuple(data["layers"]), "ranks": tuple(data["ranks"])})
    except (TypeError, KeyError):
        return []
    found_again = {row.title for row in (_ON_NUMBERS if finding.ranks else ROWS)}
    return [finding] if finding.severity in SEVERITIES and finding.title not in found_again else []
