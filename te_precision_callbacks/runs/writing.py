"""Writes a run: what the session's sink does, and what makes a run without a session.

    with RunWriter.begin("logs", first_iteration=0, front_door="my loop") as run:
        run.put_facts("layers", [{"layer_id": 0, "layer": "fc1", "exec_fwd": 0, "since": 0}])
        series = run.series("fc1", "activation", "amax")
        for iteration in range(10):
            run.add_step(iteration)
            run.add_values(iteration, np.array([series]), np.array([1.0]))
            run.add_scalars(iteration, {"loss": 2.0 / (1 + iteration)})
        run.add_event("dump_written", "fc1_activation.safetensors", iteration=3, layer="fc1")

Rows are collected in memory until :meth:`RunWriter.flush` appends them to the tails of their tables. A tail becomes a
sealed part when it has grown to :data:`SEAL_BYTES`, or after :data:`SEAL_SECONDS`. The writer is for one thread.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from te_precision_callbacks.runs.bounds import MOST_APPENDED, writable, writable_value
from te_precision_callbacks.runs.parts import SealedPart, tail_bytes, write_sealed
from te_precision_callbacks.runs.recorded import Status
from te_precision_callbacks.runs.run_files import (
    EVENTS_FILE,
    FOLDER,
    RUN_FILE,
    SEALED,
    TAIL,
    AppendedFile,
    PartFile,
    make_segment,
    new_run_id,
    overwrite,
    part_stem,
    process_now,
    rank_name,
    replace_whole,
    segment_name,
)
from te_precision_callbacks.runs.tables import EVENTS, FACTS, SCALARS, SCHEMA_VERSION, STEPS, SUBJECT, VALUES, VECTORS

SEAL_BYTES = 64 << 20
"""The size of a tail at which it becomes a sealed part."""

SEAL_SECONDS = 900.0
"""The age of a tail at which it becomes a sealed part."""

_ROOM = 1024
"""The bytes behind the object in run.json: room to say how the run has ended on a disk that is full by then."""

_ROW, _BIN = 64, 8
"""The bytes that a value, or a histogram without its bins, needs in a tail at most, and those of a bin."""

_LONGEST_REASON = 200

_NAMES = tuple(name for name, _ in SUBJECT)


class _Names:
    """The texts of a dictionary-encoded column, by the code that each got when it was first seen."""

    def __init__(self) -> None:
        self._codes: dict[str | None, int | None] = {None: None}
        self._texts: list[str] = []
        self._array = pa.array([], pa.string())

    def code(self, text: str | None) -> int | None:
        code = self._codes.get(text)
        if code is None and text is not None:
            code = self._codes[text] = len(self._texts)
            self._texts.append(writable(text))
        return code

    def encoded(self, codes: pa.Array) -> pa.DictionaryArray:
        if len(self._array) != len(self._texts):
            self._array = pa.array(self._texts, pa.string())
        return pa.DictionaryArray.from_arrays(codes, self._array)


class _Part:
    """The rows of a table: a tail in the making, which becomes the next part.

    Args:
        folder: the folder of the rank.
        table: the name of the table.
        schema: its schema.
        sort_by: the columns by which the rows of a sealed part are sorted.
        sealed: gets the sealed parts.
        seal_bytes: the size of a tail at which it becomes a sealed part.
    """

    def __init__(
        self,
        folder: Path,
        table: str,
        schema: pa.Schema,
        sort_by: Sequence[str],
        sealed: list[SealedPart],
        seal_bytes: float,
    ) -> None:
        self._sealed = sealed
        self._seal_bytes = seal_bytes
        self._folder = folder
        self._table = table
        self._schema = schema
        self._sort_by = [(column, "ascending") for column in sort_by]
        self._number = 0
        self._file: AppendedFile | None = None
        self._stream: Any = None
        self._since = 0.0
        self._names: dict[str, _Names] = {
            column.name: _Names() for column in schema if pa.types.is_dictionary(column.type)
        }
        self._codes = np.empty((len(_NAMES), 0), np.int32)

    @property
    def waiting_bytes(self) -> int:
        """The bytes of the tail."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def _stem(self) -> Path:
        return self._folder / part_stem(self._table, self._number)

    def subject_columns(
        self, subjects: Sequence[tuple[str, ...]], series: npt.NDArray[np.int32]
    ) -> list[pa.DictionaryArray]:
        """The columns that name the subjects of rows.

        Args:
            subjects: of each series.
            series: [rows].
        """
        more = len(subjects) - self._codes.shape[1]
        self._codes = np.c_[self._codes, np.full((len(_NAMES), more), -1, np.int32)]
        for number in np.unique(series[self._codes[0, series] < 0]).tolist():
            named = zip(_NAMES, subjects[number], strict=True)
            self._codes[:, number] = np.array([self._names[name].code(text) for name, text in named], np.int32)
        return [
            self._names[name].encoded(pa.array(codes[series])) for name, codes in zip(_NAMES, self._codes, strict=True)
        ]

    def append_rows(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; a column that a row lacks is null."""
        arrays = []
        for field in self._schema:
            values = [row.get(field.name) for row in rows]
            names = self._names.get(field.name)
            if names is None:
                arrays.append(pa.array(values, field.type))
            else:
                arrays.append(names.encoded(pa.array([names.code(value) for value in values], pa.int32())))
        self.append(pa.record_batch(arrays, schema=self._schema))

    def append(self, batch: pa.RecordBatch) -> None:
        """Append a batch, in pieces of the size that readers expect; the tail has them, whole, when this returns.

        Raises:
            OSError: it cannot be written.
        """
        rows = max(1, batch.num_rows * MOST_APPENDED // max(batch.nbytes, 1))
        for begin in range(0, batch.num_rows, rows):
            self._append(batch.slice(begin, rows))

    def _append(self, batch: pa.RecordBatch) -> None:
        if self._file is None or self._stream is None:
            self._number += 1
            self._file = AppendedFile(self._stem.with_suffix(TAIL), new=True)
            options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
            self._stream = pa.ipc.new_stream(self._file, self._schema, options=options)
            self._since = time.monotonic()
        self._stream.write_batch(batch)
        self._file.require_there()
        if self._file.nbytes >= min(SEAL_BYTES, self._seal_bytes):
            self.seal()

    def seal_if_old(self) -> None:
        """Seal the tail if it is older than :data:`SEAL_SECONDS`."""
        if self._file is not None and time.monotonic() - self._since >= SEAL_SECONDS:
            self.seal()

    def seal(self) -> None:
        """Make a sealed part of the tail, if there is one.

        Raises:
            OSError: it cannot be written; the tail remains.
        """
        if self._file is None:
            return
        written = self._file.nbytes
        self.leave()
        tail, sealed = self._stem.with_suffix(TAIL), self._stem.with_suffix(SEALED)
        data = tail_bytes(tail)
        if len(data) != written:
            raise OSError(f"{tail} was changed while it was written: it has {len(data):,} of {written:,} bytes")
        try:
            table = pa.ipc.open_stream(data).read_all().unify_dictionaries()
        except pa.ArrowInvalid as error:
            raise OSError(f"{tail} was changed while it was written: {error}") from error
        if self._sort_by:
            table = table.take(pc.sort_indices(table, sort_keys=self._sort_by))
        nbytes = write_sealed(table, sealed)
        self._sealed.append(SealedPart(PartFile(self._table, self._number, self._number, False, sealed), nbytes))
        tail.unlink()

    def leave(self) -> None:
        """Close the tail as it is."""
        if self._file is not None:
            # Without the stream's end mark, which would need room on a full disk; a reader takes the end of the file.
            self._file.close()
        self._file = self._stream = None


class RunWriter:
    """Writes what one rank has of a segment of a run. See the module for how.

    Args:
        run_folder: the folder of the run.
        segment: the number of the segment, whose folder exists.
        rank: the rank that writes.
        seal_bytes: the size of a tail at which it becomes a sealed part, if that is less than :data:`SEAL_BYTES`.
        small_bytes: the same for steps and the trainer's numbers, whose parts are never joined, if that is more.

    Attributes:
        run_id: the name of the run.
        segment: the number of the segment.
        folder: the folder of the segment.
        rank: the rank that writes.
        status: that of the segment.
        own: the folder of the rank in the segment.
        sealed: its sealed parts, oldest first.
        waiting: the bytes that statistics which are in no tail yet need there, at most.
    """

    def __init__(
        self, run_folder: Path, segment: int, rank: int = 0, *, seal_bytes: float = math.inf, small_bytes: float = 0
    ) -> None:
        self.run_id = run_folder.name
        self.segment = segment
        self.folder = run_folder / segment_name(segment)
        self.rank = rank
        self.status: Status = "running"
        self._facts: dict[str, Any] = {}
        self.own = self.folder / rank_name(rank)
        self.own.mkdir(exist_ok=True)
        self.sealed: list[SealedPart] = []
        self.waiting = 0
        into, small = (self.sealed, seal_bytes), (self.sealed, max(seal_bytes, small_bytes))
        self._values = _Part(self.own, "values", VALUES, ("series", "iteration"), *into)
        self._vectors = _Part(self.own, "vectors", VECTORS, ("series", "iteration"), *into)
        self._steps = _Part(self.own, "steps", STEPS, (), *small)
        self._scalars = _Part(self.own, "scalars", SCALARS, (), *small)
        self._events: AppendedFile | None = None
        self._fact_bytes: dict[str, int] = {}
        self._event_bytes = 0
        self._numbers: dict[tuple[str | None, ...], int] = {}
        self._subjects: list[tuple[str, ...]] = []
        self._ranks: list[int | None] = []
        self._rank_of = pa.array([], pa.int32())
        self._new_values: list[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.float64], npt.NDArray[np.uint8]]] = []
        self._new_vectors: list[tuple[int, int, npt.NDArray[np.uint16], npt.NDArray[np.float32]]] = []
        self._new_steps: list[dict[str, Any]] = []
        self._new_scalars: list[dict[str, Any]] = []
        self._new_events: list[bytes] = []

    @classmethod
    def begin(
        cls, log_dir: str | os.PathLike[str], *, run_id: str | None = None, rank: int = 0, **facts: Any
    ) -> RunWriter:
        """Begin a segment: the first one of a new run, or the next one of a run that the folder has.

        Args:
            log_dir: the log folder.
            run_id: the run; None for a new one.
            rank: the rank that writes.
            **facts: for run.json, see :meth:`put_run`.

        Raises:
            OSError: the folder cannot be made.
        """
        run_folder = Path(log_dir) / FOLDER / (run_id or new_run_id())
        segment, _ = make_segment(run_folder)
        writer = cls(run_folder, segment, rank)
        writer.put_run(**facts)
        return writer

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close("ended" if error is None else "failed")

    # ------------------------------------------------------------------ facts

    def put_run(self, **facts: Any) -> None:
        """Add facts to run.json, which is replaced whole.

        Args:
            **facts: JSON values; those that readers know are in docs/records.md.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._facts:
            self._facts = {
                "schema": SCHEMA_VERSION,
                "run_id": self.run_id,
                "segment": self.segment,
                "parent_segment": self.segment - 1 if self.segment else None,
                "started_at": time_text(),
                "ended_at": None,
                "first_iteration": 0,
                "world": 1,
                **process_now(),
            }
        self._facts |= facts | {"status": self.status}
        text = self._run_text()
        replace_whole(self.folder / RUN_FILE, lambda file: file.write(text.ljust(len(text) + _ROOM)))
        self._fact_bytes[RUN_FILE] = len(text) + _ROOM

    def _run_text(self) -> bytes:
        return json.dumps(self._facts, indent=1, allow_nan=False, default=str).encode()

    def put_lost(self, error: BaseException) -> None:
        """Say in run.json that what comes is not recorded any more, where that needs no room on the disk; nothing if
        even that cannot be written.

        Args:
            error: why.
        """
        if self._facts:
            self._facts |= {"not_written": str(error)[:_LONGEST_REASON], "status": self.status}
            self._facts |= {} if self.status == "running" else {"ended_at": time_text()}
            with contextlib.suppress(OSError):
                overwrite(self.folder / RUN_FILE, self._run_text())

    def put_facts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a table of facts.

        Args:
            name: one of :data:`~te_precision_callbacks.runs.tables.FACTS`.
            rows: all of its rows; a column that a row lacks is null.

        Raises:
            OSError: the file cannot be written.
        """
        cleaned = [{key: writable_value(value) for key, value in row.items()} for row in rows]
        table = pa.Table.from_pylist(cleaned, FACTS[name])
        path = (self.own if self.rank else self.folder) / f"{name}{SEALED}"
        replace_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))
        self._fact_bytes[name] = path.stat().st_size

    def touch(self) -> None:
        """Tell readers that the process lives."""
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
        """The number of a series; an unknown series gets a new number.

        Args:
            layer: as in :data:`~te_precision_callbacks.runs.tables.SUBJECT`.
            tensor: likewise.
            statistic: likewise.
            gemm: likewise.
            scope: likewise.
            rank: the rank whose own the numbers are; None if they are reduced.
        """
        subject = (scope, layer, tensor, gemm or "", statistic)
        key = (*subject, None if rank is None else str(rank))
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._subjects)
            self._subjects.append(subject)
            self._ranks.append(rank)
        return number

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
        """Add a debug iteration.

        Args:
            iteration: the debug iteration.
            logging_step: the step of the trainer's own metrics; None for the iteration.
            wall_time: when it ended, in seconds since the epoch; None for now.
            step_seconds: as in :data:`~te_precision_callbacks.runs.tables.STEPS`.
            observe_seconds: likewise.
            local: likewise.
            ranks: likewise.
        """
        self._new_steps.append(
            {
                "segment": self.segment,
                "iteration": iteration,
                "logging_step": iteration if logging_step is None else logging_step,
                "wall_time": _microseconds(wall_time),
                "step_seconds": step_seconds,
                "observe_seconds": observe_seconds,
                "local": local,
                "ranks": ranks,
            }
        )

    def add_values(
        self,
        iteration: int,
        series: npt.NDArray[np.int32],
        values: npt.NDArray[np.float64],
        flags: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        """Add numbers of a step.

        Args:
            iteration: the debug iteration.
            series: [numbers], int32: of :meth:`series`.
            values: [numbers], float64.
            flags: [numbers], uint8; None for none.
        """
        flags = np.zeros(len(series), np.uint8) if flags is None else flags
        self._new_values.append((iteration, series, values, flags))
        self.waiting += _ROW * len(series)

    def add_vector(self, iteration: int, series: int, counts: Sequence[float] | npt.NDArray[np.floating[Any]]) -> None:
        """Add a histogram of a step.

        Args:
            iteration: the debug iteration.
            series: of :meth:`series`.
            counts: [bins]: the count of each bin.
        """
        dense = np.asarray(counts)
        bins = np.flatnonzero(dense).astype(np.uint16)
        self._new_vectors.append((iteration, series, bins, dense[bins].astype(np.float32)))
        self.waiting += _ROW + _BIN * len(bins)

    def add_scalars(self, iteration: int, scalars: Mapping[str, float], *, logging_step: int | None = None) -> None:
        """Add numbers that the trainer logs.

        Args:
            iteration: the debug iteration to which they belong.
            scalars: name -> number.
            logging_step: the step under which they are logged; None for the iteration.
        """
        step = iteration if logging_step is None else logging_step
        self._new_scalars += [
            {"segment": self.segment, "iteration": iteration, "logging_step": step, "name": name, "value": value}
            for name, value in scalars.items()
        ]

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
        """Add something that happened.

        Args:
            kind: as in :data:`~te_precision_callbacks.runs.tables.EVENTS`.
            text: likewise.
            severity: likewise.
            iteration: the debug iteration in which it happened.
            wall_time: when, in seconds since the epoch; None for now.
            data: more of it, as JSON.
            **subject: further columns: ``micro``, ``order``, ``phase``, ``scope``, ``layer``, ``tensor``, ``gemm``.

        Raises:
            TypeError: there is no such column.
        """
        unknown = subject.keys() - set(EVENTS.names)
        if unknown:
            raise TypeError(f"an event has no {', '.join(sorted(unknown))}")
        seconds = time.time() if wall_time is None else wall_time
        row = {
            "segment": self.segment,
            "iteration": iteration,
            "rank": self.rank,
            **{key: value for key, value in subject.items() if value is not None},
            "kind": kind,
            "severity": severity,
            "wall_time": datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="microseconds"),
            "text": text,
            "data": None if data is None else json.dumps(data, default=str),
        }
        self._new_events.append(json.dumps(row).encode() + b"\n")

    # ------------------------------------------------------------------ to the disk

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's files."""
        tails = sum(part.waiting_bytes for part in (self._values, self._vectors, self._steps, self._scalars))
        sealed = sum(part.nbytes for part in self.sealed)
        return tails + sealed + sum(self._fact_bytes.values()) + self._event_bytes

    @property
    def waiting_bytes(self) -> int:
        """The bytes of statistics that are in no sealed part yet."""
        return self._values.waiting_bytes + self._vectors.waiting_bytes

    def flush(self) -> None:
        """Append all new rows to the tails, and seal what is old.

        Raises:
            OSError: something cannot be written.
        """
        if self._new_steps:
            self._steps.append_rows(self._new_steps)
            self._new_steps = []
        if self._new_scalars:
            self._scalars.append_rows(self._new_scalars)
            self._new_scalars = []
        if self._new_values:
            self._values.append(self._value_batch())
            self._new_values = []
        if self._new_vectors:
            self._vectors.append(self._vector_batch())
            self._new_vectors = []
        self.waiting = 0
        if self._new_events:
            if self._events is None:
                self._events = AppendedFile(self.own / EVENTS_FILE)
            self._events.write(b"".join(self._new_events))
            self._event_bytes = self._events.nbytes
            self._new_events = []
        for part in (self._steps, self._scalars, self._values, self._vectors):
            part.seal_if_old()

    def close(self, status: Status = "ended", **facts: Any) -> None:
        """Write all rows and seal all parts; rank 0 tells in run.json that the segment has ended, also if something
        cannot be written.

        Raises:
            OSError: something cannot be written.
        """
        self.status = status
        try:
            self.flush()
            for part in (self._steps, self._scalars, self._values, self._vectors):
                part.seal()
            self.leave()
            if self._facts:
                self.put_run(ended_at=time_text(), **facts)
        except OSError as error:
            self.put_lost(error)
            raise

    def leave(self) -> None:
        """Close all files as they are, without a word of the end: readers take what they have."""
        for part in (self._steps, self._scalars, self._values, self._vectors):
            part.leave()
        if self._events is not None:
            self._events.close()
            self._events = None

    def _value_batch(self) -> pa.RecordBatch:
        series = np.concatenate([each for _, each, _, _ in self._new_values]).astype(np.int32)
        counts = [len(each) for _, each, _, _ in self._new_values]
        iterations = np.repeat([iteration for iteration, _, _, _ in self._new_values], counts)
        return pa.record_batch(
            [
                pa.array(np.full(len(series), self.segment, np.int16)),
                pa.array(iterations, pa.int64()),
                pa.array(series),
                pa.array(np.concatenate([each for _, _, each, _ in self._new_values]), pa.float64()),
                pa.array(np.concatenate([each for _, _, _, each in self._new_values])),
                *self._subject_columns(self._values, series),
            ],
            schema=VALUES,
        )

    def _vector_batch(self) -> pa.RecordBatch:
        series = np.array([each for _, each, _, _ in self._new_vectors], np.int32)
        offsets = pa.array([0, *itertools.accumulate(len(bins) for _, _, bins, _ in self._new_vectors)], pa.int32())
        bins = pa.array(np.concatenate([bins for _, _, bins, _ in self._new_vectors]))
        counts = pa.array(np.concatenate([counts for _, _, _, counts in self._new_vectors]))
        return pa.record_batch(
            [
                pa.array(np.full(len(series), self.segment, np.int16)),
                pa.array([iteration for iteration, _, _, _ in self._new_vectors], pa.int64()),
                pa.array(series),
                pa.ListArray.from_arrays(offsets, bins),
                pa.ListArray.from_arrays(offsets, counts),
                *self._subject_columns(self._vectors, series),
            ],
            schema=VECTORS,
        )

    def _subject_columns(self, part: _Part, series: npt.NDArray[np.int32]) -> list[pa.Array]:
        """The columns that name the subjects of rows, and the rank."""
        if len(self._rank_of) != len(self._ranks):
            self._rank_of = pa.array(self._ranks, pa.int32())
        return [*part.subject_columns(self._subjects, series), self._rank_of.take(pa.array(series))]


def time_text(seconds: float | None = None) -> str:
    """A time in ISO 8601, UTC: now, or so many seconds since the epoch."""
    seconds = time.time() if seconds is None else seconds
    return datetime.fromtimestamp(seconds, timezone.utc).isoformat(timespec="milliseconds")


def _microseconds(seconds: float | None) -> int:
    return round((time.time() if seconds is None else seconds) * 1e6)
