"""The engine and the recorder of a run, which measure and dump tensors for the features.

nvidia-dlfw-inspect makes its features anew at each start, without knowledge of the run. The namespace API
(``features/api.py``) holds the run's observation, a session's or that of plain nvidia-dlfw-inspect, for each feature.
"""

from __future__ import annotations

import abc
from collections.abc import Callable

import torch.distributed as dist

from te_precision_callbacks.base.ranks.messages import Messages
from te_precision_callbacks.base.ranks.tree import RanksLostError
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
        self._messages: Messages | None = None
        self.optimizer_steps: Callable[[], int] = lambda: NO_STAMP.optimizer_steps

    def meet(self, group: dist.ProcessGroup | None) -> None:
        """Meet the ranks that reduce together, if that was not done yet; all of them must call it."""
        messages = self._messages
        if messages is None or messages.group is not group:
            self.part()
            messages = self._messages = Messages(group, "statistics")
            self.engine.reduce_over(messages)
            try:
                messages.open("to reduce statistics")
            except RanksLostError as error:
                self.engine.on_failure("reducing", "statistics", error)

    def part(self) -> None:
        """End the messages to other ranks."""
        if self._messages is not None:
            self._messages.close()

    @abc.abstractmethod
    def deliver(self, measured: Measured, iteration: int) -> None:
        """Take the statistics of an iteration."""

    @abc.abstractmethod
    def end_step(self) -> None:
        """Called when nvidia-dlfw-inspect has ended a step."""

    @abc.abstractmethod
    def end(self) -> None:
        """Called when nvidia-dlfw-inspect ends."""
