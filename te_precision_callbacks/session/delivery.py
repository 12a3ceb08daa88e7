"""Delivery of a run's records and events to sinks, and the files of the run: its log, its records, its page."""

from __future__ import annotations

import contextlib
import json
import logging
import shlex
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch

from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank, world_size
from te_precision_callbacks.base.ranks.meeting import shared_store
from te_precision_callbacks.dumps.header import Header
from te_precision_callbacks.options import read_statistics_log
from te_precision_callbacks.runs.fingerprints import ResumeReport
from te_precision_callbacks.runs.limits import record_limit
from te_precision_callbacks.runs.reading import list_runs, open_run
from te_precision_callbacks.runs.recording import Place
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.runs.sink import RecordSink
from te_precision_callbacks.runs.trace_files import new_trace_file
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.sinks.loggers import LoggerSink
from te_precision_callbacks.sinks.statistics_log import StatisticsLog
from te_precision_callbacks.sinks.step_records import Event, EventSink, RunInfo, Scalars, Severity, Sink, StepRecords

logger = logging.getLogger(__name__)

SinkT = TypeVar("SinkT", bound=Sink)

SLOW_SHARE = 0.1
"""The share of the training time above which a sink counts as slow."""

_LEAST_WRITES, _LEAST_SECONDS = 10, 1.0
"""The number of writes and the seconds after which a sink is judged, so that chance does not decide."""


REPORT_FILE = "report.html"


@dataclass
class _SinkTime:
    writes: int = 0
    seconds: float = 0.0


