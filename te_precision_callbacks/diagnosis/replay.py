"""The diagnosis of a recorded run: its steps once more, through the engine that judges a live run.

verdict = diagnose("logs")
verdict.healthy, verdict.findings, verdict.not_judged

replay = Replay()                       # of a run that is still written
replay.verdict(open_run("logs"))        # judges all steps
replay.verdict(open_run("logs"))        # later: those that have come since
"""

from __future__ import annotations

import bisect
import dataclasses
import hashlib
import json
import os
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import OF_SPANS, Facts, Row, Settings
from te_precision_callbacks.diagnosis.finding import SEVERITIES, Verdict
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.diagnosis.rule import Sighting
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
    return Replay().verdict(run if isinstance(run, RecordedRun) else open_run(run))


class Replay:
    """The verdict on a run that may still be written: each step goes into the rules once.

    It begins anew where what it has seen has changed, for example where facts about its steps come late, where a second
    start of the run repeats steps, or where old steps are thinned. So the verdict is always that of :func:`diagnose`.
    """

    def __init__(self) -> None:
        self._seen: _Seen | None = None
        self._begin()

    def _begin(self) -> None:
        series: list[Series] = []
        self._diagnosis = Diagnosis()
        self._series = series
        self._numbers: dict[Series, int] = {}
        self._splitter = Splitter(series.__getitem__)
        self._last = -1
        self._told = -1
        self._place: int | None = None

    def verdict(self, run: RecordedRun) -> Verdict:
        """The verdict on all that is recorded so far."""
        read = _Read(run)
        if self._seen != read.up_to(self._last, self._told) or read.has_steps_between(self._last, self._told):
            self._begin()
        diagnosis, facts = self._diagnosis, read.facts
        diagnosis.has_run = diagnosis.has_run or bool(len(run.steps) or run.unread or run.lacks_in_words)
        series = [
            Series(subject.layer, family_of(subject.tensor, subject.statistic, subject.gemm or None))
            for subject in run.subjects
        ]
        own = np.full(len(series), -1, np.int32)
        for checkpoint in read.saved:  # of those after a finding none counts
            diagnosis.note_checkpoint(checkpoint)
        for iteration, numbers, values, unscaled in read.steps(self._last):
            self._tell(read, iteration)
            self._know(facts, iteration)
            for number in dict.fromkeys(numbers[own[numbers] < 0].tolist()):
                own[number] = self._number(series[number])
            layers = frozenset(series[number].layer for number in set(numbers[unscaled].tolist()))
            diagnosis.step(self._splitter.step(iteration, own[numbers], values, layers))
            self._last = iteration
        self._tell(read, read.last_logged)
        self._seen = read.up_to(self._last, self._told)
        if self._know(facts, facts.last):
            self._seen = None  # what comes next would see them in its own step
        return dataclasses.replace(diagnosis.verdict, is_partial=bool(run.unread))

    def _tell(self, read: _Read, until: int) -> None:
        """Judge what the trainer has logged up to an iteration, and hear what other ranks have found in theirs."""
        for iteration, logged in read.logged(self._told, until):
            if logged.scalars:
                self._diagnosis.scalars(iteration, logged.scalars)
            for rule, sighting in logged.of_ranks:
                self._diagnosis.hear(iteration, rule, sighting)
            self._told = iteration

    def _know(self, facts: _Facts, iteration: int) -> bool:
        """Judge the facts of an iteration, if they are other ones than those before."""
        place = facts.place(iteration)
        is_new, self._place = place != self._place, place
        if is_new:
            self._diagnosis.know(facts.at(iteration), iteration)
        return is_new

    def _number(self, series: Series) -> int:
        """The number of a series, which stays the same when others come into the run."""
        number = self._numbers.setdefault(series, len(self._numbers))
        if number == len(self._series):
            self._series.append(series)
        return number


class _Seen(NamedTuple):
    """What a replay has seen of a run: if it is another one in a later reading, its steps have to be judged again.

    Attributes:
        run: its path and id, and the number of its segments.
        rank: the first rank with numbers of its own, which are judged beside those that are reduced over ranks; None
            if there is none.
        numbers: how many there are up to the last step that was judged.
        facts: the facts up to it.
        checkpoints: those before it, and before the last iteration that was told.
        logged: a hash of what the trainer has logged up to the last iteration of it that was told, on any rank.
    """

    run: tuple[str, str, int]
    rank: int | None
    numbers: int
    facts: str
    checkpoints: tuple[int, ...]
    logged: str


class _Logged(NamedTuple):
    """What the trainer has logged of an iteration.

    Attributes:
        scalars: name -> value, on rank 0.
        of_ranks: rule, and what it has seen on another rank, whose numbers are not recorded.
    """

    scalars: dict[str, float]
    of_ranks: list[tuple[str, Sighting]]


