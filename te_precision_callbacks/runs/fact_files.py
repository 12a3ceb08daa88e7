"""The facts of a run's segment: run.json, and the tables of facts, each of which is replaced as a whole."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from te_precision_callbacks.runs.arrays import arrow_array
from te_precision_callbacks.runs.bounds import writable_value
from te_precision_callbacks.runs.recorded import Status
from te_precision_callbacks.runs.run_files import RUN_FILE, SEALED, overwrite, process_now, replace_whole, time_text
from te_precision_callbacks.runs.tables import FACTS, SCHEMA_VERSION

_ROOM = 1024
"""The bytes behind the object in run.json: room to say how the run has ended on a disk that is full by then."""

_LONGEST_REASON = 200


class FactFiles:
    """Writes what is known of a segment.

    Args:
        run_id: the name of the run.
        segment: the number of the segment.
        folder: the folder of the segment, which gets run.json.
        tables: the folder that gets the tables.

    Attributes:
        status: that of the segment.
    """

    def __init__(self, run_id: str, segment: int, folder: Path, tables: Path) -> None:
        self.status: Status = "running"
        self._run_id = run_id
        self._segment = segment
        self._folder = folder
        self._tables = tables
        self._run: dict[str, Any] = {}
        self._bytes: dict[str, int] = {}

    @property
    def nbytes(self) -> int:
        """The bytes of all files."""
        return sum(self._bytes.values())

    def put_run(self, facts: Mapping[str, Any]) -> None:
        """Add facts to run.json.

        Raises:
            OSError: the file cannot be written.
        """
        if not self._run:
            self._run = {
                "schema": SCHEMA_VERSION,
                "run_id": self._run_id,
                "segment": self._segment,
                "parent_segment": self._segment - 1 if self._segment else None,
                "started_at": time_text(),
                "ended_at": None,
                "first_iteration": 0,
                "world": 1,
                **process_now(),
            }
        self._run |= {**facts, "status": self.status}
        text = self._run_text()
        replace_whole(self._folder / RUN_FILE, lambda file: file.write(text.ljust(len(text) + _ROOM)))
        self._bytes[RUN_FILE] = len(text) + _ROOM

    def _run_text(self) -> bytes:
        return json.dumps(self._run, indent=1, allow_nan=False, default=str).encode()

    def put_lost(self, error: BaseException) -> None:
        """Say in run.json that what comes is not recorded any more, where that needs no room on the disk; nothing if
        even that cannot be written.

        Args:
            error: why.
        """
        if self._run:
            self._run |= {"not_written": str(error)[:_LONGEST_REASON], "status": self.status}
            self._run |= {} if self.status == "running" else {"ended_at": time_text()}
            with contextlib.suppress(OSError):
                overwrite(self._folder / RUN_FILE, self._run_text())

    def end_as(self, status: Status) -> None:
        """Set the status of the segment, which run.json gets when it is written next."""
        self.status = status

    def put_end(self, facts: Mapping[str, Any]) -> None:
        """Say in run.json when the segment has ended, if there is one of this rank's.

        Raises:
            OSError: the file cannot be written.
        """
        if self._run:
            self.put_run({"ended_at": time_text(), **facts})

    def put_table(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a table of facts.

        Raises:
            OSError: the file cannot be written.
        """
        cleaned = [{key: writable_value(value) for key, value in row.items()} for row in rows]
        columns = [arrow_array([row.get(field.name) for row in cleaned], field.type) for field in FACTS[name]]
        table = pa.Table.from_arrays(columns, schema=FACTS[name])
        path = self._tables / f"{name}{SEALED}"
        replace_whole(path, lambda file: pq.write_table(table, file, compression="zstd"))
        self._bytes[name] = path.stat().st_size

    def touch(self) -> None:
        """Show readers that the process lives."""
        os.utime(self._folder / RUN_FILE)
