"""Judges the measurements of parameters during a run; the thresholds of the rules on parameters.

The rules themselves, which describe the problems, are in ``parameters.py``.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from te_precision_callbacks.layers.folding import form_of, numbers_of
from te_precision_callbacks.parameters.parameter import (
    FEW_CHANGED,
    SAMPLED_CLEARINGS,
    Gap,
    Parameter,
    ParameterProblem,
    Problem,
    WriteRow,
)

if TYPE_CHECKING:
    from te_precision_callbacks.parameters.gradients import ZeroGradients
    from te_precision_callbacks.parameters.watch import ParameterWatch

ENDS_BY_A_GRADIENT: frozenset[ParameterProblem] = frozenset({"no_gradient", "checkpointed", "lost_gradient"})
"""Problems that a later gradient makes a note."""

_NEVER_REACHED = ("no_gradient", "checkpointed", "frozen_held")

WITHOUT_GRADIENT = 6
"""Optimizer steps after which a parameter without a gradient is reported."""

MOST_IDLE = 64
"""The same for a parameter whose module does not run while a similar parameter has a gradient: blocks may be skipped at
random, experts may get no tokens.
"""

LOST = 8
"""Consecutive steps without a gradient, although the module runs and earlier steps had one."""

IDLE = 60
"""Steps between the first and the last gradient of 0 of a parameter whose similar parameters have gradients."""

UNSTEPPED = 20
"""Consecutive debug iterations without a step of optimizers that stepped before."""

UNCHANGED = 3
SPAN = 6
"""Minimum of sampled steps that should have changed a weight, and of the steps that they span."""

NEARLY_ALL = 0.9
"""Smallest share of matrices that hardly change, or have gradients of 0, for a problem of the model."""

APART = 0.01
APART_CHECKS = 2
"""Share of sampled elements that differ from the master weight by more than rounding, and the consecutive checks that
must find it.
"""

DECAYS = 0.02
"""Share of a weight that weight decay removes in a step: half of it in 34 steps."""

TIMES_ORDINARY = 8.0
REPLACED = 0.5
"""An overwritten weight differs from its last sample by so many times the ordinary change, and by this share of its
norm."""

LATE = 8
"""Steps after which a weight that is equal to an earlier sample again was restored."""


class ParameterProblems:
    """The problems of a run's parameters, each reported once.

    Attributes:
        checked: rules that had enough data.
        unmatched: see :attr:`~te_precision_callbacks.parameters.optimizers.ParameterList.unmatched`.
    """

    def __init__(self, watch: ParameterWatch) -> None:
        self.checked: set[str] = set()
        self.unmatched: list[str] = []
        self._watch = watch
        self._reported: set[tuple[str, str]] = set()

    def find(self, *, at_last: bool = False) -> list[Problem]:
        """Return the new problems."""
        watch = self._watch
        if watch.is_due:
            self.unmatched = watch.listed.unmatched
        parameters = watch.parameters
        without = self._without_gradient(parameters)
        idle = _idle(parameters, watch.sizes.zeros)
        candidates = [
            *idle.values(),
            *self._arrived(),
            *self._decays(),
            *_missing_gradients(parameters, [(parameter, gap) for parameter, gap in without if parameter not in idle]),
            *_of_weights(parameters),
            *self._of_optimizers(at_last=at_last),
            *_of_nearly_all(parameters, watch.sizes.zeros),
            *self._kept_gradients(parameters),
            *self._unheld(),
        ]
        problems = [problem for problem in candidates if problem[:2] not in self._reported]
        self._reported.update(problem[:2] for problem in problems)
        if "frozen-weight" not in self.checked and any(
            row.changed > 0 or row.moved > 0 for parameter in parameters for row in parameter.rows
        ):
            self.checked.add("frozen-weight")
        if watch.schedules:
            self.checked.add("learning-rate")
        never_reached = [parameter for parameter, _ in without if not parameter.has_gradient]
        are_reported = all(self._has_reported(parameter.name, *_NEVER_REACHED) for parameter in never_reached)
        if are_reported and self._trains(parameters) and not self.unmatched:
            self.checked.add("missing-gradient")
        return problems

    def with_shares(self, nonfinite: Sequence[Problem]) -> list[Problem]:
        """Return the problems of gradients and weights that are not finite, with the share of all trained ones."""
        gradients = sum(parameter.at_step for parameter in self._watch.parameters)
        share = 100 * len({problem.name for problem in nonfinite}) / max(1, gradients)
        return [problem._replace(number=share) for problem in nonfinite]

    def _has_reported(self, name: str, *problems: str) -> bool:
        return any((what, name) in self._reported for what in problems)

    def _trains(self, parameters: Iterable[Parameter]) -> bool:
        return bool(self._watch.steps) or any(parameter.has_gradient for parameter in parameters)

    def _without_gradient(self, parameters: Sequence[Parameter]) -> list[tuple[Parameter, Gap]]:
        gaps = [(parameter, parameter.gap) for parameter in parameters if parameter.gap is not None]
        if not gaps or not self._trains(parameters):
            return []
        held = self._watch.listed.held
        return [(parameter, gap) for parameter, gap in gaps if parameter in held or not held]

    def _arrived(self) -> Iterator[Problem]:
        for parameter, gap in self._watch.ended_gaps:
            name = parameter.name
            if self._has_reported(name, *ENDS_BY_A_GRADIENT):
                self._reported -= {(what, name) for what in ("arrived", *ENDS_BY_A_GRADIENT)}
                yield Problem("arrived", name, gap.since, gap.steps)
        self._watch.ended_gaps.clear()

    def _decays(self) -> Iterator[Problem]:
        for optimizer in self._watch.listed.stepped.values():
            for decaying in optimizer.groups:
                share = decaying.get("lr", 0.0) * decaying.get("weight_decay", 0.0)
                is_share = optimizer.decays or decaying.get("decoupled_weight_decay")
                if is_share and isinstance(share, float) and share >= DECAYS:
                    for parameter, _, group, _ in optimizer.held:
                        if group is decaying:
                            yield Problem("decays", parameter.name, self._watch.ended, 100 * share)

    def _of_optimizers(self, *, at_last: bool) -> Iterator[Problem]:
        watch = self._watch
        steps = watch.ended - watch.last_update
        is_over = at_last and steps >= SPAN and not watch.has_updated
        if watch.steps and (steps >= UNSTEPPED or is_over):
            yield Problem("unstepped", "", watch.last_update + watch.has_updated, steps)
        for schedule in watch.schedules.values():
            if schedule.rises_again and schedule.zero_at is not None:
                yield Problem("rises_again", "", schedule.zero_at, 100 * schedule.last / schedule.largest)

    def _kept_gradients(self, parameters: Iterable[Parameter]) -> Iterator[Problem]:
        """Find gradients that are not cleared."""
        trained = 0
        problems: list[Problem] = []
        for parameter in parameters:
            trained += parameter.has_gradient
            if len(parameter.cleared) == SAMPLED_CLEARINGS:
                self.checked.add("kept-gradient")
                if not any(parameter.cleared.values()):
                    problems.append(Problem("kept", parameter.name, min(parameter.cleared), SAMPLED_CLEARINGS))
        if len(problems) == trained > 1:
            yield Problem("all_kept", "", min(problem.since for problem in problems), SAMPLED_CLEARINGS)
        elif not self._has_reported("", "all_kept"):
            yield from problems

    def _unheld(self) -> Iterator[Problem]:
        """Find trained parameters that no optimizer of the process steps."""
        if self.unmatched or self._watch.steps < WITHOUT_GRADIENT:
            return
        unheld = self._watch.listed.unheld()
        for parameter in unheld:
            what: ParameterProblem = "converted" if parameter.is_converted else "not_held"
            yield Problem(what, parameter.name, parameter.held_until + 1, len(unheld))


def _is_left_out(parameter: Parameter) -> bool:
    gap = parameter.gap
    return gap is not None and not gap.called and gap.steps >= max(MOST_IDLE, 4 * parameter.longest_gap)


def _idle(parameters: Sequence[Parameter], zeros: Mapping[str, ZeroGradients]) -> dict[Parameter, Problem]:
    """Find parameters without a gradient other than 0 for many steps while similar ones have others, as of experts
    without tokens. A block of a stack that never ran is not a problem.

    The number is the percentage of similar parameters.
    """
    since: dict[Parameter, int] = {}
    for parameter in parameters:
        run = zeros.get(parameter.name) if zeros and parameter.is_matrix else None
        if run is not None and run.last - run.since >= IDLE:
            since[parameter] = run.since
        elif parameter.gap is not None and _is_left_out(parameter):
            since[parameter] = parameter.gap.since
    if not since:
        return {}
    similar = Counter(form_of(parameter.name) for parameter in parameters)
    without = Counter(
        form_of(parameter.name) for parameter in parameters if parameter.gap is not None or parameter.name in zeros
    )
    idle: dict[Parameter, Problem] = {}
    for parameter, first in since.items():
        form = form_of(parameter.name)
        may_train = parameter.has_gradient or len(numbers_of(parameter.name)) > 1
        if may_train and parameter.is_trained and without[form] < similar[form]:
            idle[parameter] = Problem("idle", parameter.name, first, 100 * without[form] / similar[form])
    return idle


def _missing_gradients(parameters: Iterable[Parameter], without: Sequence[tuple[Parameter, Gap]]) -> Iterator[Problem]:
    forms = {form_of(parameter.name) for parameter in parameters if parameter.has_gradient and without}
    for parameter, gap in without:
        problem: ParameterProblem | None = None
        if parameter.has_gradient and parameter.is_trained:
            if gap.called >= max(LOST, 2 * parameter.longest_gap):
                problem = "lost_gradient"
            elif _is_left_out(parameter):
                problem = "left_out"
        else:
            may_idle = parameter.is_trained and form_of(parameter.name) in forms and gap.called < WITHOUT_GRADIENT - 1
            if gap.steps >= (MOST_IDLE if may_idle else WITHOUT_GRADIENT):
                problem = "checkpointed" if gap.checkpointed else "no_gradient"
                problem = problem if parameter.is_trained else "frozen_held"
        if problem is not None:
            yield Problem(problem, parameter.name, gap.since, gap.steps)


def _of_weights(parameters: Iterable[Parameter]) -> Iterator[Problem]:
    """Find weights that do not change, that differ from their master weights, or that other code has written."""
    for parameter in parameters:
        if parameter.master_rows or parameter.rows:
            yield from _unchanged(parameter)
        if parameter.writes:
            overwritten = next(filter(None, map(_overwritten, parameter.writes)), None)
            if overwritten is not None:
                what, since, sampled = overwritten
                yield Problem(what, parameter.name, since, sampled)


def _unchanged(parameter: Parameter) -> Iterator[Problem]:
    """Find a weight that does not follow its master weight, or that does not change."""
    if parameter.master_rows:
        measured = [row for row in parameter.master_rows if not math.isnan(row.apart)][-APART_CHECKS:]
        apart = [row for row in measured if row.apart >= APART]
        if len(apart) >= APART_CHECKS:
            yield Problem("apart", parameter.name, apart[0].iteration, 100 * max(row.apart for row in apart))
        if apart:
            return
    moves: list[int] = []
    for row in parameter.rows:  # no call each
        if row.changed > 0:
            return
        if row.moved > 0:
            moves += (row.iteration,)
    if len(moves) >= UNCHANGED and moves[-1] - moves[0] >= SPAN:
        yield Problem("unchanged", parameter.name, moves[0], len(moves))


def _overwritten(row: WriteRow) -> tuple[ParameterProblem, int, int] | None:
    """Return the problem of a weight that was written, the iteration, and the one of the sample; or None."""
    distances = row.distances
    if not distances:
        return None
    *_, size_of_last, size = distances[0]
    *to_earlier, to_last, _ = distances[-1][1:]
    last = row.sampled[-1]
    if size == 0 < size_of_last:
        return "emptied", row.iteration, last
    for index, earlier in enumerate(row.sampled[:-1]):
        if row.iteration - earlier >= LATE and to_earlier[index] == 0 < to_last:
            return "restored", row.iteration, earlier
    if len(row.sampled) > 1:
        ordinary = distances[-2][-3] * max(1.0, (row.iteration - last) / (last - row.sampled[-2]))
        if to_last > TIMES_ORDINARY * ordinary > 0 and to_last > REPLACED * max(size, size_of_last) and size > 0:
            return "replaced", row.iteration, last
    return None


def _of_nearly_all(parameters: Iterable[Parameter], zeros: Mapping[str, ZeroGradients]) -> Iterator[Problem]:
    """Find problems of nearly all matrices: gradients of 0 at the optimizer's step, and float32 weights that hardly
    change. A bias of 0 is excluded, since any update changes it.
    """
    trained = [parameter for parameter in parameters if parameter.has_gradient and parameter.is_matrix]
    runs = [(parameter, zeros[parameter.name]) for parameter in trained if parameter.name in zeros]
    zeroed = [(parameter, run) for parameter, run in runs if run.last - run.since >= SPAN]
    if len(zeroed) >= NEARLY_ALL * len(trained):
        for parameter, run in zeroed:
            yield Problem("zeroed", parameter.name, run.since, run.steps)
    sampled = [parameter for parameter in trained if parameter.rows]
    still = [(parameter, span) for parameter in sampled if len(span := _still_steps(parameter)) >= SPAN]
    if len(still) >= NEARLY_ALL * len(sampled):
        for parameter, span in still:
            yield Problem("still", parameter.name, span.start, len(span))


def _still_steps(parameter: Parameter) -> range:
    """Return the steps in which a float32 weight hardly changes at a learning rate above 0, although it does not have
    to stay the same."""
    rows = parameter.rows
    is_float32 = parameter.reference is not None and str(parameter.reference.dtype) == "torch.float32"
    if rows[-1].iteration - rows[0].iteration < SPAN or not is_float32:
        return range(0)
    since = rows[0].iteration
    until = since
    has_changed = has_moved = False
    for row in rows:  # no call each
        if row.changed > FEW_CHANGED:
            return range(0)
        has_changed |= row.changed > 0
        has_moved |= row.moved > 0
        if row.changed <= FEW_CHANGED:  # it was compared
            until = row.iteration
            since = until if row.rate == 0 else since
    return range(since, until) if has_changed or not has_moved else range(0)
