"""Rows of a run that wait to be appended to the tails of their tables."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs.arrays import arrow_array
from te_precision_callbacks.runs.run_files import AppendedFile
from te_precision_callbacks.runs.tables import VALUES, VECTORS
from te_precision_callbacks.runs.tails import Tail

_ROW, _BIN = 64, 8
"""The bytes that a value, or a histogram without its bins, needs in a tail at most, and those of a bin."""


class SeriesNumbers:
    """The series of a rank in a segment, by the number that each got when it was first asked for."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | None, ...], int] = {}
        self._subjects: list[tuple[str, ...]] = []
        self._ranks: list[int | None] = []
        self._rank_of = arrow_array([], pa.int32())

    def number(self, subject: tuple[str, ...], rank: int | None) -> int:
        """The number of a series.

        Args:
            subject: the values of the columns :data:`~te_precision_callbacks.runs.tables.SUBJECT`.
            rank: the rank whose own the numbers are; None if they are reduced.
        """
        key = (*subject, None if rank is None else str(rank))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._subjects)
            self._subjects.append(subject)
            self._ranks.append(rank)
        return number

    def columns(self, tail: Tail, series: npt.NDArray[np.int32]) -> list[pa.Array]:
        """The columns of a tail that name the subjects of rows, and the rank."""
        if len(self._rank_of) != len(self._ranks):
            self._rank_of = arrow_array(self._ranks, pa.int32())
        return [*tail.subject_columns(self._subjects, series), self._rank_of.take(arrow_array(series, pa.int32()))]


class NewRows:
    """Rows of a table that wait until :meth:`flush` appends them to the tail.

    Args:
        tail: the table's.

    Attributes:
        waiting: the bytes that the rows need in the tail at most, where that is counted.
    """

    def __init__(self, tail: Tail) -> None:
        self.tail = tail
        self.waiting = 0
        self._rows: list[Any] = []

    def flush(self) -> None:
        """Append the rows to the tail."""
        if self._rows:
            self.tail.append(self._batch())
            self._rows = []
            self.waiting = 0

    def _batch(self) -> pa.RecordBatch:
        raise NotImplementedError


class NewFacts(NewRows):
    """Rows as mappings."""

    def add(self, rows: Iterable[dict[str, Any]]) -> None:
        """Keep rows."""
        self._rows += rows

    def _batch(self) -> pa.RecordBatch:
        return self.tail.batch_of(self._rows)


class _NewNumbers(NewRows):
    """Rows of series.

    Args:
        tail: the table's.
        segment: the number of the segment.
        series: the series of the rank.
    """

    def __init__(self, tail: Tail, segment: int, series: SeriesNumbers) -> None:
        super().__init__(tail)
        self._segment = segment
        self._series = series


class NewValues(_NewNumbers):
    """Numbers of steps: iteration, series, values and flags. Arguments are those of :class:`_NewNumbers`."""

    def add(
        self,
        iteration: int,
        series: npt.NDArray[np.int32],
        values: npt.NDArray[np.float64],
        flags: npt.NDArray[np.uint8],
    ) -> None:
        """Keep numbers of a step."""
        self._rows.append((iteration, series, values, flags))
        self.waiting += _ROW * len(series)

    def _batch(self) -> pa.RecordBatch:
        series = np.concatenate([each for _, each, _, _ in self._rows]).astype(np.int32)
        counts = [len(each) for _, each, _, _ in self._rows]
        iterations = np.repeat([iteration for iteration, _, _, _ in self._rows], counts)
        return pa.record_batch(
            [
                arrow_array(np.full(len(series), self._segment), pa.int16()),
                arrow_array(iterations, pa.int64()),
                arrow_array(series, pa.int32()),
                arrow_array(np.concatenate([each for _, _, each, _ in self._rows]), pa.float64()),
                arrow_array(np.concatenate([each for _, _, _, each in self._rows]), pa.uint8()),
                *self._series.columns(self.tail, series),
            ],
            schema=VALUES,
        )


class NewVectors(_NewNumbers):
    """Histograms of steps: iteration, series, bins and their counts. Arguments are those of :class:`_NewNumbers`."""

    def add(self, iteration: int, series: int, counts: Sequence[float] | npt.NDArray[np.floating[Any]]) -> None:
        """Keep a histogram of a step."""
        dense = np.asarray(counts)
        bins = np.flatnonzero(dense).astype(np.uint16)
        self._rows.append((iteration, series, bins, dense[bins].astype(np.float32)))
        self.waiting += _ROW + _BIN * len(bins)

    def _batch(self) -> pa.RecordBatch:
        series = np.array([each for _, each, _, _ in self._rows], np.int32)
        offsets = arrow_array([0, *itertools.accumulate(len(bins) for _, _, bins, _ in self._rows)], pa.int32())
        bins = arrow_array(np.concatenate([bins for _, _, bins, _ in self._rows]), pa.uint16())
        counts = arrow_array(np.concatenate([counts for _, _, _, counts in self._rows]), pa.float32())
        return pa.record_batch(
            [
                arrow_array(np.full(len(series), self._segment), pa.int16()),
                arrow_array([iteration for iteration, _, _, _ in self._rows], pa.int64()),
                arrow_array(series, pa.int32()),
                pa.ListArray.from_arrays(offsets, bins),
                pa.ListArray.from_arrays(offsets, counts),
                *self._series.columns(self.tail, series),
            ],
            schema=VECTORS,
        )


class NewEvents:
    """Events, as lines of JSON.

    Args:
        path: the file, which is made for the first event.

    Attributes:
        nbytes: the bytes of the file.
    """

    def __init__(self, path: Path) -> None:
        self.nbytes = 0
        self._path = path
        self._file: AppendedFile | None = None
        self._lines: list[bytes] = []

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep an event until :meth:`flush`."""
        self._lines.append(json.dumps(row).encode() + b"\n")

    def flush(self) -> None:
        """Append the events to the file."""
        if self._lines:
            if self._file is None:
                self._file = AppendedFile(self._path)
            self._file.write(b"".join(self._lines))
            self.nbytes = self._file.nbytes
            self._lines = []

    def leave(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
