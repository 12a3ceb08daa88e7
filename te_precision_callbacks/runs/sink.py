"""The sink that writes the records of a run, in a thread.

<log_dir>/precision_records/<run_id>/seg-000/...

Records are in files at the end of each step, unless the disk is slow (``WriterThread.catch_up``).
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from te_precision_callbacks.base.errors import PrecisionDebugError, SessionError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.runs.run_files import (
    DEFAULT_LIMIT,
    FOLDER,
    Place,
    make_segment,
    new_run_id,
    untrace_sigterm,
)
from te_precision_callbacks.runs.writing import End, FactTables, Job, Recording, StepJob, local_mask
from te_precision_callbacks.sinks.step_records import Event, EventSink, RunInfo, Scalars, StepRecords
from te_precision_callbacks.sinks.writer_thread import WriterThread

MAX_QUEUED = 1 << 24
"""Maximum number of values in the queue, about 300 MB; further steps are dropped."""

LONGEST_SEARCH = 120.0
LAST_SEARCH = 10.0
"""Timeouts in seconds of a rank that does not reduce with rank 0 and waits for rank 0's segment: during the session,
and after its end."""

_PLACE = "place"
"""Key in the store for rank 0's segment."""


class RecordingError(PrecisionDebugError, RuntimeError): ...


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
        has_content: whether anything was written besides the start and the end.
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
        self._recording: Recording | None = None
        self._before: list[Event | Scalars | FactTables] = []
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
        self._put(
            Event(
                "segment_started", f"The session starts at debug iteration {run.start_iteration}.", run.start_iteration
            )
        )
        self.thread.flush_soon()  # a process that is killed soon leaves a run, and not an earlier one as the last

    def put_facts(self, facts: FactTables) -> None:
        self._put(facts)

    def write(self, records: StepRecords) -> None:
        self._raise_failure()
        if records is self._last_records:
            return
        self._last_records = records
        job = StepJob(records, time.time())
        if self._run is not None and not self.thread.put(job, len(records)) and self._notices.first("slow"):
            text = "The disk is slower than the training, so values of some steps are not recorded."
            self._put(Event("observation_failed", text, records.iteration, "warning"))

    def event(self, event: Event) -> None:
        self._put(event)

    def scalars(self, scalars: Scalars) -> None:
        if self.writes_reduced:
            self._put(scalars)

    def close(self, error: BaseException | None) -> None:
        """Wait until everything is written; after an interruption, a second call continues to wait."""
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
            if self._recording:
                now = "no longer recorded; what was recorded remains readable"
            raise RecordingError(f"{self._runs} cannot be written: {why}. The run is {now}.") from failure

    # ------------------------------------------------------------------ in the sink's thread

    def take(self, job: Job) -> bool:
        if self._recording is None and self._concerns(job):
            if self.place is None:
                # These alone do not create a run, nor do scalars that a trainer logs without a step.
                if isinstance(job, Scalars) or not _is_content(job):
                    if isinstance(job, Event | Scalars | FactTables):
                        self._before.append(job)
                    return True
                self.place = self._find_place()
            if self.place is None:
                return False  # retry until rank 0 has a segment
            if self._info.rank == 0 and self.keys is not None:
                self.keys.set(_PLACE, json.dumps(self.place))
            self._recording = Recording(
                self._runs,
                self.place,
                self._info,
                writes_reduced=self.writes_reduced,
                limit=self._limit,
                begun=self._made_at,
            )
            for earlier in self._before:
                self._recording.take(earlier)
            self._before.clear()
        if self._recording is not None and (isinstance(job, End) or self._concerns(job)):
            self._recording.take(job)
            self.has_content = self.has_content or _is_content(job)
            if isinstance(job, End):
                self._recording = None
        return True

    def _find_place(self) -> Place | None:
        if self._info.rank == 0:
            return self.begin()
        self._searching_since = self._searching_since or time.monotonic()
        if self.keys is not None and self.keys.check([_PLACE]):
            return Place(*json.loads(self.keys.get(_PLACE)))
        if time.monotonic() - self._searching_since > (LONGEST_SEARCH if self._run else LAST_SEARCH):
            raise RecordingError("rank 0 has begun no segment")
        return None

    def flush(self) -> None:
        if self._recording is not None:
            self._recording.flush()

    def leave(self) -> None:
        if self._recording is not None:
            if self.thread.failure is not None:
                self._recording.writer.put_lost(self.thread.failure)
            self._recording.writer.leave()
            untrace_sigterm(self._recording.writer.own)

    def _concerns(self, job: Job) -> bool:
        if self.writes_reduced:
            return True
        if isinstance(job, StepJob):
            return bool(local_mask(job.records).any())
        if isinstance(job, End):
            # An end without a failure, such as by a signal, is the same on all ranks.
            return isinstance(job.error, Exception) and not isinstance(job.error, SessionError)
        if not isinstance(job, Event):
            return False
        is_of_all = job.kind == "contract_checked" or bool(job.data.get("of_all"))
        is_of_all |= job.kind == "finding" and not job.data.get("ranks")
        if is_of_all and not self.is_alone:
            return False
        return job.severity != "info" or job.kind in ("dump_written", "last_steps")


def _is_content(job: Job) -> bool:
    if isinstance(job, FactTables):
        return len(job.tables["gemms"]) > 0
    if isinstance(job, Event):
        return job.kind not in ("segment_started", "segment_ended")
    if isinstance(job, StepJob):
        return len(job.records) > 0
    if isinstance(job, End):
        return job.error is not None
    return isinstance(job, Scalars)
