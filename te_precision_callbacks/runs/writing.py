"""Writes the files of a run, and converts a session's records into their rows, in the sink's thread."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.base.files import AppendedFile
from te_precision_callbacks.runs.recorded import Status
from te_precision_callbacks.runs.run_files import (
    CLOSED,
    OPEN,
    RUN_FILE,
    Place,
    overwrite,
    process_now,
    rank_name,
    replace_whole,
    segment_name,
    time_text,
    trace_sigterm,
    untrace_sigterm,
)
from te_precision_callbacks.runs.tables import (
    FACTS,
    LOCAL,
    SCHEMA_VERSION,
    STEP0,
    TABLES,
    Subject,
    batch,
    column,
    subject_columns,
    write_table,
)
from te_precision_callbacks.sinks.step_records import Event, RunInfo, Scalars, StepRecords, end_of
from te_precision_callbacks.statistics.arrays import Floats, Mask

logger = logging.getLogger(__name__)

CLOSE_BYTES = 64 << 20

CLOSE_SECONDS = 900.0

_ROOM = 1024
"""Padding in run.json, so that the end of the run can be recorded on a full disk."""

_LONGEST_REASON = 200


class _Table:
    """A table of a rank: the open file, and closed files.

    Attributes:
        count: number of files.
    """

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self._folder = folder
        self._name = name
        self._schema = schema
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

    def append(self, rows: pa.RecordBatch) -> None:
        if self._file is None:
            self.count += 1
            self._file = AppendedFile(self._path, "x")
            options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
            self._stream = pa.ipc.new_stream(self._file, self._schema, options=options)
            self._since = time.monotonic()
        self._stream.write_batch(rows)

    def close_if_due(self) -> None:
        if self.open_bytes >= CLOSE_BYTES or time.monotonic() - self._since >= CLOSE_SECONDS:
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
        subjects: the subject of each series; the caller appends new ones.
    """

    def __init__(self, run_folder: Path, segment: int, rank: int = 0) -> None:
        self.run_id = run_folder.name
        self.segment = segment
        self.folder = run_folder / segment_name(segment)
        self.rank = rank
        self.own = self.folder / rank_name(rank)
        self.own.mkdir(exist_ok=True)
        self.status: Status = "running"
        self.subjects: list[Subject] = []
        self._subject_columns = subject_columns([])
        self._facts: dict[str, Any] = {}
        self._fact_names: set[str] = set()
        self._tables = {name: _Table(self.own, name, schema) for name, schema in TABLES.items()}

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

    # ------------------------------------------------------------------ rows

    def add(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows to ``steps``, ``scalars`` or ``events``; missing columns are null."""
        if whole := [{"segment": self.segment, **row} for row in rows]:
            self._tables[name].append(batch(TABLES[name], whole))

    def add_values(
        self, iteration: int, series: npt.NDArray[np.int32], values: Floats, flags: npt.NDArray[np.uint8]
    ) -> None:
        """Add values of a step.

        Args:
            series: [values], int32: indices of :attr:`subjects`.
            values: [values], float64.
            flags: [values], uint8.
        """
        self._add_statistics("values", iteration, series, [column(values, pa.float64()), column(flags, pa.uint8())])

    def add_vectors(self, iteration: int, vectors: Mapping[int, Sequence[float]]) -> None:
        """Add histograms of a step: series -> counts, of equal lengths."""
        dense = np.array([*vectors.values()], ndmin=2)
        row, bins = np.nonzero(dense)
        offsets = column(np.searchsorted(row, np.arange(len(dense) + 1)), pa.int32())
        lists = []
        for numbers, kind in zip((bins, dense[row, bins]), TABLES["vectors"].types[3:], strict=False):
            lists.append(pa.ListArray.from_arrays(offsets, column(numbers, kind.value_type)))
        self._add_statistics("vectors", iteration, np.array([*vectors], np.int32), lists)

    def _add_statistics(
        self, name: str, iteration: int, series: npt.NDArray[np.int32], contents: Iterable[pa.Array]
    ) -> None:
        if not len(series):
            return
        if len(self._subject_columns[0]) < len(self.subjects):
            self._subject_columns = subject_columns(self.subjects)  # the dictionaries of a stream only grow
        schema = TABLES[name]
        keys = (np.full(len(series), self.segment), np.full(len(series), iteration), series)
        columns = [column(key, field.type) for key, field in zip(keys, schema, strict=False)]
        columns += contents
        columns += [subjects.take(columns[2]) for subjects in self._subject_columns]
        self._tables[name].append(pa.record_batch(columns, schema=schema))

    # ------------------------------------------------------------------ files

    @property
    def _statistics(self) -> tuple[_Table, _Table]:
        return self._tables["values"], self._tables["vectors"]

    @property
    def open_bytes(self) -> int:
        """The size of the open files of statistics, which are not compressed."""
        return sum(table.open_bytes for table in self._statistics)

    def close_statistics(self) -> None:
        for table in self._statistics:
            table.close()

    def flush(self) -> None:
        """Close files that are large or old."""
        for table in self._tables.values():
            table.close_if_due()

    def close(self, status: Status = "ended") -> None:
        """Close all files; rank 0 records the status in run.json, even after a failure."""
        self.status = status
        try:
            for table in self._tables.values():
                table.close()
            if self._facts:
                files = {name: table.count for name, table in self._tables.items()}
                self.put_run(ended_at=time_text(), files=files | dict.fromkeys(sorted(self._fact_names), 1))
        except OSError as error:
            self.put_lost(error)
            raise

    def leave(self) -> None:
        for table in self._tables.values():
            table.leave()


# ---------------------------------------------------------------------- a session's records


class FactTables(NamedTuple):
    run: Mapping[str, Any]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]


class StepJob(NamedTuple):
    """A step's records, and their time of arrival."""

    records: StepRecords
    wall_time: float


class End(NamedTuple):
    """The end of the segment, with the last iteration, and the iteration that it has interrupted; -1 if unknown."""

    error: BaseException | None
    last: int = -1
    step: int = -1


Job = StepJob | Event | Scalars | FactTables | End


class Recording:
    """Writes a rank's records of a run.

    Args:
        writes_reduced: whether this rank writes the reduced values.
        limit: maximum number of bytes for this rank.
        begun: start of the run in seconds since the epoch; the first file may be created much later.
    """

    def __init__(
        self, runs: Path, place: Place, run: RunInfo, *, writes_reduced: bool, limit: int, begun: float
    ) -> None:
        self._folder = runs / place.run_id
        self._run = run
        self._writes_reduced = writes_reduced
        self._limit = limit
        self._facts = FactTables({}, {})
        self._scopes: dict[str, str] = {}
        self._last: StepJob | None = None
        self._latest = run.start_iteration
        self._is_full = False
        self.writer = self._open(place.segment, run.start_iteration, begun)

    def _open(self, segment: int, first_iteration: int, started: float) -> RunWriter:
        run = self._run
        (self._folder / segment_name(segment)).mkdir(parents=True, exist_ok=True)
        writer = RunWriter(self._folder, segment, run.rank)
        trace_sigterm(writer.own)
        if run.rank == 0:
            begun = {"first_iteration": first_iteration, "world": run.world_size}
            facts = {"versions": dict(run.versions), "config": run.config, "started_at": time_text(started)}
            writer.put_run(**{**begun, **facts, **self._facts.run})
        return writer

    # ------------------------------------------------------------------ jobs

    def take(self, job: Job) -> None:
        match job:
            case StepJob():
                self._take_step(job)
            case Event():
                self._latest = max(job.iteration, self._latest)
                self._take_event(job)
            case Scalars(iteration, logging_step):
                self._latest = max(iteration, self._latest)
                step = {"iteration": iteration, "logging_step": logging_step}
                self.writer.add("scalars", ({**step, "name": name, "value": job.values[name]} for name in job.values))
            case FactTables():
                self._facts = job
                self._scopes.update((row["layer"], row["scope"]) for row in job.tables["layers"] if row["scope"])
                self._write_facts()
            case End(error, last, step):
                latest = max(self._latest, last)
                self._take_event(end_of(error, latest, max(latest, step)))
                self.writer.close("ended" if error is None else "failed")
                untrace_sigterm(self.writer.own)

    def _write_facts(self) -> None:
        if self._run.rank == 0:
            self.writer.put_run(**self._facts.run)
        for name, rows in self._facts.tables.items():
            self.writer.put_facts(name, rows)

    def _take_event(self, event: Event) -> None:
        row = {name: value or None for name, value in vars(event).items()}
        row |= {"rank": self._run.rank, "iteration": event.iteration, "wall_time": round(event.wall_time * 1e6)}
        row["text"] = event.text.encode(errors="backslashreplace").decode()  # a file name may contain invalid UTF-8
        if event.data:
            row["data"] = json.dumps(event.data, default=str)
        self.writer.add("events", [row])

    def _take_step(self, step: StepJob) -> None:
        records = step.records
        seconds = None
        if self._last is not None:
            seconds = step.wall_time - self._last.wall_time
            if records.iteration <= self._last.records.iteration:
                self._go_back(records.iteration)
        self._last = step
        self._latest = max(records.iteration, self._latest)
        row = {
            "iteration": records.iteration,
            "logging_step": records.logging_step,
            "wall_time": round(step.wall_time * 1e6),
            "step_seconds": seconds,
            "observe_seconds": records.observe_seconds,
            "local": records.local,
            "ranks": self._run.world_size,
        }
        self.writer.add("steps", [row])
        if not self._is_full:
            self._take_numbers(records)

    def _go_back(self, iteration: int) -> None:
        """Start another segment, since the training loop has returned to an earlier iteration."""
        untrace_sigterm(self.writer.own)
        self.writer.close()
        self.writer = self._open(self.writer.segment + 1, iteration, time.time())
        if self._facts.tables:
            self._write_facts()

    def _take_numbers(self, records: StepRecords) -> None:
        writer = self.writer
        rank = None
        if self._run.world_size > 1:
            rank = self._run.rank
        # Series n of the session is series 2 n of the file, reduced over ranks, and 2 n + 1, of this rank.
        for layer, family in records.table.since(len(writer.subjects) // 2):
            names = self._scopes.get(layer, ""), layer, family.tensor, family.gemm or "", family.statistic
            writer.subjects += Subject(*names, None), Subject(*names, rank)
        local = local_mask(records)
        written = local | self._writes_reduced
        series = records.series[written]
        flags = np.full(len(series), LOCAL * records.local, np.uint8)
        if records.unscaled:
            unscaled = [records.table[number].layer in records.unscaled for number in series.tolist()]
            flags[np.array(unscaled, bool)] |= STEP0
        in_file = 2 * series + (local[written] & (rank is not None))
        writer.add_values(records.iteration, in_file, np.frombuffer(records.values)[written], flags)
        if self._writes_reduced or records.local:
            own = records.local and rank is not None
            writer.add_vectors(records.iteration, {2 * n + own: counts for n, counts in records.histograms.items()})
        if writer.open_bytes > min(CLOSE_BYTES, self._limit):
            self.flush()

    # ------------------------------------------------------------------ files

    def flush(self) -> None:
        """Close large files, and record no more statistics at the limit."""
        self.writer.flush()
        if self._run.rank == 0:
            os.utime(self.writer.folder / RUN_FILE)
        if self._is_full:
            return
        size = self._size()
        if size > self._limit and self.writer.open_bytes > self._limit // 8:
            self.writer.close_statistics()  # a closed file is compressed
            size = self._size()
        self._is_full = size > self._limit
        if self._is_full:
            text = (
                f"The records of rank {self._run.rank} have reached their limit of {self._limit:,} bytes. Statistics"
                " are no longer recorded, only trainer metrics, findings and other events. To record more, set a larger"
                " records=."
            )
            logger.warning("%s Training continues. The records are in %s.", text, self._folder)
            self._take_event(Event("records_limited", text, self._latest, "warning"))

    def _size(self) -> int:
        return sum(path.stat().st_size for path in self._folder.glob(f"*/{self.writer.own.name}/*"))


def local_mask(records: StepRecords) -> Mask:
    if records.own:
        return np.fromiter(records.own, bool, len(records))
    return np.ones(len(records), bool)
