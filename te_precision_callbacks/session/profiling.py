"""The profile of some iterations, which ``profile=`` asks for: ranges around layers, and torch's profiler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch.autograd.profiler import record_function

from te_precision_callbacks.base.errors import ObservationError
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.instrumentation.module_ranges import ModuleRanges
from te_precision_callbacks.instrumentation.profiler import StepProfiler, export
from te_precision_callbacks.options import ProfileChoice
from te_precision_callbacks.speed.trace.range_names import iteration_range

logger = logging.getLogger(__name__)


class Profiling:
    """Profiles the iterations of a choice, and writes their trace when the last one has ended.

    The iteration before the first one warms the profiler up. Where a profiler of the user's own runs, only the ranges
    are put, and its trace has them.

    Args:
        choice: which iterations, on which ranks; None for none.
        modules: the modules of the model, by name.
        put_ranges: puts ranges around the GEMMs of Transformer Engine, or takes them away.
        trace_file: the file of a trace, by its first and last iteration.
        notices: the messages that the run has logged once.
        report: receives failures.
    """

    def __init__(
        self,
        choice: ProfileChoice | None,
        modules: Callable[[], Iterable[tuple[str, torch.nn.Module]]],
        put_ranges: Callable[[bool], None],
        trace_file: Callable[[int, int], Path],
        notices: Notices,
        report: Callable[[str, str, BaseException], None],
    ) -> None:
        self._choice = choice if choice is not None and (choice.on_all_ranks or own_rank() == 0) else None
        self._modules = modules
        self._put_ranges = put_ranges
        self._trace_file = trace_file
        self._notices = notices
        self._report = report
        self._ranges = ModuleRanges()
        self._profiler: StepProfiler | None = None
        self._iteration: record_function | None = None
        self._profiled: list[int] = []

    def begin(self, iteration: int) -> None:
        """Begin an iteration; where no profile is due, this compares two numbers."""
        choice = self._choice
        if choice is None or not choice.first - 1 <= iteration <= choice.last:
            return
        self._guarded("starting", lambda: self._begin(choice, iteration))

    def end(self, iteration: int) -> None:
        """End an iteration, with its profile if it is the last one."""
        if self._iteration is not None:
            self._guarded("ending", lambda: self._end(iteration))

    def close(self) -> None:
        """End the profile, also before its last iteration; a trace of fewer iterations is written too."""
        self._choice = None
        self._guarded("ending", self._close)

    def _begin(self, choice: ProfileChoice, iteration: int) -> None:
        if iteration < choice.first:
            self._profiler = StepProfiler()
            if not self._profiler.warm_up():
                self._profiler = None
            return
        if self._iteration is not None:
            return
        if not self._profiled:
            self._put_ranges(True)
            self._ranges.put(self._modules())
            self._profiler = self._profiler or StepProfiler()
            if not self._profiler.start():
                self._say_other()
        self._profiled.append(iteration)
        self._iteration = record_function(iteration_range(iteration))
        self._iteration.__enter__()  # type: ignore[no-untyped-call]

    def _end(self, iteration: int) -> None:
        around, self._iteration = self._iteration, None
        if around is not None:
            around.__exit__(None, None, None)
        if self._choice is None or iteration >= self._choice.last:
            self.close()

    def _close(self) -> None:
        around, self._iteration = self._iteration, None
        profiler, self._profiler = self._profiler, None
        profiled, self._profiled = self._profiled, []
        try:
            if around is not None:
                around.__exit__(None, None, None)
            if profiled:
                self._ranges.remove()
                self._put_ranges(False)
        finally:
            profile = None if profiler is None else profiler.stop()
        if profiler is not None and profiler.given_up:
            self._say_other()
        if profile is not None:
            path = self._trace_file(profiled[0], profiled[-1])
            export(profile, path)
            logger.info("The profile of iterations %d to %d: %s", profiled[0], profiled[-1], path)

    def _say_other(self) -> None:
        if self._notices.first("profiler"):
            logger.warning(
                "profile=: another profiler of torch runs, so the session's own writes no trace: a process has one at a"
                " time. The ranges around layers are in the trace of the other one. For a trace by the session, leave"
                " the other profiler out."
            )

    def _guarded(self, doing: str, do: Callable[[], None]) -> None:
        """What does not reach training if it fails; after a failure no profile is due any more."""
        try:
            do()
        except ObservationError:
            raise
        except Exception as error:
            self._choice = None
            if self._profiler is not None or self._iteration is not None or self._profiled:
                self._guarded("ending", self._close)
            self._report(doing, "a profile", error)
