"""Reads recorded runs, and logs of plain nvidia-dlfw-inspect.

    run = open_run("logs")                              # a log folder with one run
    run = open_run("logs", run="20261122-130144-507-9f3c21")
    list_runs("logs")                                   # ("20261122-130144-507-9f3c21", ...)

A file that is still written is read up to its last complete batch.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any, cast

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.base.counts import some_of
from te_precision_callbacks.base.files import StrPath
from te_precision_callbacks.runs.importing import STATISTICS_FOLDER, find_logs, import_logs
from te_precision_callbacks.runs.recorded import (
    NotARunError,
    RecordedRun,
    RunError,
    Said,
    Segment,
    SeveralRunsError,
    Status,
)
from te_precision_callbacks.runs.run_files import (
    CLOSED,
    FOLDER,
    MOST_LISTED,
    OPEN,
    RUN_FILE,
    data_files,
    ended_by_sigterm,
    gaps,
    is_gone,
    is_silent,
    rank_name,
    ranks_of,
    read_json,
    segments_of,
)
from te_precision_callbacks.runs.tables import (
    EVENTS,
    FACTS,
    SCHEMA_VERSION,
    STEP0,
    TABLES,
    UNREADABLE,
    VALUE_ROWS,
    VECTOR_ROWS,
    SeriesIndex,
    Subject,
    read_table,
    subjects_of,
)
from te_precision_callbacks.statistics.arrays import Ints
from te_precision_callbacks.statistics.series import MOST_ITERATION

_MOST_ATTEMPTS = 5
"""Maximum number of attempts to read a run whose files are being replaced."""


def list_runs(path: StrPath) -> tuple[str, ...]:
    """Return the names of the runs in a log folder, oldest first."""
    folder = _records_of(Path(path))
    if not folder.is_dir():
        return ()
    return tuple(sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and segments_of(entry)))


def open_run(path: StrPath, *, run: str | None = None) -> RecordedRun:
    """Read a recorded run.

    Args:
        path: a log folder, its folder ``precision_records``, or the folder of a run; or a log folder or a statistics
            log of plain nvidia-dlfw-inspect.
        run: a name of :func:`list_runs`, or its beginning; required if there are several runs. ``"latest"`` is the run
            that was started or resumed last.

    Raises:
        NotARunError: there is no such run.
        SeveralRunsError: there are several runs, and ``run`` is None.
        RunError: the files have another version, or were replaced while they were read.
    """
    folder = Path(path)
    if not folder.exists():
        raise NotARunError(f"{folder}: there is no such file or folder.")
    if folder.is_dir():
        if segments_of(folder):
            if run not in (None, "latest") and not folder.name.startswith(str(run)):
                raise NotARunError(
                    f"{folder} is the run {folder.name!r}, not {run!r}. Give the log folder, or omit --run."
                )
            return _read_run(folder, folder)
        runs = list_runs(folder)
        if runs:
            return _read_run(_records_of(folder) / _choose(folder, runs, run), folder)
    logs = find_logs(folder)
    if logs is not None:
        if run not in (None, "latest"):
            raise NotARunError(
                f"{folder}: logs of plain nvidia-dlfw-inspect are a single run without a name: omit --run."
            )
        return import_logs(folder, logs)
    if not folder.is_dir():
        raise NotARunError(f"{folder}: this file is not a recorded run. Give the log folder.")
    raise NotARunError(
        f"{folder}: no recorded run in this folder. Give a log folder: it contains {FOLDER}/<run>/seg-000/{RUN_FILE},"
        f" or {STATISTICS_FOLDER}/ of plain nvidia-dlfw-inspect."
    )


def runs_of_last_launch(path: StrPath) -> tuple[str, ...]:
    """Return the runs of a log folder that the launch of its latest run has recorded, oldest first.

    A launch is a process, or all processes of one ``te-precision run``.
    """
    runs = list_runs(path)
    if len(runs) < 2:
        return runs
    folder = _records_of(Path(path))
    latest = _choose(Path(path), runs, "latest")
    launch = _last_fact(folder / latest, "launch")
    return tuple(name for name in runs if name == latest or (launch and _last_fact(folder / name, "launch") == launch))


def _last_fact(run: Path, key: str) -> object:
    """Return a fact of a run's last segment; None if it is unknown."""
    try:
        return read_json(next(reversed(segments_of(run).values())) / RUN_FILE).get(key)
    except (OSError, ValueError):
        return None


