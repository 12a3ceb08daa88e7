"""Bounds the size of a rank's statistics by downsampling old steps.

At the limit, an old file is rewritten with every second step of each series, together with the next file if that has
the same interval. Files with the shortest interval are rewritten first, then the oldest. The latest statistics, half of
the limit, are rewritten only if there are no others. A rewritten file also keeps the *extremes* of each series, flagged
as :data:`~te_precision_callbacks.runs.tables.EXTREME`: its minimum, its maximum, and its first non-finite value.

If a series has a value every ``g`` iterations, steps with an even ``iteration // g`` are kept, so all series of a
schedule, and all runs of a config, keep the same steps.

The new file is written atomically, and its name has the numbers of the files that it replaces (``runs/run_files.py``),
so a killed process neither duplicates nor loses steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs.run_files import (
    CLOSED,
    MOST_ITERATION,
    RUN_FILE,
    DataFile,
    data_files,
    has_ended,
    is_incomplete,
    segments_of,
)
from te_precision_callbacks.runs.tables import (
    EXTREME,
    STEP0,
    UNREADABLE,
    VALUES,
    VECTORS,
    column,
    read_table,
    write_table,
)
from te_precision_callbacks.runs.writing import RunWriter
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask

logger = logging.getLogger(__name__)

_BEFORE = 15 / 16
"""Share of the limit at which files are rewritten; old and new files coexist for a moment."""

_LEAST = 1 / 2
"""Share of the limit that is reserved for statistics."""

_RECENT = 1 / 2
"""Share of the space for statistics that is reserved for the latest ones."""

_NO_GAIN = 0.9
"""If rewriting leaves more than this share of the size, the file is not rewritten alone again."""

_TABLES = {"values": VALUES, "vectors": VECTORS}  # other tables are small


class SizeLimit:
    """Limits the size of a rank's files, in the writer thread.

    Args:
        limit: maximum number of bytes for the rank, in all segments.
        say: called with the kind and text of an event.
    """

    def __init__(self, run: Path, writer: RunWriter, limit: int, say: Callable[[str, str], None]) -> None:
        self.is_full = False
        self._writer = writer
        self._limit = limit
        self._say = say
        self._reported: set[str] = set()
        self._begins: dict[Path, int] = {}  # segment of this process -> first iteration with a step
        self._unchanged: set[Path] = set()  # files for which rewriting alone saves too little
        self._damaged: set[Path] = set()
        self._folders = []
        for segment in segments_of(run).values():
            folder = segment / writer.own.name
            if segment.name < writer.folder.name and folder.is_dir() and has_ended(segment / RUN_FILE):
                self._folders.append(folder)
                # Remove remains of a process that was killed while rewriting.
                for path in (*(file.path for file in data_files(folder)[1]), *filter(is_incomplete, folder.iterdir())):
                    path.unlink(missing_ok=True)
        self._folders.append(writer.own)

    def follow(self, writer: RunWriter) -> None:
        self._writer = writer
        self._folders.append(writer.own)

    def note_step(self, iteration: int) -> None:
        self._begins.setdefault(self._writer.folder, iteration)

    def keep(self) -> None:
        while True:
            files, room = self._files_and_room()
            used = sum(files.values())
            if used <= _BEFORE * room:
                self.is_full = False
                return
            group = self._choose(files, room)
            if not group:
                self.is_full = used > room
                if self.is_full:
                    self._say_once(
                        "records_limited",
                        f"The records of rank {self._writer.rank} have reached their limit of {self._limit:,} bytes,"
                        " and no old steps are left to downsample. Statistics are no longer recorded, only trainer"
                        " metrics and events. Increase records= to keep more.",
                    )
                return
            self._rewrite(group, sum(files[file] for file in group))
            if used <= room:
                return

    # ------------------------------------------------------------------ selection of files

    def _files_and_room(self) -> tuple[dict[DataFile, int], float]:
        """Return the files of statistics with their sizes, oldest first, and the number of bytes allowed for them."""
        with_facts = [*self._folders, *(folder.parent for folder in self._folders if self._writer.rank == 0)]
        paths = chain(*(folder.iterdir() for folder in with_facts))
        everything = sum(path.stat().st_size for path in paths if not path.is_dir())
        files: dict[DataFile, int] = {}
        for folder in self._folders:
            listed = [
                file for file in data_files(folder)[0] if file.table in _TABLES and file.path not in self._damaged
            ]
            newest = {file.table: file.last for file in listed}
            for file in sorted(listed, key=lambda file: file.last / newest[file.table]):
                files[file] = file.path.stat().st_size
        return files, max(self._limit - (everything - sum(files.values())), _LEAST * self._limit)

    def _choose(self, files: dict[DataFile, int], room: float) -> list[DataFile]:
        closed = [file for file in files if not (file.is_open and file.path.parent == self._writer.own)]
        old = list(closed)
        newest = sum(size for file, size in files.items() if file not in closed)
        while old and newest + files[old[-1]] <= _RECENT * room:
            newest += files[old.pop()]
        for candidates in (old, closed):
            place = {(file.table, file.path.parent, file.interval, file.first): file for file in candidates}
            groups = []
            for file in candidates:
                neighbour = place.get((file.table, file.path.parent, file.interval, file.last + 1))
                if neighbour is not None:
                    groups.append([file, neighbour])
                elif file.path not in self._unchanged:
                    groups.append([file])
            if groups:
                return min(groups, key=lambda group: group[0].interval)
        return []

    # ------------------------------------------------------------------ rewriting

    def _rewrite(self, group: list[DataFile], nbytes: int) -> None:
        first = group[0]
        last = group[-1]
        schema = _TABLES[first.table]
        folder = first.path.parent
        tables = []
        for file in group:
            try:
                tables.append(read_table(file.path, schema.names, schema))
            except UNREADABLE as error:
                logger.warning("The records in %s cannot be downsampled and remain unchanged: %s", file.path, error)
                self._damaged.add(file.path)
                return
        later = [begin for segment, begin in self._begins.items() if segment.name > folder.parent.name]
        table = downsample(pa.concat_tables(tables), min(later, default=MOST_ITERATION))
        path = folder / f"{first.table}-{first.first:04d}-{last.last:04d}-every{2 * first.interval}{CLOSED}"
        size = write_table(table, path)
        for file in group:
            file.path.unlink(missing_ok=True)
        if size > _NO_GAIN * nbytes:
            self._unchanged.add(path)
        self._say_once(
            "records_thinned",
            f"The records of rank {self._writer.rank} have reached their limit of {self._limit:,} bytes. Old steps"
            " are downsampled: every second step and the extremes of each series are kept. Increase records= to keep"
            " more.",
        )

    def _say_once(self, kind: str, text: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            self._say(kind, text)


# ---------------------------------------------------------------------- selection of rows

Places = npt.NDArray[np.intp]


def downsample(table: pa.Table, end: int) -> pa.Table:
    """Keep every second step and the extremes of each series, sorted by series and iteration.

    The first step of delayed scaling is kept, but does not count as an extreme.

    Args:
        end: drop iterations from this one on.
    """
    iterations = table["iteration"].to_numpy()
    table = table.take(column(np.flatnonzero(iterations < end), pa.int64())).unify_dictionaries()
    table = table.sort_by([("series", "ascending"), ("iteration", "ascending")]).combine_chunks()
    if not len(table):
        return table
    series = table["series"].to_numpy()
    iterations = table["iteration"].to_numpy()
    has_values = "value" in table.column_names
    flags = np.zeros(len(table), np.uint8)
    if has_values:
        flags = table["flags"].fill_null(0).to_numpy()
    kept = (flags & STEP0) != 0
    kept[_every_second(series, iterations, np.flatnonzero((flags & (EXTREME | STEP0)) == 0))] = True
    if has_values:
        extreme = np.zeros(len(table), bool)
        extreme[_extremes(series, table["value"].to_numpy(), (flags & STEP0) != 0)] = True
        flags = np.where(extreme & ~kept, flags | EXTREME, flags).astype(np.uint8)
        kept |= extreme
        place = table.schema.get_field_index("flags")
        table = table.set_column(place, table.schema.field(place), column(flags, pa.uint8()))
    return table.take(column(np.flatnonzero(kept), pa.int64()))


def _every_second(series: npt.NDArray[np.int32], iterations: Ints, rows: Places) -> Places:
    """Select rows with an even step number, in units of the greatest common divisor of a series' distances."""
    if not len(rows):
        return rows
    whose = series[rows]
    when = iterations[rows]
    begins = np.flatnonzero(np.diff(whose, prepend=-1))
    distances = np.diff(when, prepend=0)
    distances[begins] = 0
    steps = np.repeat(np.gcd.reduceat(distances, begins), np.diff(np.append(begins, len(rows))))
    even: Places = rows[(steps == 0) | (when // np.maximum(steps, 1) % 2 == 0)]
    return even


def _extremes(series: npt.NDArray[np.int32], values: Floats, first_step: Mask) -> Places:
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