class _Read:
    """What has been recorded of a run when it was read.

    The numbers are those that the first rank has judged in the run: those that are reduced over ranks, and its own.

    Attributes:
        saved: the iterations of checkpoints, in order.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.facts = _Facts(run)
        self._run = str(run.path), run.run_id, len(run.segments)
        ranks = [subject.rank for subject in run.subjects]
        self._rank = min((each for each in ranks if each is not None), default=None)
        table = run.values(number for number, each in enumerate(ranks) if each in (None, self._rank))
        iterations = table["iteration"].to_numpy()
        order = np.argsort(iterations, kind="stable")  # within a step by series, as in the table
        self._iterations = iterations[order]
        self._series = table["series"].to_numpy()[order].astype(np.int32)
        self._values = table["value"].to_numpy()[order]
        self._unscaled = (table["flags"].fill_null(0).to_numpy()[order] & STEP0) != 0
        events = [row for row in run.events.to_pylist() if row["iteration"] is not None]
        self.saved = sorted(row["iteration"] for row in events if row["kind"] == "checkpoint_saved")
        logged: dict[int, _Logged] = {}
        for part in run.scalars.to_batches(max_chunksize=1 << 16):  # as Python's objects they are ten times as large
            columns = part["iteration"], part["name"].cast(pa.string()), part["value"]
            lists = (column.to_numpy(zero_copy_only=False).tolist() for column in columns)
            for iteration, name, value in zip(*lists, strict=True):
                logged.setdefault(iteration, _Logged({}, [])).scalars[name] = value
        for row in events:
            if row["kind"] == "finding" and (found := _of_rank(row["data"])) is not None:
                logged.setdefault(row["iteration"], _Logged({}, [])).of_ranks.append(found)
        self._logged = sorted(logged.items(), key=_iteration)

    def steps(
        self, last: int
    ) -> Iterator[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float64], npt.NDArray[np.bool_]]]:
        """The numbers of each step after one: iteration, series, values, and which are of delayed scaling's first
        step."""
        begin = self._count(last)
        found, begins = np.unique(self._iterations[begin:], return_index=True)
        edges = [*(begins + begin).tolist(), len(self._iterations)]
        for iteration, begin, end in zip(found.tolist(), edges, edges[1:], strict=False):
            yield iteration, self._series[begin:end], self._values[begin:end], self._unscaled[begin:end]

    def checkpoints(self, after: int, until: int) -> list[int]:
        """Those that took the state after one iteration, up to another one."""
        return self.saved[bisect.bisect_right(self.saved, after) : bisect.bisect_right(self.saved, until)]

    @property
    def last_logged(self) -> int:
        """The last iteration of which the trainer has logged something; -1 if there is none."""
        return self._logged[-1][0] if self._logged else -1

    def logged(self, after: int, until: int) -> list[tuple[int, _Logged]]:
        """What the trainer has logged after one iteration, up to another one."""
        first, end = (bisect.bisect_right(self._logged, each, key=_iteration) for each in (after, until))
        return self._logged[first:end]

    def has_steps_between(self, last: int, told: int) -> bool:
        """Whether there are steps after ``last`` and before ``told``, which the scalars up to ``told`` follow."""
        return self._count(told - 1) > self._count(last)

    def up_to(self, last: int, told: int) -> _Seen:
        """What a replay has seen that has judged the steps up to ``last``, and the scalars up to ``told``."""
        return _Seen(
            self._run,
            self._rank,
            self._count(last),
            self.facts.up_to(last),
            tuple(self.checkpoints(-1, max(last, told))),
            hashlib.sha256(repr(self.logged(-1, told)).encode("utf-8", "surrogatepass")).hexdigest(),
        )

    def _count(self, last: int) -> int:
        return int(np.searchsorted(self._iterations, last, side="right"))


def _iteration(logged: tuple[int, _Logged]) -> int:
    return logged[0]


def _of_rank(data: str | None) -> tuple[str, Sighting] | None:
    """The rule, and what it has seen, of the data of an event; None if its numbers are recorded, or it is damaged."""
    try:
        found = json.loads(data or "")
        names = "tensor", "statistic", "seen", "patch", "remedy"
        layers, since, severity = map(found.get, ("layers", "since", "severity"))
        texts = {name: found[name] for name in names}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if "rank" not in found or severity not in SEVERITIES or not isinstance(since, int | None):
        return None
    if not isinstance(layers, list) or not all(isinstance(text, str) for text in (*layers, *texts.values())):
        return None
    return str(found.get("rule")), Sighting(tuple(layers), since=since, severity=severity, **texts)


class _Facts:
    """The facts of a recorded run, as they were in each iteration."""

    def __init__(self, run: RecordedRun) -> None:
        self._tables: dict[str, list[Row]] = {name: getattr(run, name).to_pylist() for name in (*OF_SPANS, "states")}
        rows = [row for name in OF_SPANS for row in self._tables[name]]
        self._settings = [(segment.first_iteration, Settings.from_run(segment.facts)) for segment in run.segments]
        edges = {first for first, _ in self._settings} | {row["since"] for row in rows}
        last = run.steps["iteration"].to_numpy().max(initial=0)
        self.last = max(int(last), *(edge for edge in edges if edge is not None), 0)  # no step may have numbers
        edges |= {row["until"] + 1 for row in rows if row["until"] is not None}
        self._edges = np.array(sorted(edge for edge in edges if edge is not None), np.int64)

    def place(self, iteration: int) -> int:
        """The same number in iterations with the same facts."""
        return int(np.searchsorted(self._edges, iteration, side="right"))

    def at(self, iteration: int) -> Facts:
        """The facts of an iteration."""
        begun = [settings for first, settings in self._settings if first <= iteration]
        return Facts.from_tables(self._tables, iteration, begun[-1] if begun else None)

    def up_to(self, last: int) -> str:
        """A hash of what holds up to an iteration. What still holds there may end later."""
        digest = hashlib.sha256()
        for first, settings in self._settings:
            if first <= last:
                digest.update(repr((first, settings)).encode("utf-8", "surrogatepass"))
        for name, rows in self._tables.items():
            for row in rows:
                if name == "states":
                    digest.update(repr(row).encode("utf-8", "surrogatepass"))
                elif row["since"] is None or row["since"] <= last:
                    until = row["until"] if row["until"] is not None and row["until"] < last else None
                    digest.update(repr({**row, "until": until}).encode("utf-8", "surrogatepass"))
        return digest.hexdigest()