def chosen_run(path: StrPath, run: str | None = None) -> tuple[RecordedRun, str]:
    """Read a run for a command, by default the latest one. Also return a note on other runs in the folder."""
    recorded = open_run(path, run=run or "latest")
    if run is not None:
        return recorded, ""
    names = list_runs(path)
    other_runs = [name for name in reversed(names) if name != recorded.run_id]
    if not other_runs:
        return recorded, ""
    return recorded, (
        f"{path} has {len(names)} runs. The latest is read: {recorded.run_id}. The others, for --run:"
        f" {some_of(other_runs, MOST_LISTED)}."
    )


def _records_of(folder: Path) -> Path:
    if folder.name == FOLDER:
        return folder
    return folder / FOLDER


def _read_run(folder: Path, path: Path) -> RecordedRun:
    for _ in range(_MOST_ATTEMPTS):
        try:
            return _Reader(folder, path, segments_of(folder)).run()
        except FileNotFoundError as error:  # a file was replaced after it was listed
            vanished = error
    raise _replaced(folder, vanished) from vanished


def _replaced(folder: Path, error: FileNotFoundError) -> RunError:
    return RunError(f"{folder}: a file was replaced while it was read ({error}). Try again.")


def _choose(folder: Path, runs: tuple[str, ...], wanted: str | None) -> str:
    if wanted == "latest":
        return max(runs, key=lambda name: _last_start(_records_of(folder) / name))
    names = tuple(name for name in runs if name.startswith(wanted or ""))
    if wanted in names:
        return str(wanted)
    if len(names) == 1:
        return names[0]
    if not names:
        raise NotARunError(f"{folder}: there is no run {wanted!r}. There are: {', '.join(runs)}.")
    raise SeveralRunsError(
        f"{folder}: there are {len(names)} runs: {', '.join(names)}. Choose one with --run {names[-1]}"
        f' (run={names[-1]!r} in Python), or give its path, "{_records_of(folder) / names[-1]}".',
        names,
    )


def _last_start(run: Path) -> str:
    """Return the start of the last segment as sortable text, so that a resumed run is the latest."""
    started = str(_last_fact(run, "started_at"))
    return max(re.sub(r"\D", "", text)[:17] for text in (started, run.name))


@dataclass
class _File:
    """A file of values or histograms.

    Attributes:
        numbers: number of a series in the file -> its number in the run.
    """

    path: Path
    segment: int
    numbers: dict[int, int]


