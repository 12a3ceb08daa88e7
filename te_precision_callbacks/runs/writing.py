"""Writes a run: what the session's sink does, and what makes a run without a session.

    with RunWriter.begin("logs", first_iteration=0, front_door="my loop") as run:
        run.put_facts("layers", [{"layer_id": 0, "layer": "fc1", "exec_fwd": 0, "since": 0}])
        series = run.series("fc1", "activation", "amax")
        for iteration in range(10):
            run.add_step(iteration)
            run.add_values(iteration, np.array([series]), np.array([1.0]))
            run.add_scalars(iteration, {"loss": 2.0 / (1 + iteration)})
        run.add_event("dump_written", "fc1_activation.safetensors", iteration=3, layer="fc1")

Rows are collected in memory until :meth:`RunWriter.flush` appends them to the tails of their tables. The
writer is for one thread.
"""

from __future__ import annotations

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

from te_precision_callbacks.runs.fact_files import FactFiles
from te_precision_callbacks.runs.new_rows import NewEvents, NewFacts, NewValues, NewVectors, SeriesNumbers
from te_precision_callbacks.runs.parts import SealedPart
from te_precision_callbacks.runs.recorded import Status
from te_precision_callbacks.runs.run_files import (
    EVENTS_FILE,
    FOLDER,
    make_segment,
    new_run_id,
    rank_name,
    segment_name,
)
from te_precision_callbacks.runs.tables import EVENTS, SCALARS, STEPS, VALUES, VECTORS
from te_precision_callbacks.runs.tails import Tail


class RunWriter:
    """Writes what one rank has of a segment of a run. See the module for how.

    Args:
        run_folder: the folder of the run.
        segment: the number of the segment, whose folder exists.
        rank: the rank that writes.
        seal_bytes: the size of a tail at which it becomes a sealed part, if that is less than
            :data:`~te_precision_callbacks.runs.tails.SEAL_BYTES`.
        small_bytes: the same for steps and the trainer's numbers, whose parts are never joined, if that is more.

    Attributes:
        run_id: the name of the run.
        segment: the number of the segment.
        folder: the folder of the segment.
        rank: the rank that writes.
        own: the folder of the rank in the segment.
        sealed: its sealed parts, oldest first.
    """

    def __init__(
        self, run_folder: Path, segment: int, rank: int = 0, *, seal_bytes: float = math.inf, small_bytes: float = 0
    ) -> None:
        self.run_id = run_folder.name
        self.segment = segment
        self.folder = run_folder / segment_name(segment)
        self.rank = rank
        self.own = self.folder / rank_name(rank)
        self.own.mkdir(exist_ok=True)
        self.sealed: list[SealedPart] = []
        into, small = (self.sealed, seal_bytes), (self.sealed, max(seal_bytes, small_bytes))
        by_series = ("series", "iteration")
        self.facts = FactFiles(self.run_id, segment, self.folder, self.own if rank else self.folder)
        self._series = SeriesNumbers()
        self._values = NewValues(Tail(self.own, "values", VALUES, by_series, *into), segment, self._series)
        self._vectors = NewVectors(Tail(self.own, "vectors", VECTORS, by_series, *into), segment, self._series)
        self._steps = NewFacts(Tail(self.own, "steps", STEPS, (), *small))
        self._scalars = NewFacts(Tail(self.own, "scalars", SCALARS, (), *small))
        self._events = NewEvents(self.own / EVENTS_FILE)

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
        self.facts.put_run(facts)

    def put_facts(self, name: str, rows: Iterable[Mapping[str, Any]]) -> None:
        """Replace a table of facts.

        Args:
            name: one of :data:`~te_precision_callbacks.runs.tables.FACTS`.
            rows: all of its rows; a column that a row lacks is null.

        Raises:
            OSError: the file cannot be written.
        """
        self.facts.put_table(name, rows)

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
        return self._series.number((scope, layer, tensor, gemm or "", statistic), rank)

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
        row = {
            "segment": self.segment,
            "iteration": iteration,
            "logging_step": iteration if logging_step is None else logging_step,
            "wall_time": _microseconds(wall_time),
            "step_seconds": step_seconds,
            "observe_seconds": observe_seconds,
            "local": local,
            "ranks": ranks,
        }
        self._steps.add([row])

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
        self._values.add(iteration, series, values, np.zeros(len(series), np.uint8) if flags is None else flags)

    def add_vector(self, iteration: int, series: int, counts: Sequence[float] | npt.NDArray[np.floating[Any]]) -> None:
        """Add a histogram of a step.

        Args:
            iteration: the debug iteration.
            series: of :meth:`series`.
            counts: [bins]: the count of each bin.
        """
        self._vectors.add(iteration, series, counts)

    def add_scalars(self, iteration: int, scalars: Mapping[str, float], *, logging_step: int | None = None) -> None:
        """Add numbers that the trainer logs.

        Args:
            iteration: the debug iteration to which they belong.
            scalars: name -> number.
            logging_step: the step under which they are logged; None for the iteration.
        """
        step = iteration if logging_step is None else logging_step
        self._scalars.add(
            {"segment": self.segment, "iteration": iteration, "logging_step": step, "name": name, "value": value}
            for name, value in scalars.items()
        )

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
        self._events.add(row)

    # ------------------------------------------------------------------ to the disk

    @property
    def status(self) -> Status:
        """That of the segment."""
        return self.facts.status

    @property
    def _tails(self) -> tuple[Tail, ...]:
        return self._steps.tail, self._scalars.tail, self._values.tail, self._vectors.tail

    @property
    def nbytes(self) -> int:
        """The bytes of this rank's files."""
        tails = sum(tail.waiting_bytes for tail in self._tails)
        sealed = sum(part.nbytes for part in self.sealed)
        return tails + sealed + self.facts.nbytes + self._events.nbytes

    @property
    def waiting(self) -> int:
        """The bytes that statistics which are in no tail yet need there, at most."""
        return self._values.waiting + self._vectors.waiting

    @property
    def waiting_bytes(self) -> int:
        """The bytes of statistics that are in no sealed part yet."""
        return self._values.tail.waiting_bytes + self._vectors.tail.waiting_bytes

    def flush(self) -> None:
        """Append all new rows to the tails, and seal what is old.

        Raises:
            OSError: something cannot be written.
        """
        for rows in (self._steps, self._scalars, self._values, self._vectors, self._events):
            rows.flush()
        for tail in self._tails:
            tail.seal_if_old()

    def close(self, status: Status = "ended", **facts: Any) -> None:
        """Write all rows and seal all parts; rank 0 writes into run.json that the segment has ended, also if something
        cannot be written.

        Raises:
            OSError: something cannot be written.
        """
        self.facts.end_as(status)
        try:
            self.flush()
            for tail in self._tails:
                tail.seal()
            self.leave()
            self.facts.put_end(facts)
        except OSError as error:
            self.facts.put_lost(error)
            raise

    def leave(self) -> None:
        """Close all files as they are, without a word of the end: readers take what they have."""
        for tail in self._tails:
            tail.leave()
        self._events.leave()


def _microseconds(seconds: float | None) -> int:
    return round((time.time() if seconds is None else seconds) * 1e6)
