"""The results of a run, readable during the run and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from te_precision_callbacks.base.spans import Iterations
from te_precision_callbacks.coverage.coverage import NOTHING, Coverage
from te_precision_callbacks.coverage.gemm_precision import Precision
from te_precision_callbacks.coverage.history import CoverageHistory
from te_precision_callbacks.coverage.other_steps import OtherSteps, other_steps
from te_precision_callbacks.coverage.precision_audit import PrecisionAudit
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.finding import Verdict
from te_precision_callbacks.runs.fingerprints import ResumeReport
from te_precision_callbacks.sinks.step_records import LayerInfo, Row
from te_precision_callbacks.sinks.worst import RunStatistics, Worst
from te_precision_callbacks.statistics.series import SeriesTable


@dataclass
class RunResults:
    """The results of a run, written by its parts. :class:`Results` describes what users see of them.

    Attributes:
        started_at: the place in the script that started the session; empty before the start.
        filters_loss: whether the trainer filters inf and nan from the loss that it logs.
        expects_low: the setting of the trainer that asks for low precision.
        never_due: a message about features that never acted; empty before the end.
        changes_precision: whether a feature in the config can change the precision of a GEMM.
        whole_run: the verdict on a resumed run with its earlier starts; None before its end, and for other runs.
        scales_loss: whether a GradScaler has stepped an optimizer of the model.
        adds_eps: whether an optimizer of the model adds ``eps`` as Adam does; None before the first step.
    """

    log_dir: Path
    iteration: int
    started_at: str = ""
    iterations: Iterations = field(default_factory=Iterations)
    layers: tuple[LayerInfo, ...] = ()
    unconverted: Mapping[str, str] = field(default_factory=dict)
    expects_low: str = ""
    filters_loss: bool = False
    not_measured: Mapping[tuple[str, str], str] = field(default_factory=dict)
    never_due: str = ""
    changes_precision: bool = False
    audit: PrecisionAudit = field(init=False)
    coverage: CoverageHistory = field(default_factory=CoverageHistory)
    series: SeriesTable = field(default_factory=SeriesTable)
    statistics: RunStatistics = field(init=False)
    resume: ResumeReport | None = None
    diagnosis: Diagnosis = field(default_factory=Diagnosis)
    whole_run: Verdict | None = None
    scales_loss: bool = False
    adds_eps: bool | None = None

    def __post_init__(self) -> None:
        self.audit = PrecisionAudit(self.iterations)
        self.statistics = RunStatistics(self.series)

    def coverage_at(self, iteration: int) -> Coverage:
        """This rank's matrix products of an iteration. Raises IterationError if it has not run."""
        last = iteration if self.iterations.last is None else self.iterations.last
        return self.coverage.at(iteration, last, self.audit.history.at(iteration), self.unconverted)

    def other_steps(self) -> list[OtherSteps]:
        if len(self.coverage.spans()) < 2 and not self.audit.history.has_changed:
            return []  # as in most runs, of which thousands of layers need not be gone through
        return other_steps(self.coverage.by_span(self.audit.history.spans(), self.unconverted))


class Results:
    """The results of a run, readable during the run and after it."""

    def __init__(self, results: RunResults) -> None:
        self._results = results

    @property
    def iteration(self) -> int:
        """The current debug iteration, counted from 0. After the end: the first iteration that did not run."""
        return self._results.iteration

    @property
    def log_dir(self) -> Path:
        """The folder of the session's files."""
        return self._results.log_dir

    @property
    def layers(self) -> tuple[LayerInfo, ...]:
        """Every observable layer of the model, and its features."""
        return self._results.layers

    @property
    def unconverted(self) -> Mapping[str, str]:
        """Layers that a trainer left without Transformer Engine: name -> reason."""
        return self._results.unconverted

    @property
    def not_measured(self) -> Mapping[tuple[str, str], str]:
        """GEMMs that LogGemmError does not measure on this rank: (layer, GEMM) -> reason."""
        return self._results.not_measured

    @property
    def precision(self) -> Precision:
        """The precision of each GEMM so far. ``session.precision(at=120)`` gives the precision of one
        iteration, and raises a LookupError if that has not run.
        """
        history = self._results.audit.history
        return Precision(history.whole(), history.at)

    def coverage(self, at: int | None = None) -> Coverage:
        """Return every matrix product of the model in a step: its multiply-adds, its precision, and the reason for high
        precision.

        If ranks reduce together, layers of other ranks, as in a pipeline, come last, as they ran in the first step.

        Args:
            at: a debug iteration; None for the last one.

        Raises:
            IterationError: the iteration has not run under this session; a LookupError.
        """
        results = self._results
        iteration = results.audit.history.last if at is None else at
        if iteration is None:
            return NOTHING
        own = results.coverage_at(iteration)
        return Coverage((*own, *results.coverage.of_other_ranks), state=own.state, steps=own.steps)

    @property
    def resume_report(self) -> ResumeReport | None:
        """Differences from the checkpoint of a resumed run. None before the first step, and without a fingerprint."""
        return self._results.resume

    @property
    def findings(self) -> Verdict:
        """The findings so far, root causes first; ``te-precision rules`` explains them. After the end of a resumed run
        they cover the whole recorded run.
        """
        whole_run = self._results.whole_run
        return self._results.diagnosis.verdict if whole_run is None else whole_run

    @property
    def healthy(self) -> bool:
        """Return whether no problems were found and enough was checked; ``findings.state`` has three states."""
        return self.findings.healthy

    @property
    def last_statistics(self) -> tuple[Row, ...]:
        """The last value of each statistic."""
        return tuple(self._results.statistics.last())

    @property
    def worst_statistics(self) -> tuple[Worst, ...]:
        """The worst value of each statistic with a worse direction (docs/statistics.md), and its iteration. The first
        step of delayed scaling is excluded, see ``StepRecords.unscaled``.
        """
        return tuple(self._results.statistics.worst())