@dataclass
class _Reader:
    """Reads a run.

    Attributes:
        folder, path: the folder of the run, and the path that the user gave.
        ranks: segment -> rank -> folder.
        spans: segment -> first and last recorded iteration.
        ends: segment -> end of its valid iterations, exclusive: a later segment begins, or the run was opened.
        counts: folder of a rank -> table -> number of files, if recorded.
    """

    folder: Path
    path: Path
    folders: Mapping[int, Path]
    said: dict[str, Said] = field(default_factory=dict)
    index: SeriesIndex = field(default_factory=SeriesIndex)
    ranks: dict[int, dict[int, Path]] = field(default_factory=dict)
    spans: dict[int, tuple[int, int]] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    counts: dict[Path, Mapping[str, object]] = field(default_factory=dict)

    def run(self) -> RecordedRun:
        self.ranks = {number: ranks_of(folder) for number, folder in self.folders.items()}
        segments = tuple(starmap(self._segment, self.folders.items()))
        self._note_missing(segments)
        steps = list(self._tables("steps"))
        scalars = list(self._tables("scalars"))
        for number, table in (*steps, *scalars):
            self._note_span(number, table["iteration"].to_numpy())
        events = [table for _, table in self._tables("events")]
        events.append(pa.Table.from_pylist(list(self._sigterms()), EVENTS))
        for number in self.folders:
            later = (first for other, (first, _) in self.spans.items() if other > number)
            self.ends[number] = min(later, default=MOST_ITERATION)
        values = self._index("values")
        vectors = self._index("vectors")
        for number, (_, last) in self.spans.items():
            self.ends[number] = min(self.ends[number], last + 1)
        all_steps = self._joined("steps", steps)
        is_first = np.diff(all_steps["iteration"].to_numpy(), prepend=-1) != 0
        return RecordedRun(
            path=self.path,
            source="te-precision-callbacks",
            run_id=self.folder.name,
            segments=segments,
            **self._facts(segments),
            series=self.index.table(),
            steps=all_steps.filter(pa.array(is_first)),
            scalars=self._joined("scalars", scalars),
            events=_sorted(EVENTS, events, "iteration", "wall_time"),
            read_values=functools.partial(self._read, values, VALUE_ROWS),
            read_vectors=functools.partial(self._read, vectors, VECTOR_ROWS),
            said=self.said,
        )

    def _note(self, text: str, kind: Said = "") -> None:
        self.said.setdefault(text, kind)

    # ------------------------------------------------------------------ segments

    def _segment(self, number: int, folder: Path) -> Segment:
        path = folder / RUN_FILE
        facts: dict[str, Any] = {}
        try:
            facts = read_json(path)
        except FileNotFoundError:
            if is_silent(folder) or any(folder.glob(f"{rank_name(0)}/*")):  # rank 0 makes the folder first
                self._note(f"{path} is missing: the facts of segment {number} are unknown.", "damaged")
        except (OSError, ValueError) as error:
            self._note(f"{path} is damaged ({error}): the facts of segment {number} are unknown.", "damaged")
        schema = facts.get("schema", SCHEMA_VERSION)
        if schema != SCHEMA_VERSION:
            versions = facts.get("versions")
            version = versions.get("te-precision-callbacks") if isinstance(versions, dict) else None
            raise RunError(
                f"{path}: the run was recorded by te-precision-callbacks {version or 'of an unknown version'}, with"
                f" schema {schema!r}; this version reads only schema {SCHEMA_VERSION}. Read the run with the version"
                " that recorded it."
            )
        if isinstance(counts := facts.get("files"), dict):
            self.counts[folder / rank_name(0)] = counts
        if facts.get("not_written"):
            self._note(f"The end of segment {number} is not recorded: {facts['not_written']}")
        status, without_end = self._status(number, facts)
        return Segment(
            number=number,
            status=status,
            started_at=str(facts.get("started_at") or ""),
            ended_at=str(facts.get("ended_at") or ""),
            first_iteration=_whole(facts.get("first_iteration"), 0),
            world=_whole(facts.get("world"), 1),
            facts=facts,
            without_end=without_end,
        )

    def _status(self, number: int, facts: Mapping[str, Any]) -> tuple[Status, tuple[int, ...]]:
        """Return the status of a segment, and the ranks without an end, where rank 0 has recorded one."""
        path = self.folders[number] / RUN_FILE
        status = facts.get("status")
        if status not in ("ended", "failed"):
            if ended_by_sigterm(path.with_name(rank_name(0))) is not None:
                return "failed", ()
            if is_gone(path, facts):
                return "stopped without an end", ()
            return "running", ()
        without_end: tuple[int, ...] = ()
        if is_gone(path, facts):  # until then, other ranks may still write
            for rank, own in self.ranks[number].items():
                has_open_file = any(file.path.suffix == OPEN for file in data_files(own))
                if rank and has_open_file and ended_by_sigterm(own) is None:
                    without_end += (rank,)
        if without_end and status == "ended":
            return "stopped without an end", without_end
        return cast("Status", status), without_end

    def _note_missing(self, segments: Iterable[Segment]) -> None:
        if len(self.folders) > 1 and (missing := gaps(self.folders)):
            self._note(f"Segments are missing: {missing}.", "unread")
        for segment in segments:
            expected = segment.facts.get("writing_ranks")
            if not isinstance(expected, list):
                expected = [0] * bool(segment.facts)
            ranks = self.ranks[segment.number]
            if gone := [str(rank) for rank in expected if isinstance(rank, int) and rank not in ranks]:
                self._note(
                    f"Segment {segment.number} lacks the files of {len(gone)} of {segment.world} ranks:"
                    f" {some_of(gone, MOST_LISTED)}.",
                    "unread",
                )

    def _sigterms(self) -> Iterator[dict[str, Any]]:
        """Yield ends by SIGTERM as events: the process itself has recorded none."""
        for segment, ranks in self.ranks.items():
            for rank, folder in ranks.items():
                seconds = ended_by_sigterm(folder)
                if seconds is not None:
                    yield {
                        "segment": segment,
                        "iteration": self.spans.get(segment, (0, 0))[1],
                        "rank": rank,
                        "kind": "segment_ended",
                        "severity": "error",
                        "wall_time": round(seconds * 1e6),
                        "text": "SIGTERM",
                    }

    # ------------------------------------------------------------------ tables

    def _files(self, name: str) -> Iterator[tuple[int, Path, Path]]:
        """Yield segment, folder and path of each file of a table, in order."""
        for segment, ranks in self.ranks.items():
            for folder in ranks.values():
                files = [file for file in data_files(folder) if file.table == name]
                count = self.counts.get(folder, {}).get(name)
                end = count + 1 if isinstance(count, int) else 0
                if missing := gaps((file.number for file in files), 1, end):
                    self._note(f"{folder}: files of {name} are missing: {missing}.", "damaged")
                for file in files:
                    yield segment, folder, file.path

    def _tables(self, name: str) -> Iterator[tuple[int, pa.Table]]:
        for segment, _, path in self._files(name):
            table = self._load(path, TABLES[name])
            if table is not None:
                yield segment, table

    def _load(self, path: Path, schema: pa.Schema, series: list[int] | None = None) -> pa.Table | None:
        try:
            return read_table(path, schema, series)
        except FileNotFoundError:
            raise
        except UNREADABLE as error:
            lines = str(error).splitlines() or [type(error).__name__]
            self._note(f"{path} cannot be read, and its rows are missing: {lines[0]}", "damaged")
        return None

    def _joined(self, name: str, tables: Iterable[tuple[int, pa.Table]]) -> pa.Table:
        return _sorted(TABLES[name], [self._drop_replaced(number, table) for number, table in tables], "iteration")

    def _drop_replaced(self, segment: int, table: pa.Table) -> pa.Table:
        return table.filter(pc.less(table["iteration"], pa.scalar(self.ends[segment], pa.int64())))

    def _index(self, name: str) -> list[_File]:
        files = []
        numbers_of: dict[Path, dict[int, int]] = {}  # folder of a rank -> numbers of its series
        schema = TABLES[name]
        schema = schema.remove(schema.get_field_index("segment"))
        for segment, folder, path in self._files(name):
            table = self._load(path, schema)
            if table is None:
                continue
            numbers = numbers_of.setdefault(folder, {})
            self._number_series(table, numbers)
            files.append(_File(path, segment, numbers))
            table = self._drop_replaced(segment, table)
            iterations = table["iteration"].to_numpy()
            self._note_span(segment, iterations)
            series = _translated(table["series"], numbers).to_numpy()
            self.index.note(series, iterations)
            if name == "values":
                first_step = (table["flags"].fill_null(0).to_numpy() & STEP0) != 0
                self.index.note_values(series, iterations, table["value"].to_numpy(), first_step)
        return files

    def _note_span(self, segment: int, iterations: Ints) -> None:
        if len(iterations):
            first, last = self.spans.get(segment, (MOST_ITERATION, -1))
            self.spans[segment] = min(first, int(iterations.min())), max(last, int(iterations.max()))

    def _number_series(self, table: pa.Table, rank_numbers: dict[int, int]) -> None:
        numbers, rows = np.unique(table["series"].to_numpy(), return_index=True)
        is_new = np.array([number not in rank_numbers for number in numbers.tolist()], bool)
        subjects = subjects_of(table.select(Subject._fields).take(pa.array(rows[is_new])))
        rank_numbers.update(zip(numbers[is_new].tolist(), self.index.number(subjects), strict=True))

    def _read(self, files: list[_File], schema: pa.Schema, series: list[int] | None) -> pa.Table:
        tables = []
        for file in files:
            numbers = file.numbers
            numbers_in_file = None
            if series is not None:
                chosen = set(series)
                numbers = {number: in_run for number, in_run in numbers.items() if in_run in chosen}
                numbers_in_file = list(numbers)
            if not numbers:
                continue
            try:
                table = self._load(file.path, schema, numbers_in_file)
            except FileNotFoundError as error:
                raise _replaced(self.folder, error) from error
            if table is not None:
                table = self._drop_replaced(file.segment, table)
                in_run = _translated(table["series"], numbers)
                table = table.set_column(schema.get_field_index("series"), schema.field("series"), in_run)
                tables.append(table.filter(pc.is_valid(in_run)))
        return _sorted(schema, tables, "series", "iteration")

    # ------------------------------------------------------------------ facts

    def _facts(self, segments: tuple[Segment, ...]) -> dict[str, pa.Table]:
        by_table: dict[str, list[pa.Table]] = {name: [] for name in FACTS}
        gemms = 0
        for number, segment in enumerate(segments, 1):
            # Any later segment may have started at an earlier iteration than the next segment.
            following = min((later.first_iteration for later in segments[number:]), default=None)
            for folder in (self.folders[segment.number], *self.ranks[segment.number].values()):
                tables = {name: self._fact(folder, name, following) for name in FACTS}
                gemms += _renumber(tables, gemms)
                for name, table in tables.items():
                    by_table[name].append(table)
        by_table["states"] = list(filter(len, by_table["states"]))[-1:] or by_table["states"][:1]
        return {name: pa.concat_tables(tables).combine_chunks() for name, tables in by_table.items()}

    def _fact(self, folder: Path, name: str, following: int | None) -> pa.Table:
        """Read a table of facts; its spans end before ``following``, the start of a later segment."""
        path = folder / f"{name}{CLOSED}"
        schema = FACTS[name]
        table = None
        if path.exists():
            table = self._load(path, schema)
        elif self.counts.get(folder / rank_name(0), {}).get(name):
            self._note(f"{path} is missing.", "damaged")
        if table is None:
            return schema.empty_table()
        if following is None or "until" not in schema.names:
            return table
        until = pc.min_element_wise(table["until"], pa.scalar(following - 1, pa.int64()), skip_nulls=True)
        table = table.set_column(schema.get_field_index("until"), schema.field("until"), until)
        return table.filter(pc.less_equal(pc.fill_null(table["since"], 0), table["until"]))


def _sorted(schema: pa.Schema, tables: list[pa.Table], *columns: str) -> pa.Table:
    joined = pa.concat_tables([schema.empty_table(), *tables]).combine_chunks()
    return joined.sort_by([(name, "ascending") for name in columns])


def _whole(value: object, otherwise: int) -> int:
    if isinstance(value, int) and 0 <= value < MOST_ITERATION:
        return value
    return otherwise


def _translated(series: pa.ChunkedArray, numbers: Mapping[int, int]) -> pa.ChunkedArray:
    rows = pc.index_in(series, pa.array([*numbers], pa.int32()))
    return pc.take(pa.array([*numbers.values()], pa.int32()), rows)


def _renumber(tables: dict[str, pa.Table], first: int) -> int:
    """Add ``first`` to the numbers of GEMMs, and return how many numbers there are."""
    count = 0
    for name in ("gemms", "operands"):
        table = tables[name]
        place = table.schema.get_field_index("gemm_id")
        if len(table):
            count = max(count, pc.max(table["gemm_id"]).as_py() + 1)
        moved = pc.add(table["gemm_id"], pa.scalar(first, pa.int32()))
        tables[name] = table.set_column(place, table.schema.field(place), moved)
    return count
