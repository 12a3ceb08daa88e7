"""The profile of ``profile=``: ranges around layers, and torch's profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.autograd.profiler import record_function

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.instrumentation.forward import ForwardHooks
from te_precision_callbacks.instrumentation.profiler import ModuleRanges, StepProfiler, export
from te_precision_callbacks.options import ProfileChoice, read_profile
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.delivery import RunFiles
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.speed.trace.range_names import iteration_range, unended_range

logger = logging.getLogger(__name__)


class Profiling:
    """Profiles the iterations of ``profile=``, and writes a trace after the last one.

    The profiler warms up in the iteration before the first. If the user's own profiler runs, the session only adds
    ranges to its trace.
    """

    def __init__(self, context: RunContext, model: ObservedModel, hooks: ForwardHooks, files: RunFiles) -> None:
        choice = read_profile(context.options.profile)
        self.trace: Path | None = None
        self._choice = choice if choice is not None and (choice.on_all_ranks or own_rank() == 0) else None
        self._asked = self._choice
        self._context = context
        self._model = model
        self._hooks = hooks
        self._files = files
        self._ranges = ModuleRanges()
        self._profiler: StepProfiler | None = None
        self._running: tuple[int, record_function] | None = None
        self._has_ranges = False
        self._ended: list[int] = []
        self._stopped: Any = None

    def begin(self, iteration: int) -> None:
        """Begin an iteration; cheap if no profile is due."""
        choice = self._choice
        if choice is None or not choice.first - 1 <= iteration <= choice.last:
            return
        self._guarded("starting", lambda: self._begin(choice, iteration))

    def end(self, iteration: int) -> None:
        """End an iteration; the last one stops the profiler, and :meth:`write` then writes the trace."""
        if self._running is not None:
            self._guarded("ending", lambda: self._end(iteration))

    def write(self) -> None:
        """Write the trace of a stopped profile; the folder of the records must be known."""
        if self._stopped is not None:
            self._guarded("writing", self._write)

    def close(self, iteration: int) -> None:
        self._choice = None
        self._guarded("ending", self._stop)
        self.write()
        self._warn_of_missing(iteration)

    def _begin(self, choice: ProfileChoice, iteration: int) -> None:
        if iteration < choice.first:
            if self._profiler is None and (profiler := StepProfiler()).warm_up():
                self._profiler = profiler
            return
        if self._running is not None and self._running[0] == iteration:
            return
        self._leave()  # an iteration whose number a resume has changed
        if not self._has_ranges:
            self._has_ranges = True
            self._hooks.set_ranges(enabled=True)
            self._ranges.put(self._model.named_modules())
            self._profiler = self._profiler or StepProfiler()
            if not self._profiler.start():
                self._warn_of_other_profiler()
        around = record_function(iteration_range(iteration))
        self._running = iteration, around
        around.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, iteration: int) -> None:
        self._leave(iteration)
        if self._choice is None or iteration >= self._choice.last:
            self._choice = None
            self._stop()

    def _leave(self, ending: int | None = None) -> None:
        running = self._running
        self._running = None
        if running is None:
            return
        iteration, around = running
        around.__exit__(None, None, None)
        if iteration == ending:
            self._ended.append(iteration)
        else:
            with record_function(unended_range(iteration)):
                pass

    def _stop(self) -> None:
        profiler = self._profiler
        self._profiler = None
        try:
            self._leave()
            if self._has_ranges:
                self._has_ranges = False
                self._ranges.remove()
                self._hooks.set_ranges(enabled=False)
        finally:
            profile = None if profiler is None else profiler.stop()
        if profiler is not None and profiler.given_up:
            self._warn_of_other_profiler()
        self._stopped = profile if self._ended else None

    def _write(self) -> None:
        profile = self._stopped
        self._stopped = None
        path = self._files.trace_file(self._ended[0], self._ended[-1])
        export(profile, path)
        self.trace = path
        logger.info("The profile of iterations %d to %d: %s", self._ended[0], self._ended[-1], path)

    def _warn_of_missing(self, iteration: int) -> None:
        asked = self._asked
        self._asked = None
        if asked is None or own_rank() != 0:
            return
        wanted = asked.last - asked.first + 1
        ran = len(self._ended)
        if ran < wanted:
            over = f"ended before iteration {iteration}" if iteration <= asked.last else "started later"
            self._warn(
                f"profile= asked for {_iterations(asked.first, asked.last)}, of which {ran or 'none'} ran: the run"
                f" {over}. Iterations start at 0."
            )

    def _warn_of_other_profiler(self) -> None:
        if self._context.notices.first("profiler"):
            self._warn(
                "profile=: another torch profiler is running, so the session writes no trace. The ranges of layers"
                " are in the other profiler's trace. For a trace by the session, remove the other profiler."
            )

    def _warn(self, text: str) -> None:
        logger.warning("%s", text)
        self._context.events.append(Event("profile", text, self._context.iteration, "warning"))

    def _guarded(self, doing: str, do: Callable[[], None]) -> None:
        try:
            do()
        except ObservationError:
            raise
        except Exception as error:
            self._choice = None
            self._asked = None
            self._stopped = None
            if self._profiler is not None or self._running is not None or self._has_ranges:
                self._guarded("ending", self._stop)
            self._context.failures.report(doing, "a profile", error)


def _iterations(first: int, last: int) -> str:
    if first == last:
        return f"iteration {first}"
    return f"iterations {first} to {last}"
