"""The sink that converts a session's records into rows and writes them, in a thread.

<log_dir>/precision_records/<run_id>/seg-000/...

Records are in files at the end of each step, unless the disk is slow (``WriterThread.catch_up``).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from te_precision_callbacks.base.errors import PrecisionDebugError, SessionError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.runs.run_files import (
    DEFAULT_LIMIT,
    FOLDER,
    RUN_FILE,
    Place,
    make_segment,
    new_run_id,
    segment_name,
    time_text,
    trace_sigterm,
    untrace_sigterm,
)
from te_precision_callbacks.runs.tables import LOCAL, STEP0, Subject
from te_precision_callbacks.runs.writing import CLOSE_BYTES, RunWriter
from te_precision_callbacks.sinks.step_records import Event, EventSink, RunInfo, Scalars, StepRecords, end_of
from te_precision_callbacks.sinks.writer_thread import WriterThread
from te_precision_callbacks.statistics.arrays import Mask

logger = logging.getLogger(__name__)

MAX_QUEUED = 1 << 24
"""Maximum number of values in the queue, about 300 MB; further steps are dropped."""

LONGEST_SEARCH = 120.0
LAST_SEARCH = 10.0
"""Timeouts in seconds of a rank that does not reduce with rank 0 and waits for rank 0's segment: during the session,
and after its end."""

_PLACE = "place"
"""Key in the store for rank 0's segment."""


class RecordingError(PrecisionDebugError, RuntimeError): ...


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


