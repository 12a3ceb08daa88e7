"""Writes the files of a run. Not thread-safe."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.base.files import AppendedFile
from te_precision_callbacks.runs.recorded import Status
from te_precision_callbacks.runs.run_files import (
    CLOSED,
    OPEN,
    RUN_FILE,
    overwrite,
    process_now,
    rank_name,
    replace_whole,
    segment_name,
    time_text,
)
from te_precision_callbacks.runs.tables import (
    FACTS,
    SCHEMA_VERSION,
    TABLES,
    Subject,
    batch,
    column,
    subject_columns,
    write_table,
)
from te_precision_callbacks.statistics.arrays import Floats

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

    def size(self) -> int:
        """The size of this rank's files in all segments of the run."""
        return sum(path.stat().st_size for path in self.folder.parent.glob(f"*/{self.own.name}/*"))

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
