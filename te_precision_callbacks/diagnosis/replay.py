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
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import OF_SPANS, Facts, Row, Settings
from te_precision_callbacks.diagnosis.finding import SEVERITIES, Verdict
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.diagnosis.plain_logs import PlainLog, read_plain_log
from te_precision_callbacks.diagnosis.rule import Judge, Rule, Sighting
from te_precision_callbacks.diagnosis.rules import RULES
from te_precision_callbacks.runs import RecordedRun, open_run
from te_precision_callbacks.runs.index import REDUCED, Subject
from te_precision_callbacks.runs.tables import STEP0
from te_precision_callbacks.sinks.step_records import Event
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
    """The verdict on a run that may still be written: each step goes into the rules once, on each rank.

    The numbers that are reduced over ranks and those of the first rank are judged together, as that rank has judged
    them in the run; then the own numbers of each other rank, one after the other, by the rules that look at numbers.
    """

    def __init__(self) -> None:
        self._first = _OfRank(RULES)
        self._others: dict[int, _OfRank] = {}

    def verdict(self, run: RecordedRun) -> Verdict:
        """The verdict on all that is recorded so far."""
        common = _Common(run)
        ranks = {subject.rank for subject in run.subjects}
        several = len(ranks - {None}) > 1 or any(segment.world > 1 for segment in run.segments)
        first = min((0 if rank is None else rank for rank in ranks), default=0)  # rank 0 has judged what is reduced
        own = self._first.judge(run, _Read(run, common, (None, first), first if several else None))
        others = sorted(rank for rank in ranks if rank not in (None, first))
        self._others = {rank: self._others.get(rank) or _OfRank(_ON_NUMBERS) for rank in others}
        # The numbers of one rank at a time are in memory.
        found = [replay.judge(run, _Read(run, common, (rank,), rank)) for rank, replay in self._others.items()]
        return dataclasses.replace(own.with_ranks(found), is_partial=bool(run.unread))


_ON_NUMBERS = tuple(rule for rule in RULES if type(rule.judge()).step is not Judge.step)
"""The rules that look at statistics. All others judge what is the same on all ranks: facts, and what a trainer logs."""

_IDS_ON_NUMBERS = frozenset(rule.id for rule in _ON_NUMBERS)


