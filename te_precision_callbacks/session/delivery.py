"""Delivers records and events to sinks, among them a run's files: the statistics log and the records."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from te_precision_callbacks.base.ranks import has_other_ranks, own_rank, world_size
from te_precision_callbacks.base.ranks.meeting import next_keys, shared_store
from te_precision_callbacks.dumps.contents import Header
from te_precision_callbacks.options import read_statistics_log, record_limit
from te_precision_callbacks.runs.run_files import FOLDER, Place
from te_precision_callbacks.runs.sink import RecordSink
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.resume import versions
from te_precision_callbacks.sinks.statistics_log import StatisticsLog
from te_precision_callbacks.sinks.step_records import Event, RunInfo, Scalars, Sink, StepRecords
from te_precision_callbacks.sinks.writer_thread import WriterThread


class Sinks:
    """The sinks of a run: its files, as the options select, and others. A failing sink is reported, closed and dropped.

    Attributes:
        log, records: None if switched off.
        skips_files: whether the files get no records, as on a rank without local values.
    """

    def __init__(self, context: RunContext, given_names: Mapping[str, str], others: Iterable[Sink]) -> None:
        options = context.options
        choice = read_statistics_log(options.statistics_log)
        limit = record_limit(options.records)
        self._on_all_ranks = choice.ranks == "all"
        self._context = context
        self._ranks = context.ranks
        self._log_dir = context.results.log_dir
        self.log = None if choice.ranks == "off" else StatisticsLog(given_names=given_names, limit=choice.limit)
        self.records = RecordSink(self._log_dir, limit) if limit else None
        files = self.log, self.records
        self._sinks: list[Sink] = [*(file for file in files if file is not None), *others]
        self._have_started = False
        self._is_closing = False
        self.skips_files = False
        self._early: list[Event | Scalars] = []

    def start(self, *, together: bool) -> None:
        """Start the sinks at the first step, when the iteration of a resumed run is known.

        Args:
            together: whether all ranks call this.
        """
        if self._have_started:
            return
        if together:
            self._agree_on_place()
        self._have_started = True
        context = self._context
        run = RunInfo(
            log_dir=self._log_dir,
            rank=own_rank(),
            world_size=world_size(),
            start_iteration=context.iteration,
            layers=context.results.layers,
            versions=dict(versions()),
            config=context.options.config.name,
        )
        self._each("starting", self._sinks, lambda sink: sink.start(run))
        early = self._early
        self._early = []
        for item in early:
            self.send(item)

    def send(self, item: Event | Scalars) -> None:
        """Send an event or the trainer's scalars to the sinks that accept them; queued until the sinks have started."""
        if not self._have_started:
            self._early.append(item)
            return
        method = "event" if isinstance(item, Event) else "scalars"
        takers = [sink for sink in self._sinks if hasattr(sink, method)]  # isinstance of a protocol is slow
        self._each("sending to", takers, lambda sink: getattr(sink, method)(item))

    def _drop(self, sink: Sink) -> None:
        self._sinks = [other for other in self._sinks if other is not sink]

    def write(self, records: StepRecords) -> None:
        skipped = (self.log, self.records) if self.skips_files else ()
        sinks = [sink for sink in self._sinks if sink not in skipped]
        self._each("writing records to", sinks, lambda sink: sink.write(records))

    def close(self, error: BaseException | None) -> None:
        self._is_closing = True
        self._each("closing", self._sinks if self._have_started else [], lambda sink: sink.close(error))

    def _each(self, doing: str, sinks: Iterable[Sink], call: Callable[[Sink], None]) -> None:
        failed: list[tuple[Sink, Exception]] = []
        for sink in sinks:
            try:
                call(sink)
            except Exception as error:
                self._drop(sink)
                if not self._is_closing:
                    with contextlib.suppress(Exception):  # the sink is known to fail
                        sink.close(error)
                failed.append((sink, error))
        for sink, failure in failed:
            self._context.failures.report(doing, type(sink).__name__, failure)

    # ------------------------------------------------------------------ files

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

    def _agree_on_place(self) -> None:
        """Agree with all ranks on the folder of the records; on failure, the run is not recorded."""
        ranks = self._ranks
        group = self._context.options.process_group
        with_rank_0 = ranks.several and (group is None or 0 in torch.distributed.get_process_group_ranks(group))
        records = self.records
        own: list[Place] = []
        if records is not None:
            records.writes_reduced = own_rank() == 0 or (ranks.several and ranks.leads)
            records.is_alone = not ranks.several
            if own_rank() == 0:
                try:
                    records.place = records.begin()
                    own.append(records.place)
                except Exception as error:
                    self._drop(records)
                    self.records = None
                    self._context.failures.report("recording", "the run", error)
        if with_rank_0:
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


def dump_events(written: Iterable[Header]) -> Iterator[Event]:
    for header in written:
        text = f"{header.layer} {header.tensor}, micro-batch {header.micro_batch}"
        yield Event("dump_written", text, header.iteration or 0, layer=header.layer, tensor=header.tensor)
