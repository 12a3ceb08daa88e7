"""Writes the files of a run.

Rows are buffered until :meth:`RunWriter.flush` appends them to the open files. Not thread-safe.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.runs.index import subject_columns
from te_precision_callbacks.runs.recorded import Status
from te_precision_callbacks.runs.run_files import (
    CLOSED,
    OPEN,
    RUN_FILE,
    AppendedFile,
    overwrite,
    process_now,
    rank_name,
    replace_whole,
    segment_name,
    time_text,
)
from te_precision_callbacks.runs.tables import (
    EVENTS,
    FACTS,
    SCALARS,
    SCHEMA_VERSION,
    STEPS,
    VALUES,
    VECTORS,
    batch,
    column,
    write_table,
)
from te_precision_callbacks.statistics.arrays import Floats

CLOSE_BYTES = 64 << 20

CLOSE_SECONDS = 900.0

_ROW = 64
_BIN = 8
"""Upper bounds of bytes in an open file: per value, or per histogram without bins; and per bin."""

_ROOM = 1024
"""Padding in run.json, so that the end of the run can be recorded on a full disk."""

_LONGEST_REASON = 200


class _SeriesNames:
    """Numbers the series of a rank, and returns their columns of :data:`SUBJECT` and ``rank``."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[str | int | None, ...], int] = {}
        self._columns: list[pa.Array] = []  # a row per series

    def number(self, subject: tuple[str, ...], rank: int | None) -> int:
        return self._numbers.setdefault((*subject, rank), len(self._numbers))

    def columns(self, series: npt.NDArray[np.int32]) -> list[pa.Array]:
        if not self._columns or len(self._columns[0]) < len(self._numbers):
            self._columns = subject_columns(self._numbers)  # the dictionaries of a stream only grow
        rows = column(series, pa.int32())
        return [names.take(rows) for names in self._columns]


