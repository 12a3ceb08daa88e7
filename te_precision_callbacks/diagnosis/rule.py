"""A rule: what is looked for, from what, how bad it is, why, and what to do."""

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
    """What a rule has seen in a step.

    Attributes:
        layers: the layers; they need not be in order.
        tensor: the tensor; empty where none is meant.
        statistic: the statistic that shows it; empty where none does.
        seen: what was seen, with numbers. Of several layers, this is about the first one.
        since: the first iteration of it; None for what holds from the start.
        severity: None for that of the rule.
        patch: a section of a config that mends it; empty where there is none.
        key: what else keeps findings of a rule and a tensor apart.
        remedy: empty for that of the rule.
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
    """Judges one rule in one run, step by step. A subclass overrides :meth:`facts`, :meth:`step`,
    :meth:`scalars` or :meth:`event`.

    Attributes:
        needed: how many steps with numbers the rule needs before it can find what it looks for.
        applies: whether the rule is about what this run has; None as long as that is not known.
        judged: whether there was enough to judge by.
        steps: the last steps in which there were numbers to judge by.
    """

    needed = 1
    _kind_of_step = "collection step"

    def __init__(self) -> None:
        self.applies: bool | None = True
        self.judged = False
        self.steps: deque[int] = deque(maxlen=_KEPT_STEPS)
        self._count = 0

    def saw(self, iteration: int) -> None:
        """Note that a step has numbers to judge by."""
        if not self.steps or self.steps[-1] != iteration:
            self.steps.append(iteration)
            self._count += 1
            self.judged = self._count >= self.needed

    @property
    def why_not(self) -> str:
        """Why the rule is not judged although there were numbers; empty if there were none."""
        if not self._count:
            return ""
        return f"it needs {many(self.needed, self._kind_of_step)}, and has had {self._count}"

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        """Judge the facts, when they are known and whenever they have changed."""
        return ()

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterable[Sighting]:
        """Judge the numbers of a step."""
        return ()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterable[Sighting]:
        """Judge numbers that the trainer logs of an iteration; they may come later than those of :meth:`step`."""
        return ()

    def event(self, event: Event) -> Iterable[Sighting]:
        """Check an event of the run, such as a broken contract or the exception that ended the run."""
        return ()


@dataclass(frozen=True)
class Rule:
    """A row of the rule book.

    Attributes:
        id: its name, for ``te-precision rules ID`` and for ``on_finding=``.
        title: what is wrong, in one line.
        subject: what it is about.
        needs: what it is judged by.
        collect: what to add to a config to have that, in words.
        condition: when it fires, with its thresholds.
        silent: what healthy runs have, and does not count.
        severity: the worst severity of its findings.
        recipes: the recipes that it holds for; empty for all.
        source: where the rule and its thresholds come from.
        why: why it matters.
        disproof: what would show that nothing is wrong.
        remedy: what to do.
        cost: what the remedy costs; empty if nothing.
        judge: makes a judge for a run.
        essential: whether a run in which the rule applies and could not be checked gets no all-clear.
        consequence_of: ids of rules whose findings can cause this one's.
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
