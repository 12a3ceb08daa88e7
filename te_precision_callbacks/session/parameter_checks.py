"""The checks of a model's parameters in a run: each result is an event, which the rules and the records receive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.coverage.parallel import Ranks
from te_precision_callbacks.instrumentation.parameters import ParameterWatch, Problem
from te_precision_callbacks.instrumentation.replicas import Replicas
from te_precision_callbacks.session.observed_model import ObservedModel
from te_precision_callbacks.sinks.step_records import Event, Severity

MOST_NAMES = 1000
"""The most parameters that an event names for each problem."""


class ParameterChecks:
    """Checks the parameters of a run.

    Args:
        model: the model.
        ranks: those that reduce together.
        iteration: gives the debug iteration.
        tell: receives events, and whether this rank records them.
        report: receives failures.
    """

    def __init__(
        self,
        model: ObservedModel,
        ranks: Ranks,
        iteration: Callable[[], int],
        tell: Callable[[Event, bool], None],
        report: Callable[[str, str, Exception], None],
    ) -> None:
        self._replicas = Replicas(model.named_parameters, lambda: model.roots, ranks)
        self._watch = ParameterWatch(model.named_parameters, iteration, self._replicas.before_step, report)
        self._ranks = ranks
        self._tell = tell
        self._report = report
        self._checked: set[str] = set()
        self.begin, self.remove = self._watch.begin, self._watch.remove

    def end_step(self, iteration: int) -> None:
        """Report what a debug iteration has shown; on all ranks alike."""
        problems = self._watch.end_step(iteration)
        try:
            problems = self._replicas.exchange(problems, iteration, is_due=self._watch.is_due)
        except Exception as error:
            self._ranks.leave(error)
            self._report("comparing", "the parameters of the ranks", error)
        self._watch.begin_step()
        self._send(problems, iteration, of_all=self._ranks.are_together)

    def end(self, iteration: int) -> None:
        """Report what is left on this rank at the end of a run, and check all its parameters for inf and nan.

        Args:
            iteration: the last one.
        """
        self._send(self._replicas.take_news() + self._watch.end(), iteration, of_all=False)

    def _send(self, problems: list[Problem], iteration: int, *, of_all: bool) -> None:
        checked = self._watch.checked | self._replicas.checked
        if not problems and checked <= self._checked:
            return
        self._checked |= checked
        of_kind: dict[str, list[Problem]] = {}
        for each in {(each.what, each.name): each for each in problems}.values():
            of_kind.setdefault(each.what, []).append(each)
        rows: list[dict[str, Any]] = [
            {
                "what": what,
                "names": [each.name for each in found[:MOST_NAMES]],
                "since": min(each.since for each in found),
                "number": found[0].number,
            }
            for what, found in of_kind.items()
        ]
        data = {"checked": sorted(checked), "problems": rows, "of_all": of_all}
        text = f"{many(len(problems), 'problem')} in parameters" if problems else "Parameters were checked"
        severity: Severity = "warning" if problems else "info"
        is_recorded = self._ranks.leads or bool(problems and not of_all)
        self._tell(Event("parameters", f"{text}.", iteration, severity, phase="step", data=data), is_recorded)
