"""Keeps the statistics of a rank within a limit: recent steps whole, old ones ever thinner.

The sealed parts of a run have levels. Those of level 0 have all steps, those of level 1 every 10th one, and those of
level 2 every 100th; each level has a share of the limit. Where the limit is reached, up to ten of the oldest parts of a
level that has more than its share become one part of the next level. What leaves the last level is dropped.

A thinned part also has the *extremes* of each series: its lowest and its highest value, and the first one that is not
finite, flagged :data:`~te_precision_callbacks.runs.tables.EXTREME`. A loss spike of long ago is still there.

Which steps are kept depends on their iterations alone: of a series with a number every ``g`` iterations those whose
``iteration // g`` is a multiple of 10. Series of one schedule, layers, and runs of one config keep the same steps.

The new part is written beside its place and renamed; its name says which parts it replaces, and readers take it in
their place from that moment on (``runs/run_files.py``). A process that is killed leaves no step twice, and none less.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.runs.arrays import arrow_array
from te_precision_callbacks.runs.bounds import MOST_THINNED
from te_precision_callbacks.runs.parts import (
    DROPPED,
    EVERY,
    SealedPart,
    Stretch,
    read_part,
    stretch_of,
    with_stretch,
    write_sealed,
)
from te_precision_callbacks.runs.run_files import SEALED, PartFile, part_stem
from te_precision_callbacks.runs.soundness import sound
from te_precision_callbacks.runs.tables import EXTREME, STEP0, VALUES, VECTORS

SHARES = (5 / 8, 3 / 16, 3 / 16)
"""Level -> its share of the limit. So much that thinning leaves at least half of it to the recent steps."""

RECENT = 1 / 2
"""The share of the limit that is left to whole steps, always the latest ones."""

MOST_TOGETHER = 10
"""The parts that become one."""

_STEP = 10
_TABLES = {"values": VALUES, "vectors": VECTORS}  # what is thinned; all else is small

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]


def can_be_thinned(part: SealedPart) -> bool:
    """Whether a part has statistics."""
    return part.file.table in _TABLES and EVERY[part.level] != DROPPED


# ---------------------------------------------------------------------- which parts are thinned


def choose(parts: Sequence[SealedPart], waiting: int, room: float) -> list[SealedPart]:
    """The parts that are thinned next, oldest first; none if there are none.

    Args:
        parts: all parts, oldest first.
        waiting: the bytes of statistics that are not in a part yet.
        room: the bytes that all of them may have.
    """
    levels = range(len(SHARES))
    sizes = [sum(part.nbytes for part in parts if part.level == level and can_be_thinned(part)) for level in levels]
    sizes[0] += waiting
    too_large = [level for level in levels if sizes[level] > SHARES[level] * room]
    for level in (*too_large, *reversed(levels)):
        found = _oldest(parts, level, sizes[0] - RECENT * room if level == 0 else np.inf)
        if found:
            return found
    return []


def _oldest(parts: Sequence[SealedPart], level: int, most: float) -> list[SealedPart]:
    """The oldest parts of a level, of the table that has most of it: consecutive ones, with at most so many bytes."""
    of_level = [part for part in parts if part.level == level and can_be_thinned(part)]
    if not of_level:
        return []
    sizes: dict[str, int] = {}
    for part in of_level:
        sizes[part.file.table] = sizes.get(part.file.table, 0) + part.nbytes
    table = max(sizes, key=lambda name: sizes[name])
    first, *others = (part for part in of_level if part.file.table == table)
    if EVERY[level + 1] == DROPPED:
        return [*(part for part in parts if part.level == level + 1 and _follows(part, first)), first]
    found = [first]
    for part in others[: MOST_TOGETHER - 1]:
        if not _follows(found[-1], part) or sum(each.nbytes for each in (*found, part)) > most:
            break
        found.append(part)
    return found


def _follows(part: SealedPart, other: SealedPart) -> bool:
    """Whether another part comes right behind one."""
    one, two = part.file, other.file
    return (one.table, one.path.parent, one.last + 1) == (two.table, two.path.parent, two.first)


# ---------------------------------------------------------------------- thinning


def thin(group: Sequence[SealedPart], again_from: float = math.inf) -> Generator[None, None, SealedPart]:
    """Make one part of the next level of parts; it pauses between steps that are short.

    Memory holds one of the parts, and what is kept of all of them.

    Args:
        group: consecutive parts of a level; before a part that is dropped, also what was dropped before.
        again_from: the iteration from which on a later segment has run again. What no longer counts there is no extreme
            of what does.

    Returns:
        The new part. The others are removed.

    Raises:
        OSError, pyarrow.ArrowException, ValueError, KeyError: a part cannot be read, or the new one not be written; all
            parts are as they were.
    """
    level = group[-1].level + 1
    first, last = group[0].file, group[-1].file
    schema = _TABLES[first.table]
    survey = _Survey(again_from)
    for part in group:
        survey.see_span(part.file.path)
        if EVERY[level] != DROPPED:
            columns = [name for name in ("series", "iteration", "value", "flags") if name in schema.names]
            survey.see(survey.columns(sound(read_part(part.file.path, columns, schema), first.table)))
        yield
    kept = [schema.empty_table()]
    for part in group if EVERY[level] != DROPPED else ():
        table = sound(read_part(part.file.path, schema.names, schema), first.table)
        kept.append(survey.thinned(table))
        yield
    joined = pa.concat_tables(kept).unify_dictionaries()
    if joined.nbytes > MOST_THINNED:
        raise ValueError(f"what would be left of {len(group)} parts takes {joined.nbytes:,} bytes")
    joined = joined.take(pc.sort_indices(joined, sort_keys=[("series", "ascending"), ("iteration", "ascending")]))
    yield
    path = first.path.parent / (part_stem(first.table, first.first, last.last) + SEALED)
    nbytes = write_sealed(with_stretch(joined, survey.stretch(EVERY[level])), path)
    for part in group:
        if part.file.path != path:
            part.file.path.unlink(missing_ok=True)
    return SealedPart(PartFile(first.table, first.first, last.last, True, path), nbytes, level)


class _Columns(NamedTuple):
    """The columns of a part that decide which of its rows are kept.

    Attributes:
        series, iterations: [rows], by series and iteration. Each series has two numbers: what was run again is another.
        values: [rows]; None of histograms.
        flags: [rows].
    """

    series: Ints
    iterations: Ints
    values: Floats | None
    flags: npt.NDArray[np.uint8]


_NEVER = np.iinfo(np.int64).min
_OF_SERIES = np.dtype([("step", "i8"), ("first", "i8"), ("least", "f8", 2), ("at", "i8", 3)], align=True)
_UNSEEN = np.array((0, _NEVER, (np.inf, np.inf), (_NEVER, _NEVER, _NEVER)), _OF_SERIES)
"""What is known of a series: the greatest common divisor of the distances of its iterations, 0 of a single one; the
first iteration; the lowest finite value, and the highest one with its sign turned; the iterations of these two, and of
the first value that is not finite."""


class _Survey:
    """What the series of some parts are like: how many iterations apart their numbers are, and where extremes are."""

    def __init__(self, again_from: float) -> None:
        self._again_from = again_from
        self._of = np.empty(0, _OF_SERIES)
        self._span: list[int] = []
        self._keys, self._numbers = np.zeros(0, np.int64), np.zeros(0, np.int64)  # series of the files -> from 0

    def _series(self, series: npt.NDArray[np.int32], iterations: Ints) -> Ints:
        keys = 2 * series.astype(np.int64) + (iterations >= self._again_from)
        new = np.setdiff1d(keys, self._keys)
        if len(new):
            known = np.r_[self._keys, new]
            order = np.argsort(known)
            self._keys, self._numbers = known[order], np.r_[self._numbers, len(self._keys) + np.arange(len(new))][order]
        found: Ints = self._numbers[np.searchsorted(self._keys, keys)]
        return found

    def columns(self, table: pa.Table) -> _Columns:
        """The columns of a part."""
        iterations = table["iteration"].to_numpy()
        series = self._series(table["series"].to_numpy(), iterations)
        order = np.lexsort((iterations, series))
        values = table["value"].to_numpy()[order] if "value" in table.column_names else None
        return _Columns(series[order], iterations[order], values, _flags(table)[order])

    def see_span(self, path: Path) -> None:
        """Note the iterations that a thinned part had."""
        stretch = stretch_of(path)
        if stretch is not None:
            self._span += stretch.first, stretch.last

    def stretch(self, every: int) -> Stretch:
        """What the new part says of itself."""
        return Stretch(every, min(self._span, default=0), max(self._span, default=0))

    def see(self, rows: _Columns) -> None:
        """Note rows."""
        if not len(rows.series):
            return
        self._span += int(rows.iterations.min()), int(rows.iterations.max())
        self._of = np.append(self._of, np.full(max(0, int(rows.series.max()) + 1 - len(self._of)), _UNSEEN))
        self._see_steps(rows)
        if rows.values is not None:
            self._see_values(rows, rows.values)

    def _see_steps(self, rows: _Columns) -> None:
        regular = (rows.flags & (EXTREME | STEP0)) == 0
        series, iterations = rows.series[regular], rows.iterations[regular]
        starts = np.flatnonzero(np.diff(series, prepend=-1))
        if not len(starts):
            return
        found = series[starts]
        new = self._of["first"][found] == _NEVER
        self._of["first"][found[new]] = iterations[starts[new]]
        steps = np.gcd.reduceat(np.abs(iterations - self._of["first"][series]), starts)
        self._of["step"][found] = np.gcd(self._of["step"][found], steps)

    def _see_values(self, rows: _Columns, values: Floats) -> None:
        finite = np.isfinite(values)
        counts = finite & ((rows.flags & STEP0) == 0)
        for which, signed in enumerate((values, -values)):
            self._see_lowest(which, rows, np.where(counts, signed, np.inf))
        series, iterations = rows.series[~finite], rows.iterations[~finite]
        found, first = np.unique(series, return_index=True)
        new = self._of["at"][found, 2] == _NEVER
        self._of["at"][found[new], 2] = iterations[first[new]]

    def _see_lowest(self, which: int, rows: _Columns, values: Floats) -> None:
        """Note the lowest of some values, the first of equal ones."""
        starts = np.flatnonzero(np.diff(rows.series, prepend=-1))
        found, lowest = rows.series[starts], np.minimum.reduceat(values, starts)
        is_lowest = np.flatnonzero(values == np.repeat(lowest, np.diff(np.append(starts, len(values)))))
        first = is_lowest[np.unique(rows.series[is_lowest], return_index=True)[1]]
        lower = lowest < self._of["least"][found, which]
        self._of["least"][found[lower], which] = lowest[lower]
        self._of["at"][found[lower], which] = rows.iterations[first[lower]]

    def thinned(self, table: pa.Table) -> pa.Table:
        """The rows of a part that are kept, with their flags."""
        iterations, flags = table["iteration"].to_numpy(), _flags(table)
        series = self._series(table["series"].to_numpy(), iterations)
        step = self._of["step"][series]
        due = (step == 0) | (iterations // np.maximum(step, 1) % _STEP == 0)
        regular = due & ((flags & (EXTREME | STEP0)) == 0)
        first_step = (flags & STEP0) != 0
        extreme = (iterations[:, None] == self._of["at"][series]).any(1)
        kept = regular | first_step | extreme
        table = table.filter(arrow_array(kept, pa.bool_()))
        if "flags" not in table.column_names:
            return table
        flags = np.where(regular | first_step, flags, flags | EXTREME)[kept].astype(np.uint8)
        place = table.schema.get_field_index("flags")
        return table.set_column(place, table.schema.field(place), arrow_array(flags, pa.uint8()))


def _flags(table: pa.Table) -> npt.NDArray[np.uint8]:
    if "flags" not in table.column_names:
        return np.zeros(len(table), np.uint8)
    flags: npt.NDArray[np.uint8] = table["flags"].fill_null(0).to_numpy()
    return flags
