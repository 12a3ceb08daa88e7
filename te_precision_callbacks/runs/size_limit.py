"""The size limit of a rank's statistics: old steps are thinned, recent ones kept.

Where the limit is reached, an old file is rewritten with every second step of each series, together with its neighbor
if that has the same interval. Files with the shortest interval go first, then the oldest, so the interval of old steps
doubles each time. The latest statistics, half of the limit, are rewritten only when no older ones are left. A rewritten
file also keeps the *extremes* of each series, flagged :data:`~te_precision_callbacks.runs.tables.EXTREME`: its minimum,
its maximum, and its first non-finite value.

The kept steps depend on iterations only: for a series with a value every ``g`` iterations, ``iteration // g`` is even.
So series with the same schedule, and runs with the same config, keep the same steps.

The new file is written atomically, and its name contains the numbers of the files that it replaces
(``runs/run_files.py``), so a killed process neither duplicates nor loses steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs.data_tables import UNREADABLE, read_table, write_table
from te_precision_callbacks.runs.input_files import MOST_ITERATION
from te_precision_callbacks.runs.run_files import (
    CLOSED,
    RUN_FILE,
    DataFile,
    data_files,
    has_ended,
    is_incomplete,
    segments_of,
)
from te_precision_callbacks.runs.tables import EXTREME, STEP0, VALUES, VECTORS
from te_precision_callbacks.runs.writing import RunWriter

logger = logging.getLogger(__name__)

_BEFORE = 15 / 16
"""Share of the limit at which files are rewritten, since new and old files coexist for a moment."""

_LEAST = 1 / 2
"""Share of the limit that is reserved for statistics."""

_RECENT = 1 / 2
"""Share of the room for statistics that the latest ones keep."""

_NO_GAIN = 0.9
"""A file that stays above this share of its size is not rewritten alone again."""

_TABLES = {"values": VALUES, "vectors": VECTORS}  # all else is small


class SizeLimit:
    """Keeps the files of a rank within a limit, in the thread that writes them.

    Args:
        files: the writer's closed files with their sizes, oldest first; those of earlier segments are added.
        limit: the most bytes for the rank, in all segments.
        say: receives an event's kind and text.
    """

    def __init__(
        self, run: Path, writer: RunWriter, files: dict[DataFile, int], limit: int, say: Callable[[str, str], None]
    ) -> None:
        self.is_full = False
        self._writer = writer
        self._files = files
        self._limit = limit
        self._say = say
        self._said: set[str] = set()
        self._begins: dict[Path, int] = {}  # segment -> the first iteration with a step, of this process
        self._fixed = 0  # the bytes of what is never rewritten in other segments
        self._incompressible: set[Path] = set()  # rewriting these alone gains nothing
        for number, segment in segments_of(run).items():
            folder = segment / writer.own.name
            if number != writer.segment and folder.is_dir():
                self._adopt(segment, folder)

    def _adopt(self, segment: Path, folder: Path) -> None:
        """Count the files of another segment, which are rewritten if its process has ended."""
        sizes = {path: path.stat().st_size for path in folder.iterdir()}
        if segment.name < self._writer.folder.name and has_ended(segment / RUN_FILE):
            files, replaced = data_files(folder)
            # What a process that was killed has left of its last rewriting.
            for path in (*(file.path for file in replaced), *filter(is_incomplete, [*sizes])):
                path.unlink(missing_ok=True)
                del sizes[path]
            self._files |= {file: sizes.pop(file.path) for file in files}
        self._fixed += sum(sizes.values())

    def follow(self, writer: RunWriter) -> None:
        """Continue with another segment of this process; earlier files but the closed ones stay as they are."""
        self._fixed += self._writer.nbytes
        self._writer = writer

    def note_step(self, iteration: int) -> None:
        self._begins.setdefault(self._writer.folder, iteration)

    def keep(self) -> None:
        while True:
            used, room = self._used_and_room()
            if used <= _BEFORE * room:
                self.is_full = False
                return
            group = self._choose(room)
            if not group:
                self.is_full = used > room
                if self.is_full:
                    self._say_once(
                        "records_limited",
                        f"The records of rank {self._writer.rank} have reached their limit of {self._limit:,} bytes,"
                        " and no old steps are left to be thinned. Statistics are no longer recorded; the trainer's"
                        " numbers and events are. A larger size for records= allows more.",
                    )
                return
            self._rewrite(group)
            if used <= room:
                return

    # ------------------------------------------------------------------ which files

    def _used_and_room(self) -> tuple[int, float]:
        everything = sum(self._files.values()) + self._fixed + self._writer.nbytes
        used = sum(size for file, size in self._files.items() if file.table in _TABLES) + self._writer.open_bytes
        return used, max(self._limit - (everything - used), _LEAST * self._limit)

    def _choose(self, room: float) -> list[DataFile]:
        files = {file: size for file, size in self._files.items() if file.table in _TABLES}
        newest, old = self._writer.open_bytes, list(files)
        while old and newest + files[old[-1]] <= _RECENT * room:
            newest += files[old.pop()]
        for candidates in (old, list(files)):
            place = {(file.table, file.path.parent, file.interval, file.first): file for file in candidates}
            groups = []
            for file in candidates:
                neighbour = place.get((file.table, file.path.parent, file.interval, file.last + 1))
                if neighbour is not None or file.path not in self._incompressible:
                    groups.append([file] if neighbour is None else [file, neighbour])
            if groups:
                return min(groups, key=lambda group: group[0].interval)
        return []

    # ------------------------------------------------------------------ rewriting

    def _rewrite(self, group: list[DataFile]) -> None:
        first, last = group[0], group[-1]
        schema, folder = _TABLES[first.table], first.path.parent
        tables = []
        for file in group:
            try:
                tables.append(read_table(file.path, schema.names, schema))
            except UNREADABLE as error:
                logger.warning("The records in %s cannot be thinned, and remain as they are: %s", file.path, error)
                self._fixed += self._files.pop(file)
                return
        later = [begin for segment, begin in self._begins.items() if segment.name > folder.parent.name]
        table = every_second_step(pa.concat_tables(tables), min(later, default=MOST_ITERATION))
        interval = 2 * first.interval
        path = folder / f"{first.table}-{first.first:04d}-{last.last:04d}-every{interval}{CLOSED}"
        size = write_table(table, path)
        for file in group:
            file.path.unlink(missing_ok=True)
        if size > _NO_GAIN * sum(self._files[file] for file in group):
            self._incompressible.add(path)
        merged = DataFile(first.table, first.first, last.last, interval, path)
        files = [(merged, size) if file == first else (file, nbytes) for file, nbytes in self._files.items()]
        self._files.clear()
        self._files.update(item for item in files if item[0] not in group)
        self._say_once(
            "records_thinned",
            f"The records of rank {self._writer.rank} have reached their limit of {self._limit:,} bytes. Of the oldest"
            " steps every second one is kept, and the lowest and highest value of each series; the interval doubles"
            " each time. The latest steps are kept whole. A larger size for records= keeps more.",
        )

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._said:
            self._said.add(kind)
            self._say(kind, text)


# ---------------------------------------------------------------------- which rows

Places = npt.NDArray[np.intp]
Mask = npt.NDArray[np.bool_]


def every_second_step(table: pa.Table, end: int) -> pa.Table:
    """Keep every second step of each series, and its extremes, before the iteration ``end``; sorted by series and
    iteration.

    The first step of delayed scaling is kept, but is not an extreme.
    """
    iterations = table["iteration"].to_numpy()
    table = table.filter(pa.array(iterations < end, pa.bool_())).unify_dictionaries()
    table = table.sort_by([("series", "ascending"), ("iteration", "ascending")]).combine_chunks()
    if not len(table):
        return table
    series, iterations = table["series"].to_numpy(), table["iteration"].to_numpy()
    has_values = "value" in table.column_names
    flags = table["flags"].fill_null(0).to_numpy() if has_values else np.zeros(len(table), np.uint8)
    kept = (flags & STEP0) != 0
    kept[_every_second(series, iterations, np.flatnonzero((flags & (EXTREME | STEP0)) == 0))] = True
    if has_values:
        extreme = np.zeros(len(table), bool)
        extreme[_extremes(series, table["value"].to_numpy(), (flags & STEP0) != 0)] = True
        flags = np.where(extreme & ~kept, flags | EXTREME, flags).astype(np.uint8)
        kept |= extreme
        place = table.schema.get_field_index("flags")
        table = table.set_column(place, table.schema.field(place), pa.array(flags, pa.uint8()))
    return table.filter(pa.array(kept, pa.bool_()))


def _every_second(series: npt.NDArray[np.int32], iterations: npt.NDArray[np.int64], rows: Places) -> Places:
    """Select rows with even steps, in units of the greatest common divisor of the distances in each series."""
    if not len(rows):
        return rows
    whose, when = series[rows], iterations[rows]
    begins = np.flatnonzero(np.diff(whose, prepend=-1))
    distances = np.diff(when, prepend=0)
    distances[begins] = 0
    steps = np.repeat(np.gcd.reduceat(distances, begins), np.diff(np.append(begins, len(rows))))
    even: Places = rows[(steps == 0) | (when // np.maximum(steps, 1) % 2 == 0)]
    return even


def _extremes(series: npt.NDArray[np.int32], values: npt.NDArray[np.float64], first_step: Mask) -> Places:
    finite = np.isfinite(values)
    begins = np.flatnonzero(np.diff(series, prepend=-1))
    counts = np.diff(np.append(begins, len(series)))
    places = [_first_of_each(series, np.flatnonzero(~finite))]
    for signed in (values, -values):
        ranked = np.where(finite & ~first_step, signed, np.inf)
        lowest = np.repeat(np.minimum.reduceat(ranked, begins), counts)
        places.append(_first_of_each(series, np.flatnonzero((ranked == lowest) & (ranked < np.inf))))
    return np.concatenate(places)


def _first_of_each(series: npt.NDArray[np.int32], rows: Places) -> Places:
    return rows[np.unique(series[rows], return_index=True)[1]]
