"""The receivers of a session's records: called in turn, closed if they fail, and named if they are slow."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.sinks.loggers import LoggerSink
from te_precision_callbacks.sinks.step_records import Event, EventSink, RunInfo, Scalars, Sink, StepRecords

logger = logging.getLogger(__name__)

SinkT = TypeVar("SinkT", bound=Sink)

SLOW_SHARE = 0.1
"""The share of the training time above which a sink counts as slow."""

_LEAST_WRITES, _LEAST_SECONDS = 10, 1.0
"""The number of writes and the seconds after which a sink is judged, so that chance does not decide."""


@dataclass
class _Time:
    writes: int = 0
    seconds: float = 0.0


class Sinks:
    """The sinks of a run. A sink that fails is reported, closed and dropped; the others go on.

    Args:
        sinks: in the order in which they are called.
        describe: gives the facts of the run; called at its first step, when a resumed run knows its iteration.
        failures: gets the failures of sinks.
    """

    def __init__(self, sinks: Iterable[Sink], describe: Callable[[], RunInfo], failures: ObservationFailures) -> None:
        self._sinks = list(sinks)
        # Asked once: it takes long to find whether an object has the methods of a protocol.
        self._takers: list[EventSink] = [sink for sink in self._sinks if isinstance(sink, EventSink)]
        self._describe = describe
        self._failures = failures
        self._begun = False
        self._to_start = list(self._sinks)
        self._to_close: list[Sink] | None = None
        self._times: dict[int, _Time] = {}
        self._since: float | None = None
        self._notices = Notices()
        self._records: StepRecords | None = None
        self._left: list[Sink] = []
        self._passed_over: list[Sink] = []
        self._early: list[Event | Scalars] = []

    def start(self) -> None:
        """Start all sinks, once; after an interruption, only sinks that were not started."""
        if self._to_start:
            self._begun = True
            run = self._describe()
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
            self._times[id(sink)] = _Time()
            self._since = time.perf_counter() if self._since is None else self._since
        else:
            spent.writes += 1
            spent.seconds += time.perf_counter() - begun

    def _name_slow(self) -> None:
        if self._since is None:
            return
        elapsed = time.perf_counter() - self._since
        for sink in self._sinks:
            spent = self._times.get(id(sink), _Time())
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
