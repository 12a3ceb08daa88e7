"""The engine and recorder of a run, which measure and dump tensors for features.

nvidia-dlfw-inspect constructs its features without a reference to the run; the namespace API (``features/api.py``)
gives each feature the observation of the run: a session's, or one of plain nvidia-dlfw-inspect.
"""

from __future__ import annotations

from collections.abc import Iterator

from te_precision_callbacks.dumps.recording import Recorder
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.reduction import NO_STAMP, Stamp
from te_precision_callbacks.statistics.schedule import Schedule, any_due, fingerprint
from te_precision_callbacks.statistics.series import Measured


class Observation:
    def __init__(self, engine: StatisticsEngine, recorder: Recorder) -> None:
        self.engine = engine
        self.recorder = recorder
        self.schedules: frozenset[Schedule] = frozenset()

    def plan(self, schedules: frozenset[Schedule]) -> None:
        self.schedules = schedules

    def is_due(self, iteration: int) -> bool:
        """Return whether an iteration is a collection step on any rank; equal on all ranks."""
        return any_due(self.schedules, iteration)

    def take(
        self,
        iteration: int,
        *,
        reduce: bool,
        optimizer_steps: int = NO_STAMP.optimizer_steps,
    ) -> Iterator[tuple[Measured, int]]:
        """Yield the statistics since the last call, if any, and their iteration.

        The engine keeps them until the caller has taken them, since Ctrl-C may interrupt any line.

        Args:
            iteration: the ending debug iteration.
            reduce: whether to reduce them over ranks; all ranks must then call this.
            optimizer_steps: the number of optimizer steps of this rank; negative if not counted.
        """
        engine = self.engine
        reduce = reduce and self.is_due(iteration)
        stamp = Stamp(iteration, fingerprint(self.schedules), optimizer_steps) if reduce else NO_STAMP
        if reduce or engine.has_news:
            iteration = engine.iteration if engine.has_news else iteration
            yield engine.collect(reduce=reduce, stamp=stamp), iteration
            engine.forget()