class Sinks:
    """The sinks of a run. A sink that fails is reported, closed and dropped; the others go on.

    Args:
        context: shared state of the run.
        sinks: in the order in which they are called.
    """

    def __init__(self, context: RunContext, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        # Asked once: it takes long to find whether an object has the methods of a protocol.
        self._takers: list[EventSink] = [sink for sink in self._sinks if isinstance(sink, EventSink)]
        self._failures = context.failures
        self._begun = False
        self._to_start = list(self._sinks)
        self._to_close: list[Sink] | None = None
        self._times: dict[int, _SinkTime] = {}
        self._since: float | None = None
        self._notices = Notices()
        self._records: StepRecords | None = None
        self._left: list[Sink] = []
        self._passed_over: list[Sink] = []
        self._early: list[Event | Scalars] = []

    @property
    def wait_to_start(self) -> bool:
        """Whether a sink was not started."""
        return bool(self._to_start)

    def start(self, run: RunInfo) -> None:
        """Start all sinks, at the first step, when a resumed run knows its iteration; after an interruption, only
        sinks that were not started."""
        self._begun = True
        self._each("starting", self._to_start, lambda sink: sink.start(run))
        early, self._early = self._early, []
        for told in early:
            self.tell(told)

    def tell(self, told: Event | Scalars) -> None:
        """Tell the sinks that take it what has happened, or what the trainer logs; those before the first step once
        they are started."""
        if not self._begun or self._to_start:
            self._early.append(told)
            return
        self._each("telling", [*self._takers], lambda sink: _tell(sink, told))

    def drop(self, sink: Sink) -> None:
        """Do without a sink that was not started."""
        self._forget(sink)
        self._to_start = [other for other in self._to_start if other is not sink]

    def pass_over(self, sinks: Iterable[Sink]) -> None:
        """Hand no more records to some sinks, as to the files of a rank that has nothing to add at the end."""
        self._passed_over = list(sinks)

    def write(self, records: StepRecords) -> None:
        """Hand a step's records to all sinks; after an interruption, to sinks that have not finished writing them."""
        if self._records is not records:
            self._left = [sink for sink in self._sinks if not any(sink is other for other in self._passed_over)]
            self._records = records
        self._each("writing records to", self._left, lambda sink: self._write(sink, records))
        self._name_slow()

    def close(self, error: BaseException | None) -> None:
        """Close all sinks that were started; after an interruption, only those that have not finished closing."""
        if self._to_close is None:
            self._to_close = list(self._sinks) if self._begun else []
        self._each("closing", self._to_close, lambda sink: sink.close(error))

    def report(self, path: Path) -> None:
        """Hand the file of the run's report to the trainer's loggers, which are closed as sinks, and open still."""
        reporting = [sink for sink in self._sinks if isinstance(sink, LoggerSink)]
        self._each("handing the report to", reporting, lambda sink: sink.report(path))

    def _each(self, doing: str, left: list[SinkT], call: Callable[[SinkT], None]) -> None:
        """Call the sinks in ``left``; each leaves the list when its call has ended."""
        failed: list[tuple[SinkT, Exception]] = []
        while left:
            sink = left[0]
            try:
                call(sink)
            except Exception as error:
                self._drop(sink, error if self._to_close is None else None)  # closing, and later, once is enough
                failed.append((sink, error))
            left.pop(0)
        for sink, failure in failed:
            self._failures.report(doing, type(sink).__name__, failure)

    def _drop(self, sink: Sink, error: Exception | None) -> None:
        self._forget(sink)
        if error is not None:
            with contextlib.suppress(Exception):  # the sink is known to fail
                sink.close(error)

    def _forget(self, sink: Sink) -> None:
        self._sinks = [other for other in self._sinks if other is not sink]
        self._takers = [other for other in self._takers if other is not sink]

    # ------------------------------------------------------------------ how long they take

    def _write(self, sink: Sink, records: StepRecords) -> None:
        spent = self._times.get(id(sink))
        begun = time.perf_counter()
        sink.write(records)
        if spent is None:  # the first write opens files and connections
            self._times[id(sink)] = _SinkTime()
            self._since = time.perf_counter() if self._since is None else self._since
        else:
            spent.writes += 1
            spent.seconds += time.perf_counter() - begun

    def _name_slow(self) -> None:
        if self._since is None:
            return
        elapsed = time.perf_counter() - self._since
        for sink in self._sinks:
            spent = self._times.get(id(sink), _SinkTime())
            enough = spent.writes >= _LEAST_WRITES and spent.seconds >= _LEAST_SECONDS
            if enough and spent.seconds > SLOW_SHARE * elapsed and self._notices.first("slow"):
                logger.warning(
                    "The sink %s takes %.0f %% of the training's time: %.0f ms for the records of a step, in the"
                    " training's thread. Move the sink's work to a separate thread, collect statistics less often"
                    " (freq), or select fewer metrics (log_filter=).",
                    type(sink).__name__,
                    100 * spent.seconds / elapsed,
                    1000 * spent.seconds / spent.writes,
                )
                return


def _tell(sink: EventSink, told: Event | Scalars) -> None:
    if isinstance(told, Event):
        sink.event(told)
    else:
        sink.scalars(told)


def nonfinite_event(error: BaseException, iteration: int) -> Iterator[Event]:
    """The overflow that stopped the training; nothing for another error."""
    from te_precision_callbacks.overflow import ActivationOverflowError

    if isinstance(error, ActivationOverflowError):
        data = {"class": error.class_name, "role": error.role, "batch": error.batch, "rank": error.rank}
        phase = "backward" if error.role.startswith("grad") else "forward"
        yield Event("nonfinite", str(error), iteration, "error", phase=phase, layer=error.path, data=data)


def dump_events(written: Iterable[Header]) -> Iterator[Event]:
    """The tensors that were dumped."""
    for header in written:
        text = f"{header.layer} {header.tensor}, micro-batch {header.micro_batch}"
        yield Event("dump_written", text, header.iteration or 0, layer=header.layer, tensor=header.tensor)


def resume_event(report: ResumeReport, iteration: int) -> Event:
    """The result of the audit of a resume."""
    severity: Severity = "warning" if report.findings else "info"
    return Event("resume_audited", str(report), iteration, severity, phase="checkpoint")


class RunFiles:
    """The statistics log and the records of a run, as far as the options ask for them, and the page of the records.

    Args:
        context: shared state of the run.
        given_names: layer -> the name that the script gave to it and to no other layer.

    Attributes:
        log: the statistics log; None without one.
        records: the records; None if the run is not recorded.
        sinks: those of the two that there are.
        page: the page of the run once it is written, before that the command that makes it; empty as long as there is
            nothing for a page.
    """

    def __init__(self, context: RunContext, given_names: Mapping[str, str]) -> None:
        options, log_dir = context.options, context.results.log_dir
        choice, limit = read_statistics_log(options.statistics_log), record_limit(options.records)
        self._on_all_ranks = choice.ranks == "all"
        self._context = context
        self._ranks = context.ranks
        self._log_dir = log_dir
        self._has_begun = False
        self.log = None if choice.ranks == "off" else StatisticsLog(given_names=given_names, limit=choice.limit)
        self.records = RecordSink(log_dir, limit) if limit else None
        self.page = ""
        self.sinks: list[Sink] = [sink for sink in (self.log, self.records) if sink is not None]

    @property
    def in_full(self) -> bool:
        """Whether this rank writes more than its own numbers, failures and dumps."""
        return self._ranks.leads or self._on_all_ranks

    @property
    def place(self) -> Place | None:
        """Where the run is recorded; None if it is not."""
        return None if self.records is None else self.records.place

    def attach(self) -> None:
        """Decide what this rank writes, once the ranks have met."""
        if self.log is not None:
            self.log.own_only = not self.in_full

    def begin(self) -> None:
        """Agree, in the first step, where the run is recorded; on all ranks that reduce together, whether they record
        it or not. Where that fails the run is not recorded, and :attr:`records` is None."""
        if self._has_begun:
            return
        self._has_begun = True
        ranks, group = self._ranks, self._context.options.process_group
        with_rank_0 = ranks.several and (group is None or 0 in torch.distributed.get_process_group_ranks(group))
        if self.records is not None:
            self.records.writes_reduced = own_rank() == 0 or (ranks.several and ranks.leads)
            self.records.is_alone = not ranks.several
        if own_rank() == 0 and self.records is not None:
            try:
                self.records.place = self.records.begin()
            except Exception as error:
                self.records = None
                self._context.failures.report("recording", "the run", error)
        if with_rank_0:
            own = [] if own_rank() or self.place is None else [self.place]
            agreed = ranks.pool(own, "place of the records", Place)
            if self.records is not None and agreed:
                self.records.place = agreed[0]
        if world_size() > 1:
            self._share_place(with_rank_0=with_rank_0)

    def _share_place(self, *, with_rank_0: bool) -> None:
        """Send the place of the records from rank 0 to ranks that do not reduce with it, through torch's store."""
        try:
            store = shared_store("te_precision_callbacks/records")
            key = f"place/{store.add(f'sessions/{own_rank()}', 1)}"  # all ranks start the same sessions
            if own_rank() == 0:
                store.set(key, json.dumps(self.place or False))
        except Exception as error:  # such as a store that another rank has closed
            logger.info("The ranks do not share the place of the records: %s", error)
            return

        def find_place() -> Place | Literal[False] | None:
            place = json.loads(store.get(key)) if store.check([key]) else None
            return Place(*place) if place else place

        if self.records is not None and not with_rank_0:
            self.records.find_place = find_place

    def hurry(self) -> list[Callable[[], bool]]:
        """Have what was handed over written at once; see :meth:`WriterThread.hurry`."""
        return [file.hurry() for file in (self.log, self.records) if file is not None]

    def trace_file(self, first: int, last: int) -> Path:
        """The file of a profile of some iterations: in the folder of the run, or in the log folder if there is none."""
        return new_trace_file(self._log_dir, self.place, own_rank(), first, last)

    @property
    def _run_id(self) -> str:
        """The name of the run; empty if nothing is recorded that a view could show, or if its folder is gone."""
        records = self.records
        if records is None or records.place is None or not records.has_content:
            return ""
        run_id = records.place.run_id
        return run_id if (self._log_dir / FOLDER / run_id).is_dir() else ""

    def tell_command(self) -> str:
        """Log the command that makes the page of the run.

        Returns:
            The name of the run, or an empty text if nothing is recorded that a page could show.
        """
        run_id = self._run_id
        if run_id:
            self.page = tell_command(self._log_dir, run_id)
        return run_id

    def speed_command(self, trace: Path) -> str:
        """The command that reads a trace of the run."""
        if run_id := self._run_id:
            return f"te-precision speed {_quoted_run(self._log_dir, run_id)}"
        return f"te-precision speed --trace {shlex.quote(str(trace))}"

    def write_page(self, run_id: str, sinks: Sinks) -> None:
        """Write the page of the run into the log folder, and hand it to the trainer's loggers.

        Raises:
            PrecisionDebugError: the run cannot be read, or the page cannot be made or written.
        """
        from te_precision_callbacks.views.report import write_report

        path = write_report(open_run(self._log_dir / FOLDER / run_id), self._log_dir / REPORT_FILE)
        logger.info("The report of this run: %s", path)
        self.page = str(path)
        sinks.report(path)


def tell_command(log_dir: Path, run_id: str) -> str:
    """Log the command that makes the page of a run, and give it.

    Args:
        log_dir: the session's log folder.
        run_id: the run; the folder may have others.
    """
    command = f"te-precision report {_quoted_run(log_dir, run_id)}"
    logger.info("%s makes one page of this run.", command)
    return command


def _quoted_run(log_dir: Path, run_id: str) -> str:
    """The path of a run for a command: the log folder, or the run's own if there are others in it."""
    path = log_dir if list_runs(log_dir) == (run_id,) else log_dir / FOLDER / run_id
    return shlex.quote(str(path.absolute()))
