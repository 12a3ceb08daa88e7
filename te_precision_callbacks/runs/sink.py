"""The sink that records a session's run: a thread writes, and the training thread only hands over.

<log_dir>/precision_records/<run_id>/seg-000/...

What a step hands over is in the files ``FLUSH_SECONDS`` (``sinks/writer_thread.py``) later at the latest, unless the
disk is slower than the training. A process that is killed loses what was handed over since; docs/records.md says more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from te_precision_callbacks.base.errors import PrecisionDebugError, SessionError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.threads import within
from te_precision_callbacks.runs.limits import DEFAULT_LIMIT
from te_precision_callbacks.runs.recording import Facts, Place, Recording, Step, own_numbers
from te_precision_callbacks.runs.run_files import FOLDER, make_segment, new_run_id
from te_precision_callbacks.sinks.step_records import Event, EventSink, RunInfo, Scalars, StepRecords
from te_precision_callbacks.sinks.writer_thread import LONGEST_STILL, WriterThread

MOST_WAITING = 1 << 24
"""The values that may wait for the thread, some 300 MB; a step beyond them is left out."""


class RecordingError(PrecisionDebugError, RuntimeError):
    """A run cannot be recorded."""


class _End(NamedTuple):
    error: BaseException | None
    last: int


_ResultT = TypeVar("_ResultT")

_Job = Step | Event | Scalars | Facts | _End


class RecordSink(EventSink):
    """Records a run.

    It has many attributes because it hands over in one thread and writes in another, and both need to know the segment.

    Args:
        log_dir: the folder of the session's files.
        limit: the most bytes that this rank writes of the run.

    Attributes:
        writes_reduced: whether this rank writes what all ranks share: reduced numbers, steps, the trainer's numbers and
            facts. If not, it writes only what is its own, and makes no file before it has something: numbers, failures,
            dumps.
        is_alone: whether this rank judges the contract alone.
        place: the segment. None in a run that ends before its first step: rank 0 then begins one with the first
            content, and the other ranks record nothing.
        find_place: returns the segment on a rank that does not reduce with rank 0; None if rank 0 has not begun one
            yet, False if it does not record.
        last: the last iteration that has run, once the run ends; -1 before that.
        has_recorded: whether something was written.
        has_content: whether something was written that a view can show: more than that a segment has begun and ended.
    """

    def __init__(self, log_dir: Path, limit: int = DEFAULT_LIMIT) -> None:
        self.place: Place | None = None
        self.find_place: Callable[[], Place | Literal[False] | None] = lambda: False
        self.last = -1
        self._run_id = new_run_id()
        self._is_new = True
        self.writes_reduced = True
        self.is_alone = True
        self._runs = log_dir / FOLDER
        self._limit = limit
        self._run: RunInfo | None = None
        self._info: RunInfo
        self._thread: WriterThread[_Job] = WriterThread("records", self, MOST_WAITING)
        self._recording: Recording | None = None
        self._before: list[Event | Scalars | Facts] = []
        self.has_recorded = False
        self.has_content = False
        self._said = Notices()
        self._last_records: StepRecords | None = None
        self._last_step: float | None = None
        self._made_at = time.time()

    # ------------------------------------------------------------------ in the training's thread

    @property
    def run_id(self) -> str:
        """The name of the run, which may be one that the folder has."""
        return self._run_id if self.place is None else self.place.run_id

    def go_on_with(self, run_id: str) -> None:
        """Record in a run that the folder has; in a new one if the folder has no such run. Without effect once the
        segment has begun.

        Raises:
            RecordingError: the disk does not answer.
        """
        is_there = Path(run_id).name == run_id != "" and self._ask((self._runs / run_id).is_dir)
        self._run_id, self._is_new = (run_id, False) if is_there else (new_run_id(), True)

    def begin(self) -> Place:
        """Begin a segment, of the run that is gone on with or of a new one, whose folder the thread makes.

        Raises:
            RecordingError: the folder cannot be made.
        """
        if self._is_new:
            return Place(self._run_id, 0)
        return Place(self._run_id, self._ask(lambda: make_segment(self._runs / self._run_id)))

    def _ask(self, call: Callable[[], _ResultT]) -> _ResultT:
        """The answer of a disk.

        Raises:
            RecordingError: there is none.
        """
        try:
            return within(LONGEST_STILL, call)
        except OSError as error:
            raise RecordingError(f"{self._runs} cannot be written: {error}. The run is not recorded.") from error

    def start(self, run: RunInfo) -> None:
        """Begin to write."""
        self._run = self._info = run
        self._put(Event("segment_started", f"Debug iteration {run.start_iteration} is next.", run.start_iteration))
        self._thread.hurry()  # a process that is killed soon leaves a run, and not an earlier one as the last

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
        job = Step(records, time.time(), seconds)
        if self._run is not None and not self._thread.put(job, len(records)) and self._said.first("slow"):
            text = "The disk is slower than the training, so numbers of some steps are not recorded."
            self._put(Event("observation_failed", text, records.iteration, "warning"))

    def event(self, event: Event) -> None:
        """Hand over something that happened."""
        self._put(event)

    def scalars(self, scalars: Scalars) -> None:
        """Hand over the trainer's own numbers."""
        if self.writes_reduced:
            self._put(scalars)

    def hurry(self) -> Callable[[], bool]:
        """Have what was handed over written at once; see :meth:`WriterThread.hurry`."""
        return self._thread.hurry()

    def close(self, error: BaseException | None) -> None:
        """Wait until everything is written; an interruption may end the waiting, and a second call goes on with it.

        Raises:
            RecordingError: something could not be written.
        """
        self._put(_End(error, self.last))
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
            now = "no longer recorded; what was recorded remains readable" if self.has_recorded else "not recorded"
            raise RecordingError(f"{self._runs} cannot be written: {why}. The run is {now}.") from failure

    # ------------------------------------------------------------------ in the sink's own thread

    def take(self, job: _Job) -> bool:
        """Write a job, once the segment is known to this rank."""
        with self._losing():
            return self._take(job)

    def _take(self, job: _Job) -> bool:
        if self._recording is None and self._concerns(job):
            if self.place is None:
                # Without a step no run is made of that alone, nor of what a trainer logs at its end, so no rank waits
                # for one; unless an earlier run would be taken for this one.
                if isinstance(job, Scalars) or not (_is_content(job) or (self._is_new and self._runs.is_dir())):
                    self._before += [job] if isinstance(job, Event | Scalars | Facts) else []
                    return True
                place = self.begin() if self._info.rank == 0 else self.find_place()
                if not place:
                    return place is not None  # None: again, until rank 0 has begun
                self.place = place
            self._recording = Recording(
                self._runs,
                self.place,
                self._info,
                writes_reduced=self.writes_reduced,
                limit=self._limit,
                begun=self._made_at,
            )
            self.has_recorded = True
            for earlier in self._before:
                self._recording.take(earlier)
        if self._recording is None:
            return True
        if isinstance(job, _End):
            self._recording.end(job.error, job.last)
            self._recording = None
        elif self._concerns(job):
            self._recording.take(job)
            self.has_content = self.has_content or _is_content(job)
        return True

    def flush(self) -> None:
        """Bring what was taken to the files."""
        with self._losing():
            if self._recording is not None:
                self._recording.flush()

    @contextlib.contextmanager
    def _losing(self) -> Iterator[None]:
        """Lets the files say so if something could not be written."""
        try:
            yield
        except BaseException as error:
            if self._recording is not None:
                self._recording.lose(error)
            raise

    def leave(self) -> None:
        """Close the files of a recording that could not go on."""
        if self._recording is not None:
            self._recording.leave()

    def _concerns(self, job: _Job) -> bool:
        """Whether something has to be written on this rank."""
        if self.writes_reduced:
            return True
        if isinstance(job, Step):
            return bool(own_numbers(job.records).any())
        if isinstance(job, _End):
            # An end without a failure, as by a signal, comes to all ranks alike.
            return isinstance(job.error, Exception) and not isinstance(job.error, SessionError)
        if not isinstance(job, Event):
            return False
        is_of_all = job.kind == "contract_judged" or (job.kind == "finding" and not job.data.get("ranks"))
        if is_of_all and not self.is_alone:
            return False
        return job.severity != "info" or job.kind == "dump_written"


def _is_content(job: _Job) -> bool:
    """Whether a view can show it."""
    if isinstance(job, Facts):
        return len(job.tables["gemms"]) > 0
    if isinstance(job, Event):
        return job.kind not in ("segment_started", "segment_ended")
    if isinstance(job, Step):
        return len(job.records) > 0
    if isinstance(job, _End):
        return job.error is not None
    return isinstance(job, Scalars)