class _OfRank:
    """Judges the numbers of a rank.

    It begins anew where what it has seen has changed, for example where facts about its steps come late, where a second
    start of the run repeats steps, or where old steps are thinned. So the verdict is always that of :func:`diagnose`.

    Args:
        rules: the rules.
    """

    def __init__(self, rules: Sequence[Rule]) -> None:
        self._rules = rules
        self._seen: _Seen | None = None
        self._begin()

    def _begin(self) -> None:
        series: list[Series] = []
        self._diagnosis = Diagnosis(self._rules)
        self._series = series
        self._numbers: dict[Series, int] = {}
        self._splitter = Splitter(series.__getitem__)
        self._last = -1
        self._told = -1
        self._ends: list[tuple[int, Event]] = []
        self._place: int | None = None

    def judge(self, run: RecordedRun, read: _Read) -> Diagnosis:
        """Judge all that is recorded so far."""
        is_resumed = self._ends != read.ends[: len(self._ends)]
        if (
            is_resumed
            or self._seen != read.up_to(self._last, self._told)
            or read.has_steps_between(self._last, self._told)
        ):
            self._begin()
        diagnosis, facts = self._diagnosis, read.facts
        diagnosis.has_run = diagnosis.has_run or bool(len(run.steps) or run.unread or run.lacks_in_words)
        for iteration, file in read.saved:  # a finding does not name a later one
            diagnosis.note_checkpoint(iteration, file)
        subjects, ranks = run.subjects, read.rank_of_series
        own = np.full(len(subjects), -1, np.int32)
        for iteration, numbers, values, unscaled in read.steps(self._last):
            self._tell(read, iteration)
            self._know(facts, iteration)
            for number in dict.fromkeys(numbers[own[numbers] < 0].tolist()):
                own[number] = self._number(_series(subjects[number]))
            layers = frozenset(subjects[number].layer for number in set(numbers[unscaled].tolist()))
            rank = read.rank if (ranks[numbers] != REDUCED).all() else None
            diagnosis.step(self._splitter.step(iteration, own[numbers], values, layers, rank))
            self._last = iteration
        self._tell(read, read.last_logged)
        self._seen = read.up_to(self._last, self._told)
        if self._know(facts, facts.last):
            self._seen = None  # what comes next would see them in its own step
        for rank, event in read.ends[len(self._ends) :]:
            diagnosis.event(event, rank or None)
        self._ends = read.ends
        return diagnosis

    def _tell(self, read: _Read, until: int) -> None:
        """Judge what the trainer has logged up to an iteration, and hear what other ranks have found in theirs."""
        for iteration, logged in read.logged(self._told, until):
            if logged.scalars:
                self._diagnosis.scalars(iteration, logged.scalars)
            for heard in logged.of_ranks:
                self._diagnosis.hear(iteration, *heard)
            for rank, event in logged.events:
                self._diagnosis.event(event, rank or None)
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
        ranks: whose numbers they are, as in :class:`_Read`.
        rank: as there.
        numbers: how many there are up to the last step that was judged.
        facts: the facts up to it.
        checkpoints: those before it, and before the last iteration that was told.
        logged: a hash of what the trainer has logged up to the last iteration of it that was told, on any rank.
    """

    run: tuple[str, str, int]
    ranks: tuple[int | None, ...]
    rank: int | None
    numbers: int
    facts: str
    checkpoints: tuple[tuple[int, str], ...]
    logged: str


class _Heard(NamedTuple):
    """What a rule has seen on another rank, whose numbers are not recorded."""

    rule: str
    sighting: Sighting
    rank: int


class _Logged(NamedTuple):
    """What the trainer has logged of an iteration.

    Attributes:
        scalars: name -> value, on rank 0.
        of_ranks: what the other ranks have found in theirs.
        events: the events, each with the rank that recorded it.
    """

    scalars: dict[str, float]
    of_ranks: list[_Heard]
    events: list[tuple[int, Event]]


class _Common:
    """What has been recorded of a run when it was read, without its numbers.

    Attributes:
        plain: what its numbers show; None for a run with records.
        facts: its facts.
        rank_of_series: [series]: whose own numbers they are; ``REDUCED`` of those that are reduced over ranks.
        saved: the checkpoints: the iteration before which each has taken the state, and its file if that is known.
        logged: what the trainer has logged, by iteration.
        ends: the ends of the last start, each with the rank that recorded it.
    """

    def __init__(self, run: RecordedRun) -> None:
        self.plain = read_plain_log(run) if run.lacks_in_words else None
        self.facts = _Facts(run, self.plain)
        self.ends: list[tuple[int, Event]] = []
        self.rank_of_series = run.series["rank"].fill_null(REDUCED).to_numpy().astype(np.int64)
        events = [row for row in run.events.to_pylist() if row["iteration"] is not None]
        self.saved = [(row["iteration"], _file_of(row)) for row in events if row["kind"] == "checkpoint_saved"]
        logged: dict[int, _Logged] = {}
        for part in run.scalars.to_batches(max_chunksize=1 << 16):  # as Python's objects they are ten times as large
            columns = part["iteration"], part["name"].cast(pa.string()), part["value"]
            lists = (column.to_numpy(zero_copy_only=False).tolist() for column in columns)
            for iteration, name, value in zip(*lists, strict=True):
                logged.setdefault(iteration, _Logged({}, [], [])).scalars[name] = value
        for row in sorted(events, key=lambda row: row["rank"] or 0):
            of_step = logged.setdefault(row["iteration"], _Logged({}, [], []))
            event = _event(row)
            rank = 0 if event.data.get("of_all") else row["rank"] or 0
            if row["kind"] == "segment_ended":
                if row["segment"] == run.segments[-1].number:  # else the run went on
                    self.ends.append((rank, event))
            elif row["kind"] != "finding":
                of_step.events.append((rank, event))
            elif (heard := _heard(row["data"])) is not None:
                of_step.of_ranks.append(heard)
        if run.segments and run.segments[-1].status == "stopped without an end":
            last = int(run.steps["iteration"][-1].as_py()) if len(run.steps) else 0
            text = f"the run stopped without an end after step {last}, and what its last steps had is not recorded"
            self.ends.append((0, Event("stopped", text, last)))
        self.logged = sorted(logged.items(), key=_iteration)


class _Read:
    """What has been recorded of some ranks of a run when it was read.

    Args:
        run: the run.
        common: what it has beside its numbers.
        ranks: the ranks whose own numbers are read; None stands for the numbers that are reduced over ranks.
        rank: the rank that findings of its own numbers name; None if the run has only one.
    """

    def __init__(self, run: RecordedRun, common: _Common, ranks: tuple[int | None, ...], rank: int | None) -> None:
        self.facts, self.rank, self.rank_of_series = common.facts, rank, common.rank_of_series
        self._run = str(run.path), run.run_id, len(run.segments)
        self._ranks = ranks
        wanted = [REDUCED if each is None else each for each in ranks]
        table = run.values(np.flatnonzero(np.isin(self.rank_of_series, wanted)).tolist())
        if common.plain is not None:
            known, values = common.plain.adapt(table["series"].to_numpy(), table["value"].to_numpy())
            place = table.column_names.index("value")
            table = table.set_column(place, table.schema.field(place), pa.array(values)).filter(pa.array(known))
        iterations = table["iteration"].to_numpy()
        order = np.argsort(iterations, kind="stable")  # within a step by series, as in the table
        self._iterations = iterations[order]
        self._series = table["series"].to_numpy()[order].astype(np.int32)
        self._values = table["value"].to_numpy()[order]
        self._unscaled = (table["flags"].fill_null(0).to_numpy()[order] & STEP0) != 0
        self.saved = common.saved
        self._logged = common.logged if None in ranks else []
        self.ends = common.ends if None in ranks else []

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
            self._ranks,
            self.rank,
            self._count(last),
            self.facts.up_to(last),
            tuple(saved for saved in self.saved if saved[0] <= max(last, told)),
            hashlib.sha256(repr(self.logged(-1, told)).encode("utf-8", "surrogatepass")).hexdigest(),
        )

    def _count(self, last: int) -> int:
        return int(np.searchsorted(self._iterations, last, side="right"))


def _series(subject: Subject) -> Series:
    return Series(subject.layer, family_of(subject.tensor, subject.statistic, subject.gemm or None))


def _iteration(logged: tuple[int, _Logged]) -> int:
    return logged[0]


def _event(row: Row) -> Event:
    """A recorded event; without its data, if they are damaged."""
    layer, tensor, gemm = (row[name] or "" for name in ("layer", "tensor", "gemm"))
    iteration, severity, phase, data = row["iteration"], row["severity"], row["phase"], _event_data(row)
    return Event(row["kind"], row["text"] or "", iteration, severity, phase, layer, tensor, gemm, data, wall_time=0.0)


def _event_data(row: Row) -> dict[str, Any]:
    try:
        data = json.loads(row["data"] or "{}")
        if row["kind"] == "parameters":
            for problem in data["problems"]:
                numbers = isinstance(problem["since"], int) and isinstance(problem["number"], int | float)
                names = problem["names"] and all(isinstance(name, str) for name in problem["names"])
                if not (numbers and names and isinstance(problem["what"], str)):
                    return {}
            data["checked"] = list(data["checked"])
        return data if isinstance(data, dict) else {}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return {}


def _file_of(row: Row) -> str:
    """The file of a checkpoint, of its event; empty if it is not known."""
    return str(_event_data(row).get("file", ""))


def _heard(data: str | None) -> _Heard | None:
    """What the data of an event say that a rank has found in what it logs; None if its numbers are recorded, so that
    they are judged here, or if the data are damaged."""
    try:
        found = json.loads(data or "")
        rule, (rank, *_), severity = found["rule"], found["ranks"], found["severity"]
        layers, since = found["layers"], found["since"]
        texts = {name: found[name] for name in ("tensor", "statistic", "seen", "patch", "remedy")}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return None
    if rule in _IDS_ON_NUMBERS or severity not in SEVERITIES or not isinstance(since, int | None):
        return None
    if not isinstance(rank, int) or not isinstance(layers, list):
        return None
    if not all(isinstance(text, str) for text in (rule, *layers, *texts.values())):
        return None
    return _Heard(rule, Sighting(tuple(layers), since=since, severity=severity, **texts), rank)


class _Facts:
    """The facts of a recorded run, as they were in each iteration."""

    def __init__(self, run: RecordedRun, plain: PlainLog | None) -> None:
        self._tables: dict[str, list[Row]] = {name: getattr(run, name).to_pylist() for name in (*OF_SPANS, "states")}
        if plain is not None:
            self._tables.update(gemms=plain.gemms, operands=plain.operands)
        rows = [row for name in OF_SPANS for row in self._tables[name]]
        self._settings = [(segment.first_iteration, Settings.from_run(segment.facts)) for segment in run.segments]
        edges = {first for first, _ in self._settings} | {row["since"] for row in rows}
        last = run.steps["iteration"].to_numpy().max(initial=0)
        self.last = max(int(last), *(edge for edge in edges if edge is not None), 0)  # no step may have numbers
        edges |= {row["until"] + 1 for row in rows if row["until"] is not None}
        self._edges = np.array(sorted(edge for edge in edges if edge is not None), np.int64)
        self._made: dict[int, Facts] = {}
        self._hashes: dict[int, str] = {}

    def place(self, iteration: int) -> int:
        """The same number in iterations with the same facts."""
        return int(np.searchsorted(self._edges, iteration, side="right"))

    def at(self, iteration: int) -> Facts:
        """The facts of an iteration; each rank gets its own, since its rules keep there what follows from them."""
        place = self.place(iteration)
        if place not in self._made:
            begun = [settings for first, settings in self._settings if first <= iteration]
            self._made[place] = Facts.from_tables(self._tables, iteration, begun[-1] if begun else None)
        return dataclasses.replace(self._made[place], _kept={})

    def up_to(self, last: int) -> str:
        """A hash of what holds up to an iteration. What still holds there may end later."""
        if last not in self._hashes:
            self._hashes[last] = self._hash(last)
        return self._hashes[last]

    def _hash(self, last: int) -> str:
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
