"""The engine and the recorder of a run, which measure and dump tensors for the features.

nvidia-dlfw-inspect makes its features anew at each start, without knowledge of the run. The namespace API
(``features/api.py``) holds the run's observation, a session's or that of plain nvidia-dlfw-inspect, for each feature.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

from te_precision_callbacks.dumps.recording import Recorder
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.engine.reduction import NO_STAMP
from te_precision_callbacks.statistics.series import Measured


class Observation(abc.ABC):
    """The statistics and the dumps of a run.

    Attributes:
        engine: measures the tensors that statistics features note.
        recorder: writes the tensors that DumpTensors notes.
        reduce: whether a step reduces the statistics over ranks.
        optimizer_steps: how many optimizer steps this rank has done; negative where nobody counts them.
    """

    def __init__(self, engine: StatisticsEngine, recorder: Recorder, *, reduce: bool = True) -> None:
        self.engine = engine
        self.recorder = recorder
        self.reduce = reduce
        self.optimizer_steps: Callable[[], int] = lambda: NO_STAMP.optimizer_steps

    @abc.abstractmethod
    def deliver(self, measured: Measured, iteration: int) -> None:
        """Take the statistics of an iteration."""

    @abc.abstractmethod
    def end_step(self) -> None:
        """Called when nvidia-dlfw-inspect has ended a step."""

    @abc.abstractmethod
    def end(self) -> None:
        """Called when nvidia-dlfw-inspect ends."""
