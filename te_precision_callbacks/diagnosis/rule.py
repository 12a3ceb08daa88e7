"""Rules: a problem, its data, severity, reason and remedy."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.sinks.step_records import Event

_KEPT_STEPS = 64
"""The last steps, among which the last good one of a new finding is."""

Subject = Literal["tensor", "layer", "group of alike layers", "model", "config"]


class Sighting(NamedTuple):
    """The result of a rule in a step.

    Attributes:
        layers: in any order.
        seen: a description with values, of the first layer.
        since: its first iteration; None for a problem from the start.
        severity, remedy: by default those of the rule.
        key: distinguishes findings of a rule and a tensor.
    """

    layers: tuple[str, ...]
    tensor: str
    statistic: str
    seen: str
    since: int | None
    severity: Severity | None = None
    patch: str = ""
    key: str = ""
    remedy: str = ""


class Judge:
    """Checks one rule in one run, step by step. A subclass overrides :meth:`facts`, :meth:`step`, :meth:`scalars` or
    :meth:`event`.

    Attributes:
        needed: the minimum number of steps with data.
        applies: whether the rule applies to the run; None as long as that is unknown.
        judged: whether there were enough data.
    """

    needed = 1
    _kind_of_step = "collection step"

    def __init__(self) -> None:
        self.applies: bool | None = True
        self.judged = False
        self.steps: deque[int] = deque(maxlen=_KEPT_STEPS)
        self._count = 0

    def saw(self, iteration: int) -> None:
        if not self.steps or self.steps[-1] != iteration:
            self.steps.append(iteration)
            self._count += 1
            self.judged = self._count >= self.needed

    @property
    def why_not(self) -> str:
        if not self._count:
            return ""
        return f"it needs {many(self.needed, self._kind_of_step)}, and has had {self._count}"

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        return ()

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterable[Sighting]:
        return ()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterable[Sighting]:
        """Check metrics of the trainer in an iteration; they may come later than :meth:`step`."""
        return ()

    def event(self, event: Event) -> Iterable[Sighting]:
        """Check an event of the run, such as a broken contract or the exception that ended the run."""
        return ()


@dataclass(frozen=True)
class Rule:
    """A row of the table of rules.

    Attributes:
        id: its name, for ``te-precision rules ID`` and for ``on_finding=``.
        title: the problem, in one line.
        subject: the kind of subject.
        needs: the data that it needs.
        collect: options of a config that collect them, in words.
        condition: the condition, with thresholds.
        silent: healthy cases that do not count.
        severity: the worst severity of its findings.
        recipes: the recipes it applies to; empty for all.
        source: of the rule and its thresholds.
        disproof: evidence that there is no problem.
        cost: of the remedy; empty if there is none.
        judge: makes a judge for a run.
        essential: whether an all-clear requires this rule.
        consequence_of: ids of rules that can cause its findings.
    """

    id: str
    title: str
    subject: Subject
    needs: str
    collect: str
    condition: str
    silent: str
    severity: Severity
    source: str
    why: str
    disproof: str
    remedy: str
    judge: Callable[[], Judge]
    recipes: tuple[str, ...] = ()
    cost: str = ""
    essential: bool = False
    consequence_of: tuple[str, ...] = ()
