"""The sink that records a session's run: a thread writes, and the training thread only hands over.

<log_dir>/precision_records/<run_id>/seg-000/...

What a step hands over is in the files ``FLUSH_SECONDS`` (``records/writer_thread.py``) later at the latest, unless the
disk is slower than the training. A process that is killed loses what was handed over since; docs/records.md says more.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from pathlib import Path
from typing import NamedTuple

from te_precision_callbacks.errors import PrecisionDebugError
from te_precision_callbacks.notices import Notices
from te_precision_callbacks.records.model import Event, EventSink, RunInfo, Scalars, StepRecords
from te_precision_callbacks.records.writer_thread import WriterThread
from te_precision_callbacks.store.files import FOLDER, make_segment, new_run_id
from te_precision_callbacks.store.launches import find_segment
from te_precision_callbacks.store.limits import DEFAULT_LIMIT
from te_precision_callbacks.store.recording import Facts, Place, Recording, Step, own_numbers

logger = logging.getLogger(__name__)

MOST_WAITING = 1 << 24
"""The values that may wait for the thread, some 300 MB; a step beyond them is left out."""

LONGEST_SEARCH = 120.0
"""The seconds in which a rank that has no word from rank 0 looks for the segment that rank 0 has begun."""

LAST_SEARCH = 10.0
"""The same when the session has stopped."""


class RecordingError(PrecisionDebugError, RuntimeError):
    """A run cannot be recorded."""


class _End(NamedTuple):
    error: BaseException | None


_Job = Step | Event | Scalars | Facts | _End


class RecordSink(EventSink):
    """Records a run.

    Args:
        log_dir: the folder of the session's files.
        limit: the most bytes that this rank writes of the run.

    Attributes:
        run_id: the name of the run, which may be one that the folder has.
        writes_reduced: whether this rank writes what all ranks share: reduced numbers, steps, the trainer's numbers and
            facts. If not, it writes only what is its own.
        place: the segment, which all ranks must agree on before :meth:`start`. None: rank 0 begins one, and the others
            look for it.
    """

    def __init__(self, log_dir: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.place: Place | None = None
        self.run_id = new_run_id()
        self.writes_reduced = True
        self._runs = log_dir / FOLDER
        self._limit = limit
        self._run: RunInfo | None = None
        self._info: RunInfo
        self._given = 0  # values, counted by the training's thread
        self._taken = 0  # values, counted by the sink's thread
        self._thread: WriterThread[_Job] = WriterThread("te-precision records", self._write_waiting)
        self._recording: Recording | None = None
        self._said = Notices()
        self._last_records: StepRecords | None = None
        self._last_step: float | None = None
        self._made_at = time.time()
        self._searching_since = 0.0

    # ------------------------------------------------------------------ in the training's thread

    def has_run(self, run_id: str) -> bool:
        """Whether the folder has a run."""
        return Path(run_id).name == run_id != "" and (self._runs / run_id).is_dir()

    def begin(self) -> Place:
        """Begin a segment, of the run that is gone on with or of a new one.

        Raises:
            RecordingError: the folder cannot be made.
        """
        try:
            number, _ = make_segment(self._runs / self.run_id)
        except OSError as error:
            raise RecordingError(f"{self._runs} cannot be written: {error}. The run is not recorded.") from error
        return Place(self.run_id, number)

    def start(self, run: RunInfo) -> None:
        """Begin to write."""
        self._run = self._info = run
        if self.place is None and run.rank == 0:
            self.place = self.begin()
        self._put(Event("segment_started", f"Debug iteration {run.start_iteration} is next.", run.start_iteration))

    def put_facts(self, facts: Facts) -> None:
        """Write facts, which replace the earlier ones."""
        self._put(facts)

    def write(self, records: StepRecords) -> None:
        """Hand over a step's records."""
        self._raise_failure()
        if records is self._last_records:
            return
        now = time.perf_counter()
        seconds = None if self._last_step is None else now - self._last_step
        self._last_records, self._last_step = records, now
        if self._given - self._taken > MOST_WAITING:
            if self._said.first("slow"):
                text = "The disk is slower than the training, so numbers of some steps are not recorded."
                logger.warning("%s The first one is iteration %d. Training goes on.", text, records.iteration)
                self._put(Event("observation_failed", text, records.iteration, "warning"))
            return
        self._given += len(records)
        self._put(Step(records, time.time(), seconds))

    def event(self, event: Event) -> None:
        """Hand over something that happened."""
        self._put(event)

    def scalars(self, scalars: Scalars) -> None:
        """Hand over the trainer's own numbers."""
        if self.writes_reduced:
            self._put(scalars)

    def close(self, error: BaseException | None) -> None:
        """Wait until everything is written; an interruption may end the waiting, and a second call goes on with it.

        Raises:
            RecordingError: something could not be written.
        """
        self._put(_End(error))
        self._run = None
        self._thread.finish()
        self._raise_failure()

    def _put(self, job: _Job) -> None:
        if self._run is not None:
            self._thread.put(job)

    def _raise_failure(self) -> None:
        failure = self._thread.take_failure()
        if failure is not None:
            self._run = None
            why = failure if str(failure) else type(failure).__name__
            raise RecordingError(
                f"{self._runs} cannot be written: {why}. The run is no longer recorded; what was recorded remains"
                " readable."
            ) from failure

    # ------------------------------------------------------------------ in the sink's own thread

    def _write_waiting(self, jobs: deque[_Job]) -> bool:
        """Write what waits; returns whether that was the end."""
        try:
            return self._write_all(jobs)
        except BaseException:
            if self._recording is not None:
                self._recording.leave()
            raise

    def _write_all(self, jobs: deque[_Job]) -> bool:
        while jobs:
            job = jobs[0]
            if self._recording is None and self._concerns(job):
                if not self._find():
                    return False  # until rank 0 has begun
                self._recording = self._begin_recording()
            jobs.popleft()
            if isinstance(job, Step):
                self._taken += len(job.records)
            if isinstance(job, _End):
                if self._recording is not None:
                    self._recording.end(job.error)
                    self._recording = None
                return True
            if self._recording is not None and self._concerns(job):
                self._recording.take(job)
        if self._recording is not None:
            self._recording.flush()
        return False

    def _concerns(self, job: _Job) -> bool:
        """Whether something has to be written on this rank."""
        if self.writes_reduced:
            return True
        if isinstance(job, Step):
            return job.records.local or bool(own_numbers(job.records).any())
        return isinstance(job, Event) and not job.kind.startswith("segment_")

    def _find(self) -> bool:
        """Whether the segment is known; it is looked for if not.

        Raises:
            RecordingError: there is none after a long search.
        """
        if self.place is None:
            self._searching_since = self._searching_since or time.monotonic()
            found = find_segment(self._runs, self._info.rank, self._made_at)
            if found is not None:
                self.place = Place(*found)
            elif time.monotonic() - self._searching_since > (LONGEST_SEARCH if self._run else LAST_SEARCH):
                raise RecordingError("rank 0 has begun no segment")
        return self.place is not None

    def _begin_recording(self) -> Recording:
        if self.place is None:
            raise RecordingError("no segment was begun")
        return Recording(self._runs, self.place, self._info, writes_reduced=self.writes_reduced, limit=self._limit)
