"""Collects the records of a step, and delivers them and events to the sinks, among them the run's files.

The files are the statistics log and the records.
"""

from __future__ import annotations

import contextlib
import logging
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.ranks import has_other_ranks, own_rank, world_size
from te_precision_callbacks.base.ranks.meeting import next_keys, shared_store
from te_precision_callbacks.base.scalars import ScalarBuffer
from te_precision_callbacks.dumps.contents import Header
from te_precision_callbacks.observation import Observation
from te_precision_callbacks.options import read_statistics_log, record_limit
from te_precision_callbacks.runs.run_files import FOLDER, Place
from te_precision_callbacks.runs.sink import RecordSink
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.session.resume import versions
from te_precision_callbacks.sinks.statistics_log import StatisticsLog
from te_precision_callbacks.sinks.step_records import Event, RunInfo, Scalars, Sink, StepRecords
from te_precision_callbacks.sinks.writer_thread import WriterThread
from te_precision_callbacks.statistics.series import Measured, parse_log_name

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EndingStep:
    """A step that is ending.

    Attributes:
        begun: ``time.perf_counter()`` when the end of the step began.
        is_remainder: whether this is not a complete step, but the remainder at the stop of the session.
    """

    iteration: int
    logging_step: int
    begun: float = field(default_factory=time.perf_counter)
    is_remainder: bool = False


class StepCollector:
    """Collects at the end of a step: reduces the statistics over the ranks, and makes the step's records."""

    def __init__(
        self,
        context: RunContext,
        observation: Observation,
        scalars: ScalarBuffer,
        model: ObservedModel,
    ) -> None:
        self._context = context
        self._observation = observation
        self._scalars = scalars
        self._model = model
        self._measured: Measured | None = None
        self._is_local = False

    def reduce(self, ending: EndingStep, optimizer_steps: int) -> None:
        """Reduce the statistics, and begin the next iteration; after a failure, the statistics are local."""
        context = self._context
        try:
            has_ranks = context.ranks.several
            for measured, _ in self._observation.take(
                ending.iteration, reduce=has_ranks, optimizer_steps=optimizer_steps
            ):
                self._measured = measured
            context.inspector.step()
        except ObservationError:
            raise
        except Exception as error:
            context.ranks.leave(error)
            context.failures.report("gathering the statistics of", f"iteration {ending.iteration}", error)
            context.inspector.iteration = ending.iteration + 1  # inspector.step() may have failed before counting
            self.collect_local()

    def collect_local(self) -> None:
        """Collect this rank's statistics, unless the statistics of the step were already collected."""
        context = self._context
        has_reduced = bool(self._measured)
        try:
            for measured, _ in self._observation.take(context.iteration, reduce=False):
                if not has_reduced:
                    self._measured = measured
            context.inspector.log_local_buffers()
        except Exception as error:
            logger.error("The statistics collected since the last step cannot be read and are lost.", exc_info=error)
        self._is_local = not has_reduced and context.ranks.several

    def read(self, ending: EndingStep) -> StepRecords | None:
        """Return the records of the step, if it has any, and begin the next step."""
        results = self._context.results
        ranks = self._context.ranks
        table = results.series
        try:
            names = [name for name, _ in self._scalars.entries]
            if not self._measured and not names:
                return None
            measured = self._measured or Measured(table, np.empty(0, np.int32), np.empty(0))
            local = self._is_local or measured.local
            named_series = [table.intern(*parse_log_name(name, self._model.layers.names)) for name in names]
            series = np.concatenate([measured.series, np.array(named_series, np.int32)])
            numbers = np.concatenate([measured.values, self._scalars.read()])
        except Exception as error:
            self._context.failures.report("reading the statistics of", f"iteration {ending.iteration}", error)
            return None
        finally:
            self._measured = None
            self._is_local = False
            self._scalars.clear()
        # When ranks are disconnected, sinks get the first rank's values; at the end, each rank writes its remainder.
        left_to_first = local and not ending.is_remainder and not ranks.leads
        reduced = len(series) - len(named_series) if left_to_first or (ranks.several and not local) else 0
        layers = (table[number].layer for number in series.tolist())
        records = StepRecords(
            iteration=ending.iteration,
            logging_step=ending.logging_step,
            table=table,
            series=series,
            values=array("d", numbers.tobytes()),
            histograms=measured.histograms,
            local=local,
            own=[False] * reduced + [True] * (len(series) - reduced),
            unscaled=self._model.hooks.answers.delayed_scaling.unscaled(
                ending.iteration, self._model.layers.modules, layers
            ),
            observe_seconds=time.perf_counter() - ending.begun,
        )
        results.statistics.add(records)
        return records


class Sinks:
    """The sinks of a run: its files, as the options select, and others. A failing sink is reported, closed and dropped.

    Attributes:
        log, records: None if switched off.
        skips_files: whether the files get no records, as on a rank without local values.
    """

    def __init__(self, context: RunContext, given_names: Mapping[str, str], user_sinks: Iterable[Sink]) -> None:
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
        self._sinks: list[Sink] = [*(file for file in files if file is not None), *user_sinks]
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
        rank_places: list[Place] = []
        if records is not None:
            records.writes_reduced = own_rank() == 0 or (ranks.several and ranks.leads)
            records.is_alone = not ranks.several
            if own_rank() == 0:
                try:
                    records.place = records.begin()
                    rank_places.append(records.place)
                except Exception as error:
                    self._drop(records)
                    self.records = None
                    self._context.failures.report("recording", "the run", error)
        if with_rank_0:
            agreed = ranks.pool(rank_places, "place of the records", Place)
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
