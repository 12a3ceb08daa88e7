"""Delivers records and events to sinks, and manages a run's files: statistics log, records and report page."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from te_precision_callbacks.base.ranks import has_other_ranks, own_rank
from te_precision_callbacks.base.ranks.meeting import next_keys, shared_store
from te_precision_callbacks.dumps.contents import Header
from te_precision_callbacks.options import read_statistics_log, record_limit
from te_precision_callbacks.runs.run_files import FOLDER, Place
from te_precision_callbacks.runs.sink import RecordSink
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.sinks.statistics_log import StatisticsLog
from te_precision_callbacks.sinks.step_records import Event, EventSink, RunInfo, Scalars, Sink, StepRecords
from te_precision_callbacks.sinks.writer_thread import WriterThread

SinkT = TypeVar("SinkT", bound=Sink)


class Sinks:
    """The sinks of a run, in order. A failing sink is reported, closed and dropped; the others continue.

    Attributes:
        skipped: sinks that get no records, such as the files of a rank without local values.
    """

    def __init__(self, context: RunContext, sinks: Iterable[Sink]) -> None:
        self._sinks = list(sinks)
        # Checked once: it is slow to check whether an object implements a protocol.
        self._takers: list[EventSink] = [sink for sink in self._sinks if isinstance(sink, EventSink)]
        self._failures = context.failures
        self.have_started = False
        self._is_closing = False
        self.skipped: Sequence[Sink] = ()
        self._early: list[Event | Scalars] = []

    def start(self, run: RunInfo) -> None:
        """Start the sinks. Called at the first step, when the iteration of a resumed run is known."""
        self.have_started = True
        self._each("starting", self._sinks, lambda sink: sink.start(run))
        early = self._early
        self._early = []
        for item in early:
            self.send(item)

    def send(self, item: Event | Scalars) -> None:
        """Send an event or the trainer's scalars to the sinks that accept them; queued until the sinks have started."""
        if not self.have_started:
            self._early.append(item)
            return
        self._each("sending to", self._takers, lambda sink: _send(sink, item))

    def drop(self, sink: Sink) -> None:
        self._sinks = [other for other in self._sinks if other is not sink]
        self._takers = [other for other in self._takers if other is not sink]

    def write(self, records: StepRecords) -> None:
        skipped = set(map(id, self.skipped))
        sinks = [sink for sink in self._sinks if id(sink) not in skipped]
        self._each("writing records to", sinks, lambda sink: sink.write(records))

    def close(self, error: BaseException | None) -> None:
        self._is_closing = True
        self._each("closing", self._sinks if self.have_started else [], lambda sink: sink.close(error))

    def _each(self, doing: str, sinks: Iterable[SinkT], call: Callable[[SinkT], None]) -> None:
        failed: list[tuple[SinkT, Exception]] = []
        for sink in sinks:
            try:
                call(sink)
            except Exception as error:
                self.drop(sink)
                if not self._is_closing:
                    with contextlib.suppress(Exception):  # the sink is known to fail
                        sink.close(error)
                failed.append((sink, error))
        for sink, failure in failed:
            self._failures.report(doing, type(sink).__name__, failure)


def _send(sink: EventSink, item: Event | Scalars) -> None:
    if isinstance(item, Event):
        sink.event(item)
    else:
        sink.scalars(item)


def dump_events(written: Iterable[Header]) -> Iterator[Event]:
    for header in written:
        text = f"{header.layer} {header.tensor}, micro-batch {header.micro_batch}"
        yield Event("dump_written", text, header.iteration or 0, layer=header.layer, tensor=header.tensor)


class RunFiles:
    """The statistics log, the records and the report page of a run, as its options select.

    Attributes:
        log, records: None if switched off.
    """

    def __init__(self, context: RunContext, given_names: Mapping[str, str]) -> None:
        options = context.options
        log_dir = context.results.log_dir
        choice = read_statistics_log(options.statistics_log)
        limit = record_limit(options.records)
        self._on_all_ranks = choice.ranks == "all"
        self._context = context
        self._ranks = context.ranks
        self._log_dir = log_dir
        self.log = None if choice.ranks == "off" else StatisticsLog(given_names=given_names, limit=choice.limit)
        self.records = RecordSink(log_dir, limit) if limit else None
        self.sinks: list[Sink] = [sink for sink in (self.log, self.records) if sink is not None]

    @property
    def writes_all(self) -> bool:
        """Return whether this rank also writes reduced values."""
        return self._ranks.leads or self._on_all_ranks

    @property
    def place(self) -> Place | None:
        if self.records is None:
            return None
        return self.records.place

    def attach(self) -> None:
        if self.log is not None:
            self.log.own_only = not self.writes_all
        if self.records is not None and self.records.keys is None and has_other_ranks(None):
            with contextlib.suppress(RuntimeError):  # only ranks that do not reduce with rank 0 need the store
                store = shared_store(f"te_precision_callbacks/records/{self._log_dir.absolute()}")
                self.records.keys = next_keys(store, own_rank())

    def begin(self, sinks: Sinks) -> None:
        """Agree with all ranks on the folder of the records; on failure, the run is not recorded."""
        ranks = self._ranks
        group = self._context.options.process_group
        with_rank_0 = ranks.several and (group is None or 0 in torch.distributed.get_process_group_ranks(group))
        if self.records is not None:
            self.records.writes_reduced = own_rank() == 0 or (ranks.several and ranks.leads)
            self.records.is_alone = not ranks.several
        if own_rank() == 0 and self.records is not None:
            try:
                self.records.place = self.records.begin()
            except Exception as error:
                sinks.drop(self.records)
                self.records = None
                self._context.failures.report("recording", "the run", error)
        if with_rank_0:
            own = [] if own_rank() or self.place is None else [self.place]
            agreed = ranks.pool(own, "place of the records", Place)
            if self.records is not None and agreed:
                self.records.place = agreed[0]

    @property
    def threads(self) -> list[WriterThread[Any]]:
        """The threads that write the files, with the log of events of nvidia-dlfw-inspect."""
        files = self.log, self.records, self._context.inspector.events
        return [file.thread for file in files if file is not None and file.thread is not None]

    @property
    def run_folder(self) -> Path:
        """The folder of the run, which its commands name; without records, the log folder."""
        if self.records is not None and self.records.has_content and self.place is not None:
            folder = self._log_dir / FOLDER / self.place.run_id
            if folder.is_dir():
                return folder
        return self._log_dir
