"""The diagnosis of a recorded run: its steps once more, through the engine that judges a live run.

verdict = diagnose("logs")
verdict.healthy, verdict.findings, verdict.not_judged
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import OF_SPANS, Facts, Row, Settings
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.runs.tables import STEP0
from te_precision_callbacks.statistics.series import Series, family_of


def diagnose(run: RecordedRun | str | os.PathLike[str]) -> Verdict:
    """Judge a recorded run by the rules.

    Args:
        run: a run, or the path of one: of a log folder, or of a log of nvidia-dlfw-inspect.

    Raises:
        RunError: the path has no run that can be read.
    """
    recorded = run if isinstance(run, RecordedRun) else open_run(run)
    diagnosis = Diagnosis()
    facts = _Facts(recorded)
    series = [
        Series(subject.layer, family_of(subject.tensor, subject.statistic, subject.gemm or None))
        for subject in recorded.subjects
    ]
    splitter = Splitter(series.__getitem__)
    saved = [row["iteration"] for row in recorded.events.to_pylist() if row["kind"] == "checkpoint_saved"]
    checkpoints = sorted(iteration for iteration in saved if iteration is not None)
    scalars = _scalars(recorded)
    for iteration, numbers, values, unscaled in _steps(recorded):
        while checkpoints and checkpoints[0] <= iteration:
            diagnosis.note_checkpoint(checkpoints.pop(0))
        while scalars and scalars[0][0] <= iteration:
            diagnosis.scalars(*scalars.popleft())
        if facts.changed(iteration):
            diagnosis.know(facts.at(iteration), iteration)
        layers = frozenset(series[number].layer for number in numbers[unscaled].tolist())
        diagnosis.step(splitter.step(iteration, numbers, values, layers))
    for each in scalars:
        diagnosis.scalars(*each)
    if facts.changed(facts.last):
        diagnosis.know(facts.at(facts.last), facts.last)
    return diagnosis.verdict


def _scalars(run: RecordedRun) -> deque[tuple[int, dict[str, float]]]:
    """The numbers that the trainer has logged of each iteration, in order."""
    found: dict[int, dict[str, float]] = {}
    for row in run.scalars.select(["iteration", "name", "value"]).to_pylist():
        found.setdefault(row["iteration"], {})[row["name"]] = row["value"]
    return deque(sorted(found.items(), key=lambda entry: entry[0]))


def _steps(
    run: RecordedRun,
) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float64], npt.NDArray[np.bool_]]]:
    """The numbers of each step: iteration, series, values, and which are of delayed scaling's first step.

    They are those that are reduced over ranks; where none is, those of the first rank.
    """
    ranks = [subject.rank for subject in run.subjects]
    rank = None if None in ranks else min((each for each in ranks if each is not None), default=None)
    table = run.values(number for number, each in enumerate(ranks) if each == rank)
    iterations = table["iteration"].to_numpy()
    order = np.argsort(iterations, kind="stable")  # within a step by series, as in the table
    series = table["series"].to_numpy()[order].astype(np.int32)
    values = table["value"].to_numpy()[order]
    flags = table["flags"].fill_null(0).to_numpy()[order]
    found, begins = np.unique(iterations[order], return_index=True)
    ends = np.append(begins, len(series))[1:]
    for iteration, begin, end in zip(found.tolist(), begins.tolist(), ends.tolist(), strict=True):
        yield iteration, series[begin:end], values[begin:end], (flags[begin:end] & STEP0) != 0


class _Facts:
    """The facts of a recorded run, as they were in each iteration."""

    def __init__(self, run: RecordedRun) -> None:
        self._tables: dict[str, list[Row]] = {name: getattr(run, name).to_pylist() for name in (*OF_SPANS, "states")}
        steps = run.steps["iteration"].to_numpy()
        self.last = int(steps.max()) if len(steps) else 0
        rows = [row for name in OF_SPANS for row in self._tables[name]]
        edges = {row["since"] for row in rows} | {row["until"] + 1 for row in rows if row["until"] is not None}
        self._edges = np.array(sorted(edge for edge in edges if edge is not None), np.int64)
        self._known: int | None = None
        self._settings = [(segment.first_iteration, Settings.from_run(segment.facts)) for segment in run.segments]

    def changed(self, iteration: int) -> bool:
        """Whether the facts of an iteration are other ones than those that were asked for last."""
        place = int(np.searchsorted(self._edges, iteration, side="right"))
        is_new, self._known = place != self._known, place
        return is_new

    def at(self, iteration: int) -> Facts:
        """The facts of an iteration."""
        begun = [settings for first, settings in self._settings if first <= iteration]
        return Facts.from_tables(self._tables, iteration, begun[-1] if begun else None)
