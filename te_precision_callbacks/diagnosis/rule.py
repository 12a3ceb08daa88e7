"""Rules: rows with a problem, its data, severity, reason and remedy, and the base of their checks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Mask, holds_any

_KEPT_STEPS = 64
"""The last steps, among which the last good one of a new finding is."""


Subject = Literal["tensor", "layer", "group of similar layers", "model", "config"]


class Sighting(NamedTuple):
    """The result of a rule in a step.

    Attributes:
        seen: a description with the values of the first layer.
        layers: in any order.
        since: the first iteration; None for a problem from the start.
        severity, remedy: by default the rule's.
        key: distinguishes findings of a rule and a tensor.
        replaces: whether severity and description replace the finding's, at the end of a run.
        withdraws: whether the finding only held in the first steps, and is dropped.
    """

    seen: str
    layers: tuple[str, ...] = ()
    tensor: str = ""
    statistic: str = ""
    since: int | None = None
    severity: Severity | None = None
    patch: str = ""
    key: str = ""
    remedy: str = ""
    replaces: bool = False
    withdraws: bool = False


Sightings = Iterable[Sighting]


@dataclass(kw_only=True)
class RuleCheck:
    """Checks one rule in one run, step by step. A subclass overrides :meth:`facts`, :meth:`step`, :meth:`scalars` or
    :meth:`event`.

    Attributes:
        needed: the minimum number of steps with data, and of steps in ``streaks``.
        applies: whether the rule applies to the run; None while unknown.
        checked: whether there was enough data.
        lacks: why there are no data; empty if that is not known.
    """

    needed: int = 1
    applies: bool | None = True
    kind_of_step: str = "collection step"
    checked = False
    lacks = ""

    def __post_init__(self) -> None:
        self.streaks = Streaks(self.needed)
        self.steps: deque[int] = deque(maxlen=_KEPT_STEPS)
        self._count = 0

    def note_data(self, iteration: int) -> None:
        if not self.steps or self.steps[-1] != iteration:
            self.steps.append(iteration)
            self._count += 1
            self.checked = self._count >= self.needed

    @property
    def why_not(self) -> str:
        if self._count and not self.checked:
            return f"not enough {self.kind_of_step}s ({self._count} of {self.needed})"
        return self.lacks

    def facts(self, facts: Facts) -> Sightings:
        return ()

    def step(self, numbers: StepNumbers) -> Sightings:
        """Check the statistics of a step, within ``np.errstate(all="ignore")``."""
        return ()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Sightings:
        """Check metrics of the trainer in an iteration; they may come later than :meth:`step`."""
        return ()

    def event(self, event: Event) -> Sightings:
        """Check an event of the run, such as a broken contract or the exception that ended the run."""
        return ()


class RuleError(ValueError):
    """A row of the table of rules contradicts itself."""


@dataclass(frozen=True)
class Rule:
    """A row of the table of rules. Rows with the same id are variants of a rule, each with texts and a check. A
    text may have several lines; ``condition`` names thresholds of the check, as in ``{limit:g}``.

    Attributes:
        id: its name, for ``te-precision rules ID`` and for ``on_finding=``.
        title: the problem, in one line; no two rows have the same one.
        subject: the kind of subject.
        needs: the required data.
        collect: the options of a config that collect these data.
        condition: the condition, with thresholds.
        silent: healthy cases that are not reported.
        severity: the worst severity of its findings, unless a sighting has one.
        recipes: the recipes it applies to; empty for all.
        source: the source of the rule and its thresholds.
        disproof: evidence that there is no problem.
        cost: the cost of the remedy; empty without one.
        check: creates a check for a run; of a known shape with the column and the thresholds.
        essential: whether an all-clear requires this rule.
        consequence_of: ids of rules that can cause its findings, such as ``growth``; ``growth of weight``: of a tensor.
        variants: of the first row of a rule, the others.

    Raises:
        RuleError: the check lacks its column or a threshold, or ``condition`` names a threshold that the check lacks.
    """

    id: str
    title: str
    subject: Subject
    needs: str
    collect: str
    condition: str
    silent: str
    source: str
    why: str
    disproof: str
    remedy: str
    check: Callable[[], RuleCheck]
    severity: Severity = "warning"
    recipes: tuple[str, ...] = ()
    cost: str = ""
    essential: bool = False
    consequence_of: tuple[str, ...] = ()
    variants: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        try:
            thresholds = vars(self.check())
        except (TypeError, ValueError) as error:
            raise RuleError(f"rule {self.id!r}: its check cannot be created: {error}") from None
        for name, text in vars(self).items():
            if isinstance(text, str):
                object.__setattr__(self, name, " ".join(text.split()))
        try:
            object.__setattr__(self, "condition", self.condition.format(**thresholds))
        except (KeyError, ValueError) as error:
            raise RuleError(f"rule {self.id!r}: condition= names {error}, which its check lacks") from None


class Streak(NamedTuple):
    """Steps in a row: the first one, and their number."""

    first: int
    steps: int


class Streaks:
    """Requires that a condition holds for a tensor in ``steps`` collection steps in a row. Steps without the statistic
    of the tensor are skipped.

    Attributes:
        held: statistic and key -> row -> the steps so far; only of conditions that hold now.
    """

    def __init__(self, steps: int) -> None:
        self.steps = steps
        self.held: dict[tuple[str, str], dict[int, Streak]] = {}

    def sightings(
        self,
        numbers: StepNumbers,
        statistic: str,
        holds: Mask,
        describe: Callable[[int], str],
        *,
        reported: Mask | None = None,
        severity: Severity | None = None,
        key: str = "",
        steps: int = 0,
    ) -> Sightings:
        """Yield a sighting of each tensor, with all layers where the condition has lasted long enough.

        Args:
            holds: [rows]: whether the condition holds; rows without the statistic are left out.
            describe: row -> the description, of the first layer in execution order.
            reported: [rows]: whether to report the layer; None for all layers.
            key: distinguishes several conditions on a statistic.
            steps: how many steps in a row; 0 for the usual ones.
        """
        streaks = self.held.pop((statistic, key), {})
        if not streaks and not holds_any(holds):
            return
        column = numbers.column(statistic)
        held = {row: streak for row, streak in streaks.items() if numbers.tensors[row] not in column.tensors}
        lasting: dict[str, list[int]] = {}
        for row in column.rows[holds[column.rows]].tolist():
            first, count = streaks.get(row, (numbers.iteration, 0))
            held[row] = Streak(first, count + 1)
            if count + 1 >= (steps or self.steps) and (reported is None or reported[row]):
                lasting.setdefault(str(numbers.tensors[row]), []).append(row)
        if held:
            self.held[statistic, key] = held
        for tensor, rows in lasting.items():
            rows = numbers.in_order(rows)
            layers = tuple(map(numbers.names.__getitem__, rows))
            since = min(held[row].first for row in rows)
            yield Sighting(describe(rows[0]), layers, tensor, column.label(rows[0]), since, severity)

    def by_severity(
        self,
        numbers: StepNumbers,
        statistic: str,
        warnings: Mask,
        notes: Mask,
        describe: Callable[[int], str],
        key: str = "",
    ) -> Sightings:
        """Yield sightings like :meth:`sightings`, as a warning for some layers and a note for others."""
        yield from self.sightings(numbers, statistic, warnings, describe, severity="warning", key=f"{key}warning")
        yield from self.sightings(numbers, statistic, notes, describe, severity="note", key=f"{key}note")
