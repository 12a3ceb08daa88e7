"""Converts a session's records into rows, in the sink's thread."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.runs.run_files import (
    RUN_FILE,
    Place,
    segment_name,
    time_text,
    trace_sigterm,
    untrace_sigterm,
)
from te_precision_callbacks.runs.tables import LOCAL, STEP0
from te_precision_callbacks.runs.writing import CLOSE_BYTES, RunWriter
from te_precision_callbacks.sinks.step_records import Event, RunInfo, Scalars, StepRecords, end_of
from te_precision_callbacks.statistics.arrays import Mask

logger = logging.getLogger(__name__)


class FactTables(NamedTuple):
    run: Mapping[str, Any]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]


class StepJob(NamedTuple):
    """A step's records, their time of arrival, and the seconds since the previous step."""

    records: StepRecords
    wall_time: float
    seconds: float | None


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
        self._last_step: int | None = None
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
        if self._last_step is not None and records.iteration <= self._last_step:
            self._go_back(records.iteration)
        self._last_step = records.iteration
        self._latest = max(records.iteration, self._latest)
        row = {
            "iteration": records.iteration,
            "logging_step": records.logging_step,
            "wall_time": round(step.wall_time * 1e6),
            "step_seconds": step.seconds,
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
