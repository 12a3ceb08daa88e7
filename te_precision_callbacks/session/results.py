"""The results of a run, readable during the run and after it."""

from __future__ import annotations

import copy
import logging
import multiprocessing
import os
import pickle
import shutil
import tempfile
import weakref
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from te_precision_callbacks.base.spans import AnyIteration, Iterations
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

logger = logging.getLogger(__name__)


class Layers(AnyIteration[LayerInfo]):
    """Every layer of a model that can be observed, and what the config does with it.

    session.layers              # now
    session.layers(at=120)      # in iteration 120, with the span of iterations in which it did
    """


class LayerHistory:
    """The layers of a run, by iteration. Few iterations change them, so each change keeps all layers.

    Args:
        iterations: those that have run.

    Attributes:
        changes: how often layers were put.
    """

    def __init__(self, iterations: Iterations) -> None:
        self.changes = 0
        self._iterations = iterations
        self._since: list[int] = []
        self._layers: list[tuple[LayerInfo, ...]] = []

    @property
    def now(self) -> Layers:
        """The present ones."""
        return Layers(self._layers[-1] if self._layers else (), self.at)

    def put(self, iteration: int, layers: Iterable[LayerInfo]) -> None:
        """Let layers be those of an iteration and of the following ones, until others are put."""
        self.changes += 1
        while self._since and self._since[-1] >= iteration:
            del self._since[-1], self._layers[-1]
        before = {info.name: info for info in self.now}
        self._since.append(iteration)
        self._layers.append(tuple(_since(iteration, info, before.get(info.name)) for info in layers))

    def go_to(self, iteration: int) -> None:
        """Let the present layers hold from another iteration on, with which a run goes on."""
        if self._since:
            layers = self.now
            if self._since[-1] not in self._iterations:
                del self._since[-1], self._layers[-1]
            self.put(iteration, layers)

    def spans(self) -> list[LayerInfo]:
        """All layers that there were, each as often as it was another, with the iterations in which it was so."""
        found: dict[tuple[str, int], LayerInfo] = {}
        for number, layers in enumerate(self._layers):
            later = list(zip(self._since[number + 1 :], self._layers[number + 1 :], strict=True))
            for info in layers:
                found.setdefault((info.name, info.since), replace(info, until=_until(info, later)))
        return list(found.values())

    def at(self, iteration: int) -> tuple[LayerInfo, ...]:
        """The layers in an iteration. Raises IterationError where it has not run."""
        self._iterations.require("layers", iteration)
        number = bisect_right(self._since, iteration)
        later = list(zip(self._since[number:], self._layers[number:], strict=True))
        return tuple(replace(info, until=_until(info, later)) for info in self._layers[number - 1])


def _since(iteration: int, info: LayerInfo, before: LayerInfo | None) -> LayerInfo:
    """A layer with the iteration since which it is as it is."""
    lasts = before is not None and replace(info, since=before.since) == before
    return before if before is not None and lasts else replace(info, since=iteration)


def _until(info: LayerInfo, later: Iterable[tuple[int, tuple[LayerInfo, ...]]]) -> int | None:
    """The last iteration in which a layer was as it is, by the changes behind it."""
    return next((since - 1 for since, layers in later if info not in layers), None)


@dataclass
class RunResults:
    """The results of a run, as its parts write them.

    Attributes:
        log_dir: the folder of the session's files.
        iteration: the current debug iteration; after the end, the first iteration that was not run.
        started_at: the place in the script that started the session; empty before the start.
        iterations: those that have run.
        layers: every layer of the model that can be observed, and what the config does with it, and did.
        unconverted: layers that a trainer left without Transformer Engine: name -> why.
        filters_loss: whether the trainer leaves inf and nan out of the loss that it logs.
        expects_low: why a trainer's settings let products be expected in low precision; empty if they do not.
        not_measured: what LogGemmError does not measure: (layer, GEMM) -> why.
        never_due: which features of the config the whole run has not reached, in words; empty before its end.
        changes_precision: whether a feature in the config can change what a GEMM gets.
        audit: the precision in which each GEMM really ran.
        coverage: the matrix products of the model.
        series: the series of the numbers.
        statistics: the last and the worst numbers.
        resume: the result of the audit of a resume; None without one.
        diagnosis: the rules, and what they have found.
        whole_run: the verdict on a resumed run with its earlier starts; None before its end, and for other runs.
        scales_loss: whether a GradScaler has stepped an optimizer of the model.
        adds_eps: whether an optimizer that has stepped the model adds ``eps`` as Adam does; None before the first step.
    """

    log_dir: Path
    iteration: int
    started_at: str = ""
    iterations: Iterations = field(default_factory=Iterations)
    layers: LayerHistory = field(init=False)
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
        self.layers = LayerHistory(self.iterations)
        self.audit = PrecisionAudit(self.iterations)
        self.statistics = RunStatistics(self.series)

    def coverage_at(self, iteration: int) -> Coverage:
        """This rank's matrix products of an iteration. Raises IterationError where it has not run."""
        last = iteration if self.iterations.last is None else self.iterations.last
        return self.coverage.at(iteration, last, self.audit.at(iteration), self.unconverted)

    def other_steps(self) -> list[OtherSteps]:
        """The steps in which the matrix products ran in another precision than in the last one."""
        if len(self.coverage.spans()) < 2 and not self.audit.has_changed:
            return []  # as in most runs, of which thousands of layers need not be gone through
        return other_steps(self.coverage.by_span(self.audit.spans(), self.unconverted))


