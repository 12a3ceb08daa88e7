"""The training loop of a session, as its front door describes it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass
class Loop:
    """The facts that a front door gives about the training loop.

    Attributes:
        trainer_steps: whether a trainer calls ``step``, so a missing call needs no warning.
        counts_from: the step under which iteration 0 is logged, unless ``step`` gets another one.
        front_door: what has started the session, for records: ``lightning``, ``accelerate``, ``transformers``.
        counts_batches: whether a call of ``step`` in each micro-batch is meant, as with ``step_on="batch"``.
        has_left: whether the loop has ended without stopping the session; None if it always stops it.
    """

    trainer_steps: bool = False
    counts_from: int = 0
    front_door: str = "session"
    counts_batches: bool = False
    has_left: Callable[[], bool] | None = None

    def was_left(self) -> bool:
        """Whether the loop has ended without stopping the session."""
        return self.has_left is not None and self.has_left()