class _Table:
    """A table of a rank: new rows, the open file, and closed files.

    Args:
        batch: converts new rows to a batch.

    Attributes:
        waiting: upper bound of the bytes of new rows, if counted.
        count: number of files.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        schema: pa.Schema,
        batch: Callable[[list[Any]], pa.RecordBatch],
    ) -> None:
        self.waiting = 0
        self._folder = folder
        self._name = name
        self._schema = schema
        self._batch = batch
        self._rows: list[Any] = []
        self.count = 0
        self._file: AppendedFile | None = None
        self._stream: Any = None
        self._since = 0.0

    @property
    def open_bytes(self) -> int:
        if self._file is None:
            return 0
        return self._file.tell()

    @property
    def _path(self) -> Path:
        return self._folder / f"{self._name}-{self.count:04d}{OPEN}"

    def add(self, row: Any, waiting: int = 0) -> None:
        self._rows.append(row)
        self.waiting += waiting

    def flush(self) -> None:
        """Append the new rows as one batch; close the file if it is large or old."""
        if self._rows:
            if self._file is None:
                self.count += 1
                self._file = AppendedFile(self._path)
                self._stream = pa.ipc.new_stream(
                    self._file, self._schema, options=pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
                )
                self._since = time.monotonic()
            self._stream.write_batch(self._batch(self._rows))
            self._rows = []
            self.waiting = 0
        is_large = self.open_bytes >= CLOSE_BYTES
        if is_large or (self._file is not None and time.monotonic() - self._since >= CLOSE_SECONDS):
            self.close()

    def close(self) -> None:
        """Rewrite the open file as Parquet, sorted by series and iteration; after an OSError, the open file remains."""
        if self._file is None:
            return
        written = self.open_bytes
        self.leave()
        data = self._path.read_bytes()
        try:
            if len(data) != written:
                raise pa.ArrowInvalid(f"it has {len(data):,} of {written:,} bytes")
            table = pa.ipc.open_stream(data).read_all().unify_dictionaries()
        except pa.ArrowInvalid as error:
            raise OSError(f"{self._path} changed during writing: {error}") from error
        if "series" in self._schema.names:
            table = table.sort_by([("series", "ascending"), ("iteration", "ascending")])
        write_table(table, self._path.with_suffix(CLOSED))
        self._path.unlink()

    def leave(self) -> None:
        if self._file is not None:
            # Omit the stream's end mark, which would need space on a full disk; readers stop at the end of the file.
            self._file.close()
        self._file = None
        self._stream = None


class RunWriter:
    """Writes a rank's files of a segment of a run. Methods that write raise OSError.

    Args:
        run_folder: the folder of the run.
        segment: number of the segment; its folder exists.

    Attributes:
        run_id, segment, folder, rank: the run, its segment with the folder, and the rank.
        own: the folder of the rank in the segment.
        status: the status of the segment for run.json.
    """

    def __init__(
        self,
        run_folder: Path,
        segment: int,
        rank: int = 0,
    ) -> None:
        self.run_id = run_folder.name
        self.segment = segment
        self.folder = run_folder / segment_name(segment)
        self.rank = rank
        self.own = self.folder / rank_name(rank)
        self.own.mkdir(exist_ok=True)
        self.status: Status = "running"
        self._facts: dict[str, Any] = {}
        self._fact_names: set[str] = set()
        self._names = _SeriesNames()
        self._tables: dict[str, _Table] = {}  # in the order of a flush: a step before its values
        for name, schema in (("steps", STEPS), ("scalars", SCALARS), ("events", EVENTS)):
            self._tables[name] = _Table(self.own, name, schema, functools.partial(batch, schema))
        self._statistics = (
            _Table(self.own, "values", VALUES, self._values_batch),
            _Table(self.own, "vectors", VECTORS, self._vectors_batch),
        )
        self._tables |= zip(("values", "vectors"), self._statistics, strict=True)

    # ------------------------------------------------------------------ facts

    def put_run(self, **facts: Any) -> None:
        """Add facts, as JSON values, to run.json atomically; docs/records.md lists the keys."""
        if not self._facts:
            self._facts = {
                "schema": SCHEMA_VERSION,
                "run_id": self.run_id,
                "segment": self.segment,
                "started_at": time_text(),
                "ended_at": None,
                "first_iteration": 0,
                "world": 1,
                **process_now(),
            }
        self._facts |= {**facts, "status": self.status}
        text = self._run_text()
        replace_whole(self.folder / RUN_FILE, lambda file: file.write(text.ljust(len(text) + _ROOM)))

    def _run_text(self) -> bytes:
        return json.dumps(self._facts, indent=1, allow_nan=False, default=str).encode()

    def put_facts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a table of :data:`~te_precision_callbacks.runs.tables.FACTS`; missing columns are null."""
        folder = self.folder
        if self.rank:
            folder = self.own
        write_table(pa.Table.from_batches([batch(FACTS[name], [*rows])]), folder / f"{name}{CLOSED}")
        self._fact_names.add(name)

    def put_lost(self, error: BaseException) -> None:
        """Record in run.json that recording has failed, in place; errors are ignored."""
        if self._facts:
            self._facts |= {"not_written": str(error)[:_LONGEST_REASON], "status": self.status}
            if self.status != "running":
                self._facts["ended_at"] = time_text()
            with contextlib.suppress(OSError):
                overwrite(self.folder / RUN_FILE, self._run_text())

    def show_life(self) -> None:
        os.utime(self.folder / RUN_FILE)

    # ------------------------------------------------------------------ rows

    def series(
        self,
        layer: str,
        tensor: str,
        statistic: str,
        *,
        gemm: str | None = None,
        scope: str = "",
        rank: int | None = None,
    ) -> int:
        """Return the number of a series, which may be new; ``rank`` is None for reduced values."""
        return self._names.number((scope, layer, tensor, gemm or "", statistic), rank)

    def add_step(
        self,
        iteration: int,
        *,
        logging_step: int | None = None,
        wall_time: float | None = None,
        step_seconds: float | None = None,
        observe_seconds: float | None = None,
        local: bool = False,
        ranks: int = 1,
    ) -> None:
        """Add a debug iteration; ``wall_time`` is in seconds since the epoch, and defaults to now."""
        row = {
            "segment": self.segment,
            "iteration": iteration,
            "logging_step": iteration if logging_step is None else logging_step,
            "wall_time": round((time.time() if wall_time is None else wall_time) * 1e6),
            "step_seconds": step_seconds,
            "observe_seconds": observe_seconds,
            "local": local,
            "ranks": ranks,
        }
        self._tables["steps"].add(row)

    def add_values(
        self,
        iteration: int,
        series: npt.NDArray[np.int32],
        values: Floats,
        flags: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Add values of a step.

        Args:
            series: [values], int32: numbers from :meth:`series`.
            values: [values], float64.
            flags: [values], uint8; by default 0.
        """
        if len(series):
            if flags is None:
                flags = np.zeros(len(series), np.uint8)
            self._tables["values"].add((np.full(len(series), iteration), series, values, flags), _ROW * len(series))

    def _values_batch(self, rows: list[Any]) -> pa.RecordBatch:
        iterations, series, values, flags = map(np.concatenate, zip(*rows, strict=True))
        arrays = list(
            map(column, (np.full(len(series), self.segment), iterations, series, values, flags), VALUES.types)
        )
        return pa.record_batch([*arrays, *self._names.columns(series)], schema=VALUES)

    def add_vector(self, iteration: int, series: int, counts: Sequence[float] | npt.NDArray[np.floating[Any]]) -> None:
        dense = np.asarray(counts)
        bins = np.flatnonzero(dense)
        self._tables["vectors"].add((iteration, series, bins, dense[bins]), _ROW + _BIN * len(bins))

    def _vectors_batch(self, rows: list[Any]) -> pa.RecordBatch:
        iterations, series, bins, counts = zip(*rows, strict=True)
        offsets = column([0, *itertools.accumulate(map(len, bins))], pa.int32())
        lists = []
        for name, numbers in (("bin", bins), ("count", counts)):
            values = column(np.concatenate(numbers), VECTORS.field(name).type.value_type)
            lists.append(pa.ListArray.from_arrays(offsets, values))
        whose = np.array(series, np.int32)
        arrays = map(column, (np.full(len(rows), self.segment), np.array(iterations), whose), VECTORS.types)
        return pa.record_batch([*arrays, *lists, *self._names.columns(whose)], schema=VECTORS)

    def add_scalars(self, iteration: int, scalars: Mapping[str, float], *, logging_step: int | None = None) -> None:
        row = {
            "segment": self.segment,
            "iteration": iteration,
            "logging_step": iteration if logging_step is None else logging_step,
        }
        for name, value in scalars.items():
            self._tables["scalars"].add({**row, "name": name, "value": value})

    def add_event(
        self,
        kind: str,
        text: str,
        *,
        iteration: int,
        severity: str = "info",
        wall_time: float | None = None,
        data: Mapping[str, Any] | None = None,
        **subject: Any,
    ) -> None:
        """Add an event; see :data:`~te_precision_callbacks.runs.tables.EVENTS`.

        Args:
            wall_time: in seconds since the epoch; by default now.
            data: details, as JSON.
            **subject: further columns: ``phase``, ``scope``, ``layer``, ``tensor``, ``gemm``.
        """
        unknown = subject.keys() - set(EVENTS.names)
        if unknown:
            raise TypeError(f"an event has no {', '.join(sorted(unknown))}")
        row = {
            "segment": self.segment,
            "iteration": iteration,
            "rank": self.rank,
            **subject,
            "kind": kind,
            "severity": severity,
            "wall_time": round((time.time() if wall_time is None else wall_time) * 1e6),
            "text": text.encode(errors="backslashreplace").decode(),  # a file name may contain invalid UTF-8
        }
        if data is not None:
            row["data"] = json.dumps(data, default=str)
        self._tables["events"].add(row)

    # ------------------------------------------------------------------ files

    @property
    def waiting(self) -> int:
        return sum(table.waiting for table in self._statistics)

    @property
    def open_bytes(self) -> int:
        """The size of the open files of statistics, which are not compressed."""
        return sum(table.open_bytes for table in self._statistics)

    def close_statistics(self) -> None:
        for table in self._statistics:
            table.close()

    def flush(self) -> None:
        for table in self._tables.values():
            table.flush()

    def close(self, status: Status = "ended") -> None:
        """Write and close all files; rank 0 records the status in run.json, even after a failure."""
        self.status = status
        try:
            self.flush()
            for table in self._tables.values():
                table.close()
            self.leave()
            if self._facts:
                files = {name: table.count for name, table in self._tables.items()}
                self.put_run(ended_at=time_text(), files=files | dict.fromkeys(sorted(self._fact_names), 1))
        except OSError as error:
            self.put_lost(error)
            raise

    def leave(self) -> None:
        for table in self._tables.values():
            table.leave()
