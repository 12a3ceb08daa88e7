"""Converts a session's records into rows, in the sink's thread."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs.run_files import (
    Place,
    rank_name,
    segment_name,
    segments_of,
    time_text,
    trace_sigterm,
    untrace_sigterm,
)
from te_precision_callbacks.runs.tables import LOCAL, STEP0
from te_precision_callbacks.runs.writing import RunWriter
from te_precision_callbacks.sinks.step_records import Event, RunInfo, Scalars, StepRecords, end_of
from te_precision_callbacks.statistics.arrays import Mask
from te_precision_callbacks.statistics.series import SeriesTable

logger = logging.getLogger(__name__)

_MOST_PENDING = 1 << 26


class FactTables(NamedTuple):
    run: Mapping[str, Any]
    tables: Mapping[str, Sequence[Mapping[str, Any]]]


class StepJob(NamedTuple):
    """A step's records, their time of arrival, and the seconds since the previous step."""

    records: StepRecords
    wall_time: float
    seconds: float | None


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
        self._numbers = _SeriesNumbers(writer, self._scopes)
        if run.rank == 0:
            begun = {"first_iteration": first_iteration, "world": run.world_size}
            facts = {"versions": dict(run.versions), "config": run.config, "started_at": time_text(started)}
            writer.put_run(**{**begun, **facts, **self._facts.run})
        return writer

    # ------------------------------------------------------------------ jobs

    def take(self, job: StepJob | Event | Scalars | FactTables) -> None:
        match job:
            case StepJob():
                self._take_step(job)
            case Event():
                self._latest = max(job.iteration, self._latest)
                self._take_event(job)
            case Scalars():
                self._latest = max(job.iteration, self._latest)
                self.writer.add_scalars(job.iteration, job.values, logging_step=job.logging_step)
            case FactTables():
                self._facts = job
                self._scopes.update((row["layer"], row["scope"]) for row in job.tables["layers"] if row["scope"])
                self._write_facts()

    def _write_facts(self) -> None:
        if self._run.rank == 0:
            self.writer.put_run(**self._facts.run)
        for name, rows in self._facts.tables.items():
            self.writer.put_facts(name, rows)

    def _take_event(self, event: Event) -> None:
        self.writer.add_event(
            event.kind,
            event.text,
            iteration=event.iteration,
            severity=event.severity,
            wall_time=event.wall_time,
            data=event.data or None,
            phase=event.phase,
            layer=event.layer or None,
            tensor=event.tensor or None,
            gemm=event.gemm or None,
        )

    def _take_step(self, step: StepJob) -> None:
        records = step.records
        if self._last_step is not None and records.iteration <= self._last_step:
            self._go_back(records.iteration)
        self._last_step = records.iteration
        self._latest = max(records.iteration, self._latest)
        self.writer.add_step(
            records.iteration,
            logging_step=records.logging_step,
            wall_time=step.wall_time,
            step_seconds=step.seconds,
            observe_seconds=records.observe_seconds,
            local=records.local,
            ranks=self._run.world_size,
        )
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
        table = records.table
        rank = None
        if self._run.world_size > 1:
            rank = self._run.rank
        local = local_mask(records)
        kept = local | self._writes_reduced
        series = records.series[kept]
        local = local[kept]
        numbers = np.empty(len(series), np.int32)
        numbers[~local] = self._numbers.assign(table, series[~local], None)
        numbers[local] = self._numbers.assign(table, series[local], rank)
        flags = np.full(len(series), LOCAL * records.local, np.uint8)
        if records.unscaled:
            unscaled = [table[number].layer in records.unscaled for number in series.tolist()]
            flags[np.array(unscaled, bool)] |= STEP0
        writer.add_values(records.iteration, numbers, np.frombuffer(records.values)[kept], flags)
        if not records.local:
            rank = None
        if self._writes_reduced or records.local:
            for number, counts in records.histograms.items():
                (its_number,) = self._numbers.assign(table, np.array([number]), rank)
                writer.add_vector(records.iteration, int(its_number), counts)
        if writer.waiting > min(_MOST_PENDING, self._limit):
            writer.flush()
            self._check_size()

    # ------------------------------------------------------------------ files

    def flush(self) -> None:
        self.writer.flush()
        if self._run.rank == 0:
            self.writer.show_life()
        self._check_size()

    def _check_size(self) -> None:
        """At the limit, record no more statistics."""
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
            self.writer.add_event("records_limited", text, iteration=self._latest, severity="warning")

    def _size(self) -> int:
        folders = [segment / rank_name(self._run.rank) for segment in segments_of(self._folder).values()]
        files = (path for folder in folders if folder.is_dir() for path in folder.iterdir())
        return sum(path.stat().st_size for path in files)

    def end(self, error: BaseException | None, last: int = -1, step: int = -1) -> None:
        """Write everything, with the end of the segment.

        Args:
            last, step: the last iteration, and the iteration that the end has interrupted; -1 if unknown.
        """
        latest = max(self._latest, last)
        self._take_event(end_of(error, latest, max(latest, step)))
        if error is None:
            self.writer.close()
        else:
            self.writer.close("failed")
        untrace_sigterm(self.writer.own)


def local_mask(records: StepRecords) -> Mask:
    if records.own:
        return np.fromiter(records.own, bool, len(records))
    return np.ones(len(records), bool)


class _SeriesNumbers:
    def __init__(self, writer: RunWriter, scopes: Mapping[str, str]) -> None:
        self.writer = writer
        self._scopes = scopes
        self._by_rank: dict[int | None, npt.NDArray[np.int32]] = {}

    def assign(self, table: SeriesTable, series: npt.NDArray[np.int32], rank: int | None) -> npt.NDArray[np.int32]:
        known = self._by_rank.get(rank, np.empty(0, np.int32))
        if len(known) < len(table):
            known = np.r_[known, np.full(len(table) - len(known), -1, np.int32)]
            self._by_rank[rank] = known
        new = series[known[series] < 0].tolist()
        for number in sorted(set(new)):
            layer, family = table[number]
            known[number] = self.writer.series(
                layer,
                family.tensor,
                family.statistic,
                gemm=family.gemm,
                scope=self._scopes.get(layer, ""),
                rank=rank,
            )
        return known[series]
