"""The diagnosis of a run while it goes on: each step's numbers are judged on the host, when they are there anyway."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from te_precision_callbacks.base.ranks import own_rank, world_size
from te_precision_callbacks.coverage.parallel import Ranks
from te_precision_callbacks.diagnosis.engine import Diagnosis
from te_precision_callbacks.diagnosis.facts import Facts, Settings
from te_precision_callbacks.diagnosis.finding import Finding
from te_precision_callbacks.diagnosis.numbers import Splitter
from te_precision_callbacks.diagnosis.reaction import OnFinding, PrecisionFindingError, reads_stop
from te_precision_callbacks.runs.recording import Facts as RecordedFacts
from te_precision_callbacks.sinks.step_records import Event, Scalars, StepRecords
from te_precision_callbacks.statistics.series import SeriesTable

logger = logging.getLogger(__name__)


class LiveDiagnosis:
    """Judges the steps of a run, warns of each finding once, and stops the run if that is wanted.

    Args:
        diagnosis: the rules.
        table: the series of the run.
        ranks: those that reduce together.
        on_finding: what happens when something is found.
        tell: receives events.
        report: receives failures of a user's function.
    """

    def __init__(
        self,
        diagnosis: Diagnosis,
        table: SeriesTable,
        ranks: Ranks,
        on_finding: OnFinding,
        tell: Callable[[Event], None],
        report: Callable[[str, str, Exception], None],
    ) -> None:
        self._diagnosis = diagnosis
        self._splitter = Splitter(table.__getitem__)
        self._ranks = ranks
        self._on_finding = on_finding
        self._stops = reads_stop(on_finding)
        self._tell = tell
        self._report = report
        self._stopping: list[Finding] = []

    def know(self, facts: RecordedFacts, iteration: int) -> None:
        """Judge the facts of the run, which have changed."""
        known = Facts.from_tables(facts.tables, iteration, Settings.from_run(facts.run))
        self._react(self._diagnosis.know(known, iteration), iteration)

    def take(self, scalars: Scalars) -> None:
        """Judge numbers that the trainer logs. Those of rank 0 are recorded; a finding in those of another rank names
        that rank, and is recorded as it is."""
        self._react(self._diagnosis.scalars(scalars.iteration, scalars.values, own_rank() or None), scalars.iteration)

    def event(self, event: Event) -> None:
        """Check an event of the run. Only what is wrong with parameters was not reported when it happened."""
        found = self._diagnosis.event(event, None if event.data.get("of_all") else own_rank() or None)
        if event.kind == "parameters":
            self._react(found, event.iteration)

    def judge(self, records: StepRecords) -> StepRecords:
        """Judge the numbers of a step, and give its records with the number of findings so far."""
        values = np.frombuffer(records.values)
        rank = own_rank() if world_size() > 1 and all(records.own) else None
        numbers = self._splitter.step(records.iteration, records.series, values, records.unscaled, rank)
        self._react(self._diagnosis.step(numbers), records.iteration)
        counts = self._diagnosis.problems
        return replace(records, findings=counts) if counts else records

    def stop_if_wanted(self) -> None:
        """Stop the run on all ranks together, if a finding of one of them demands it. All of them then name the first
        finding that one rank alone has.

        Raises:
            PrecisionFindingError: it does.
        """
        if self._ranks.stop_together(own=bool(self._stopping)):
            alone = [finding for finding in self._stopping if finding.ranks][:1]
            first = sorted(self._ranks.pool(alone, "findings"), key=lambda finding: finding.since or 0)[:1]
            self._stopping += [finding for finding in first if finding not in self._stopping]
            for finding in first:
                if own_rank() not in finding.ranks:
                    self._diagnosis.adopt(finding)
            self._stop()

    def stop_at_the_end(self) -> None:
        """Stop a run whose end came before the step that a finding would have stopped.

        Raises:
            PrecisionFindingError: this rank has such a finding.
        """
        if self._stopping:
            self._stop()

    def _stop(self) -> None:
        found, self._stopping = self._stopping, []
        text = "; ".join(map(str, found)) or "another rank has found it, and names it in its own error"
        remedies = " ".join(dict.fromkeys(f"{finding.remedy}." for finding in found))
        raise PrecisionFindingError(f"A finding stops the training (on_finding=): {text}. {remedies}".rstrip(), found)

    def _react(self, found: Sequence[Finding], iteration: int) -> None:
        """Do what is wanted where something is found."""
        for finding in found:
            data = finding.as_json()
            severity = "info" if finding.severity == "note" else finding.severity
            layer = finding.layers[0] if finding.layers else ""
            event = Event("finding", str(finding), iteration, severity, layer=layer, tensor=finding.tensor, data=data)
            self._tell(event)
            stops = self._stops(finding) or self._asks(finding)
            if stops:
                self._stopping.append(finding)
                # The error that stops the run has all that was seen. On several ranks it comes in a later step.
                logger.warning("%s: %s stops the training.", finding.severity.capitalize(), finding.in_short)
            elif finding.severity != "note" and (finding.ranks or own_rank() == 0):
                logger.warning(
                    "%s: %s. What to do: %s.%s More: te-precision rules %s",
                    finding.severity.capitalize(),
                    finding,
                    finding.remedy,
                    f" Not a problem if {finding.disproof}." if finding.disproof else "",
                    finding.rule,
                )

    def _asks(self, finding: Finding) -> bool:
        """Call the user's function, if there is one: whether it returns "stop"."""
        if not callable(self._on_finding):
            return False
        try:
            return bool(self._on_finding(finding) == "stop")
        except Exception as error:
            self._report("calling on_finding= for", finding.rule, error)
            return False
