"""Shared state of a run, which all its parts receive."""

from __future__ import annotations

from dataclasses import dataclass, field

from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.instrumentation.failures import ObservationFailures
from te_precision_callbacks.instrumentation.upstream import Inspector
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.session.results import RunResults
from te_precision_callbacks.sinks.step_records import Event


@dataclass
class LoopFacts:
    """Facts that an integration gives about the training loop; see :meth:`InspectSession.start`."""

    counts_from: int = 0
    front_door: str = "session"
    gives_way: bool = False


@dataclass(frozen=True)
class RunContext:
    """Shared state of a run.

    Attributes:
        notices: the messages that were logged once.
        inspector: nvidia-dlfw-inspect, which counts the debug iterations.
        events: a queue, which the run sends to the sinks and to the rules.
    """

    options: SessionOptions
    loop: LoopFacts
    results: RunResults
    failures: ObservationFailures
    ranks: Ranks
    inspector: Inspector
    notices: Notices = field(default_factory=Notices)
    events: list[Event] = field(default_factory=list)

    @property
    def iteration(self) -> int:
        return self.inspector.iteration

    def logging_step(self, iteration: int) -> int:
        return iteration + self.loop.counts_from

    def describe_step(self) -> str:
        iteration = self.iteration
        logged = "" if self.loop.front_door == "session" else f", step {self.logging_step(iteration)}"
        return f"debug iteration {iteration}{logged}"