class RecordSink(EventSink):
    """Records a run. The training thread queues jobs, and another thread writes them.

    Attributes:
        writes_reduced: whether this rank writes reduced values, steps, scalars and facts; other ranks write only local
            values, failures and dumps.
        is_alone: whether this rank checks the contract alone.
        keys: keys of this run in the store of the process group; None without other ranks.
        place: the segment. Rank 0 creates it when there is content, and puts it into the store for ranks that do not
            reduce with rank 0.
        last, step: the last iteration, and the iteration that the end has interrupted, set at the end; -1 before.
        has_content: whether there is anything to write besides the start and the end.
    """

    def __init__(self, log_dir: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.place: Place | None = None
        self.last = -1
        self.step = -1
        self._run_id = new_run_id()
        self.writes_reduced = True
        self.is_alone = True
        self._runs = log_dir / FOLDER
        self._limit = limit
        self._run: RunInfo | None = None
        self._info: RunInfo
        self.thread: WriterThread[Job] = WriterThread("records", self, MAX_QUEUED)
        self._writer: RunWriter | None = None
        self._facts = FactTables({}, {})
        self._scopes: dict[str, str] = {}
        self._last_step: StepJob | None = None
        self._latest = 0
        self._is_full = False
        self._before: list[Job] = []
        self.has_content = False
        self._notices = Notices()
        self._last_records: StepRecords | None = None
        self._made_at = time.time()
        self._searching_since = 0.0
        self.keys: Any = None

    # ------------------------------------------------------------------ in the training thread

    @property
    def run_id(self) -> str:
        if self.place is None:
            return self._run_id
        return self.place.run_id

    def continue_run(self, run_id: str) -> None:
        """Continue a recorded run, or start a new one if the folder does not have it; call before :meth:`begin`."""
        is_there = Path(run_id).name == run_id != "" and (self._runs / run_id).is_dir()
        self._run_id = run_id if is_there else new_run_id()

    def begin(self) -> Place:
        try:
            if not (self._runs / self._run_id).is_dir():
                return Place(self._run_id, 0)
            return Place(self._run_id, make_segment(self._runs / self._run_id))
        except OSError as error:
            raise RecordingError(f"{self._runs} cannot be written: {error}. The run is not recorded.") from error

    def start(self, run: RunInfo) -> None:
        self._run = run
        self._info = run
        if self.writes_reduced:
            first = run.start_iteration
            self._put(Event("segment_started", f"The session starts at debug iteration {first}.", first))
        self.thread.flush_soon()  # a process that is killed soon leaves a run, and not an earlier one as the last

    def put_facts(self, facts: FactTables) -> None:
        if self.writes_reduced:
            self.has_content = self.has_content or len(facts.tables["gemms"]) > 0
            self._put(facts)

    def write(self, records: StepRecords) -> None:
        self._raise_failure()
        if records is self._last_records:
            return
        self._last_records = records
        if self._run is None or not (self.writes_reduced or _local_mask(records).any()):
            return
        self.has_content = self.has_content or len(records) > 0
        if not self.thread.put(StepJob(records, time.time()), len(records)) and self._notices.first("slow"):
            text = "The disk is slower than the training, so values of some steps are not recorded."
            self._put(Event("observation_failed", text, records.iteration, "warning"))

    def event(self, event: Event) -> None:
        is_of_all = event.kind == "contract_checked" or bool(event.data.get("of_all"))
        is_of_all |= event.kind == "finding" and not event.data.get("ranks")
        is_own = event.severity != "info" or event.kind in ("dump_written", "last_steps")
        if self.writes_reduced or (is_own and (self.is_alone or not is_of_all)):
            self.has_content = True
            self._put(event)

    def scalars(self, scalars: Scalars) -> None:
        if self.writes_reduced:
            self._put(scalars)

    def close(self, error: BaseException | None) -> None:
        """Wait until everything is written; after an interruption, a second call continues to wait."""
        # An end without a failure, such as by a signal, is the same on all ranks.
        is_own = self.writes_reduced or (isinstance(error, Exception) and not isinstance(error, SessionError))
        self.has_content = self.has_content or (error is not None and is_own)
        self._put(End(error, self.last, self.step))
        self._run = None
        self.thread.finish()
        self._raise_failure()

    def _put(self, job: Job) -> None:
        if self._run is not None:
            self.thread.put(job)

    def _raise_failure(self) -> None:
        failure = self.thread.take_failure()
        if failure is not None:
            self._run = None
            why = str(failure) or type(failure).__name__
            now = "not recorded"
            if self._writer:
                now = "no longer recorded; what was recorded remains readable"
            raise RecordingError(f"{self._runs} cannot be written: {why}. The run is {now}.") from failure

    # ------------------------------------------------------------------ in the sink's thread

    def take(self, job: Job) -> bool:
        if self._writer is None:
            if not self.has_content and (self._info.rank or self.place is None):
                self._before.append(job)
                return True
            self.place = self.place or self._find_place()
            if self.place is None:
                return False  # retry until rank 0 has a segment
            if self._info.rank == 0 and self.keys is not None:
                self.keys.set(_PLACE, json.dumps(self.place))
            self._latest = self._info.start_iteration
            self._writer = self._open(self.place, self._latest, self._made_at)
            for earlier in self._before:
                self._write(earlier, self._writer)
            self._before.clear()
        self._write(job, self._writer)
        return True

    def _find_place(self) -> Place | None:
        """Return the segment of rank 0, which it has perhaps not put into the store yet."""
        if self._info.rank == 0:
            return self.begin()
        self._searching_since = self._searching_since or time.monotonic()
        if self.keys is not None and self.keys.check([_PLACE]):
            return Place(*json.loads(self.keys.get(_PLACE)))
        if time.monotonic() - self._searching_since > (LONGEST_SEARCH if self._run else LAST_SEARCH):
            raise RecordingError("rank 0 has begun no segment")
        return None

    def _open(self, place: Place, first_iteration: int, started: float) -> RunWriter:
        """Open a segment; its first file may be created long after its start, in seconds since the epoch."""
        run = self._info
        folder = self._runs / place.run_id
        (folder / segment_name(place.segment)).mkdir(parents=True, exist_ok=True)
        writer = RunWriter(folder, place.segment, run.rank)
        trace_sigterm(writer.own)
        if run.rank == 0:
            begun = {"first_iteration": first_iteration, "world": run.world_size}
            facts = {"versions": dict(run.versions), "config": run.config, "started_at": time_text(started)}
            writer.put_run(**{**begun, **facts, **self._facts.run})
        return writer

    def _write(self, job: Job, writer: RunWriter) -> None:
        match job:
            case StepJob():
                self._write_step(job, writer)
            case Event():
                self._latest = max(job.iteration, self._latest)
                self._write_event(job, writer)
            case Scalars(iteration, logging_step):
                self.has_content = True  # of a run that exists: a trainer logs scalars also without a step
                self._latest = max(iteration, self._latest)
                step = {"iteration": iteration, "logging_step": logging_step}
                writer.add("scalars", ({**step, "name": name, "value": job.values[name]} for name in job.values))
            case FactTables():
                self._facts = job
                self._scopes.update((row["layer"], row["scope"]) for row in job.tables["layers"] if row["scope"])
                self._write_facts(writer)
            case End(error, last, step):
                latest = max(self._latest, last)
                self._write_event(end_of(error, latest, max(latest, step)), writer)
                writer.close("ended" if error is None else "failed")
                untrace_sigterm(writer.own)
                self._writer = None

    def _write_facts(self, writer: RunWriter) -> None:
        if writer.rank == 0:
            writer.put_run(**self._facts.run)
        for name, rows in self._facts.tables.items():
            writer.put_facts(name, rows)

    def _write_event(self, event: Event, writer: RunWriter) -> None:
        row = {name: value or None for name, value in vars(event).items()}
        row |= {"rank": writer.rank, "iteration": event.iteration, "wall_time": round(event.wall_time * 1e6)}
        row["text"] = event.text.encode(errors="backslashreplace").decode()  # a file name may contain invalid UTF-8
        if event.data:
            row["data"] = json.dumps(event.data, default=str)
        writer.add("events", [row])

    def _write_step(self, step: StepJob, writer: RunWriter) -> None:
        records = step.records
        seconds = None
        if self._last_step is not None:
            seconds = step.wall_time - self._last_step.wall_time
            if records.iteration <= self._last_step.records.iteration:  # the training loop has gone back
                untrace_sigterm(writer.own)
                writer.close()
                place = Place(writer.run_id, writer.segment + 1)
                self._writer = writer = self._open(place, records.iteration, time.time())
                if self._facts.tables:
                    self._write_facts(writer)
        self._last_step = step
        self._latest = max(records.iteration, self._latest)
        row = {
            "iteration": records.iteration,
            "logging_step": records.logging_step,
            "wall_time": round(step.wall_time * 1e6),
            "step_seconds": seconds,
            "observe_seconds": records.observe_seconds,
            "local": records.local,
            "ranks": self._info.world_size,
        }
        writer.add("steps", [row])
        if not self._is_full:
            self._write_numbers(records, writer)

    def _write_numbers(self, records: StepRecords, writer: RunWriter) -> None:
        rank = None
        if self._info.world_size > 1:
            rank = writer.rank
        # Series n of the session is series 2 n of the file, reduced over ranks, and 2 n + 1, of this rank.
        for layer, family in records.table.since(len(writer.subjects) // 2):
            names = self._scopes.get(layer, ""), layer, family.tensor, family.gemm or "", family.statistic
            writer.subjects += Subject(*names, None), Subject(*names, rank)
        local = _local_mask(records)
        written = local | self.writes_reduced
        series = records.series[written]
        flags = np.full(len(series), LOCAL * records.local, np.uint8)
        if records.unscaled:
            unscaled = [records.table[number].layer in records.unscaled for number in series.tolist()]
            flags[np.array(unscaled, bool)] |= STEP0
        in_file = 2 * series + (local[written] & (rank is not None))
        writer.add_values(records.iteration, in_file, np.frombuffer(records.values)[written], flags)
        if self.writes_reduced or records.local:
            own = records.local and rank is not None
            writer.add_vectors(records.iteration, {2 * n + own: counts for n, counts in records.histograms.items()})
        if writer.open_bytes > min(CLOSE_BYTES, self._limit):
            self.flush()

    def flush(self) -> None:
        """Close large files, and record no more statistics at the limit."""
        writer = self._writer
        if writer is None:
            return
        writer.flush()
        if writer.rank == 0:
            os.utime(writer.folder / RUN_FILE)
        if self._is_full:
            return
        size = writer.size()
        if size > self._limit and writer.open_bytes > self._limit // 8:
            writer.close_statistics()  # a closed file is compressed
            size = writer.size()
        self._is_full = size > self._limit
        if self._is_full:
            text = (
                f"The records of rank {writer.rank} have reached their limit of {self._limit:,} bytes. Statistics"
                " are no longer recorded, only trainer metrics, findings and other events. To record more, set a larger"
                " records=."
            )
            logger.warning("%s Training continues. The records are in %s.", text, writer.folder.parent)
            self._write_event(Event("records_limited", text, self._latest, "warning"), writer)

    def leave(self) -> None:
        if self._writer is not None:
            if self.thread.failure is not None:
                self._writer.put_lost(self.thread.failure)
            self._writer.leave()
            untrace_sigterm(self._writer.own)


def _local_mask(records: StepRecords) -> Mask:
    if records.own:
        return np.fromiter(records.own, bool, len(records))
    return np.ones(len(records), bool)
