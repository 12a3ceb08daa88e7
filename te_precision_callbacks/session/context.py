"""Shared state and results of a run, which all its parts receive."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks.together import Ranks
from te_precision_callbacks.coverage.coverage import NOTHING, Coverage
from te_precision_callbacks.coverage.history import CoverageHistory
from te_precision_callbacks.coverage.spans import Iterations
from te_precision_callbacks.coverage.step_table import StepTable
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.options import SessionOptions
from te_precision_callbacks.runs.fingerprints import ResumeReport
from te_precision_callbacks.sinks.metrics import RunStatistics
from te_precision_callbacks.sinks.step_records import Event, LayerInfo, Scalars
from te_precision_callbacks.statistics.series import SeriesTable

if TYPE_CHECKING:
    from te_precision_callbacks.instrumentation.upstream import Inspector


class RunResults:
    """The results of a run, which its parts write and the session shows.

    Attributes:
        started_at: the line of the script that started the session; empty before the start.
        counts_from, integration, gives_way: see :meth:`InspectSession.start`.
        filters_loss: whether the trainer filters inf and nan from the loss that it logs.
        expects_low: the setting of the trainer that selects low precision.
        whole_run: the verdict on a resumed run including its earlier starts; None before the end, and for other runs.
        scales_loss: whether a GradScaler has stepped an optimizer of the model.
        takes_turns: whether optimizers step in turn, each after its own backward.
        adds_eps: whether an optimizer of the model adds ``eps`` as Adam does; None before the first step.
    """

    def __init__(self, log_dir: Path, iteration: int) -> None:
        self.log_dir = log_dir
        self.iteration = iteration
        self.started_at = ""
        self.counts_from = 0
        self.integration = "session"
        self.gives_way = False
        self.iterations = Iterations()
        self.layers: tuple[LayerInfo, ...] = ()
        self.expects_low = ""
        self.filters_loss = False
        self.table = StepTable(self.iterations)
        self.coverage = CoverageHistory(self.table)
        self.series = SeriesTable()
        self.statistics = RunStatistics(self.series)
        self.resume: ResumeReport | None = None
        self.diagnosis = Diagnosis()
        self.whole_run: Verdict | None = None
        self.scales_loss = False
        self.takes_turns = False
        self.adds_eps: bool | None = None

    def coverage_at(self, iteration: int) -> Coverage:
        """Return this rank's matrix products of an iteration.

        Raises:
            IterationError: the iteration has not run.
        """
        self.table.write()
        self.iterations.require("coverage", iteration)
        last = iteration if self.iterations.last is None else self.iterations.last
        return self.coverage.at(iteration, last)

    def coverage_with_other_ranks(self, iteration: int | None) -> Coverage:
        """Return :meth:`InspectSession.coverage` of an iteration; None for the last iteration."""
        iteration = self.table.history.iterations.last if iteration is None else iteration
        if iteration is None:
            return NOTHING
        rank_coverage = self.coverage_at(iteration)
        return Coverage(
            (*rank_coverage, *self.coverage.other_ranks_products), state=rank_coverage.state, steps=rank_coverage.steps
        )

    @property
    def findings(self) -> Verdict:
        if self.whole_run is None:
            return self.diagnosis.verdict
        return self.whole_run


@dataclass(frozen=True)
class RunContext:
    """Shared state of a run.

    Attributes:
        inspector: nvidia-dlfw-inspect, which counts the debug iterations.
        events: queue that the run sends to the sinks and to the rules.
    """

    options: SessionOptions
    results: RunResults
    failures: ObservationFailures
    ranks: Ranks
    inspector: Inspector
    notices: Notices = field(default_factory=Notices)
    events: list[Event | Scalars] = field(default_factory=list)

    @property
    def iteration(self) -> int:
        return self.inspector.iteration

    def note_unobserved(self, text: str) -> None:
        self.events.append(Event("observation_failed", text, self.iteration, "warning"))

    def logging_step(self, iteration: int) -> int:
        return iteration + self.results.counts_from

    def describe_step(self) -> str:
        iteration = self.iteration
        logged = "" if self.results.integration == "session" else f", step {self.logging_step(iteration)}"
        return f"debug iteration {iteration}{logged}"