class Results:
    """The results of a run, readable during the run and after it.

    Args:
        results: the results of the run.
    """

    def __init__(self, results: RunResults) -> None:
        self._results = results

    @property
    def iteration(self) -> int:
        """The current debug iteration, counted from 0. After the end: the first iteration that was not run."""
        return self._results.iteration

    @property
    def log_dir(self) -> Path:
        """The folder of the session's files."""
        return self._results.log_dir

    @property
    def layers(self) -> Layers:
        """Every layer of the model that can be observed, and what the config does with it now.
        ``session.layers(at=120)`` gives what it did in one iteration, and raises a LookupError if that has not run."""
        return self._results.layers.now

    @property
    def unconverted(self) -> Mapping[str, str]:
        """Layers that a trainer left without Transformer Engine, name -> why. A front door sets it after the start."""
        return self._results.unconverted

    @property
    def not_measured(self) -> Mapping[tuple[str, str], str]:
        """What LogGemmError does not measure so far on this rank: (layer, GEMM) -> why."""
        return self._results.not_measured

    @property
    def precision(self) -> Precision:
        """The precision in which each GEMM has really run so far. ``session.precision(at=120)`` gives the precision of
        one iteration, and raises a LookupError if that has not run."""
        return Precision(self._results.audit, self._results.audit.at)

    def coverage(self, at: int | None = None) -> Coverage:
        """Every matrix product of the model in a step: its multiply-adds, its precision, and why that is not low.

        The products and their sizes are those of the iteration, with all of its micro-batches, and so is the precision
        of Transformer Engine's layers. Where ranks reduce together, layers that
        exist only on other ranks, as in a pipeline, come last, as they ran in the first step.

        Args:
            at: a debug iteration; None for the last one.

        Raises:
            IterationError: the iteration has not run under this session; a LookupError.
        """
        results = self._results
        iteration = results.audit.last if at is None else at
        if iteration is None:
            return NOTHING
        own = results.coverage_at(iteration)
        return Coverage((*own, *results.coverage.of_other_ranks), state=own.state, steps=own.steps)

    @property
    def resume_report(self) -> ResumeReport | None:
        """What differs from the checkpoint that the run was resumed from. None before the first step after a resume,
        and for a checkpoint without a fingerprint."""
        return self._results.resume

    @property
    def findings(self) -> Verdict:
        """What is wrong with the run so far, by the rules of ``te-precision rules``: iterating gives the findings,
        root causes first. After the end of a resumed run it is on the whole run, as recorded."""
        whole_run = self._results.whole_run
        return self._results.diagnosis.verdict if whole_run is None else whole_run

    @property
    def healthy(self) -> bool:
        """Whether no problems were found so far, and enough was checked to say so; ``findings.state`` has all three
        states."""
        return self.findings.healthy

    @property
    def last_statistics(self) -> tuple[Row, ...]:
        """The last value of each statistic."""
        return tuple(self._results.statistics.last())

    @property
    def worst_statistics(self) -> tuple[Worst, ...]:
        """The worst value so far, and its iteration, of each statistic that has a worse direction in the table of
        docs/statistics.md. Delayed scaling's first step is left out, see ``StepRecords.unscaled``."""
        return tuple(self._results.statistics.worst())


class SessionOutcome(Results):
    """The results of a session that ran in another process, with the same names as in ``InspectSession``; of rank 0.

    Lightning's ``ddp_spawn`` and ``ddp_fork`` strategies fit in child processes, each with a copy of the callback. The
    copy of rank 0 leaves the results of its session in a :class:`Mailbox`, where the callback reads them.
    """

    @property
    def running(self) -> bool:
        """Whether the session is running: never."""
        return False

    @classmethod
    def of(cls, session: Results) -> SessionOutcome:
        """The outcome of a session so far; it does not change when the session goes on."""
        findings = copy.deepcopy(session._results)
        findings.iteration = session.iteration
        return cls(findings)


class Mailbox:
    """A file in which copies of an object, pickled or forked into child processes, leave it an outcome.

    It is unpickled, so it lies in a folder that no other user can write to.
    """

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._path = Path(tempfile.mkdtemp(prefix="te_precision_outcome_")) / "outcome.pickle"
        weakref.finalize(self, _remove, self._path, self._owner)

    @property
    def in_child(self) -> bool:
        """Whether this process was started by the one that made the mailbox."""
        parent = multiprocessing.parent_process()
        return parent is not None and parent.pid == self._owner

    def put(self, outcome: SessionOutcome) -> None:
        """Leave an outcome; a failure is logged, since a fit has just ended."""
        try:
            written = self._path.with_suffix(".part")
            written.write_bytes(pickle.dumps(outcome))
            written.replace(self._path)
        except Exception as error:
            logger.warning(
                "callback.session cannot be returned to the process that called fit(): %s."
                " The files in log_dir have the same.",
                error,
            )

    def take(self) -> SessionOutcome | None:
        """The outcome that was left since the last call; None if there is none."""
        try:
            outcome: SessionOutcome = pickle.loads(self._path.read_bytes())
        except FileNotFoundError:
            return None
        self._path.unlink()
        return outcome


def _remove(path: Path, owner: int) -> None:
    if os.getpid() == owner:  # not at the end of a forked child
        shutil.rmtree(path.parent, ignore_errors=True)
