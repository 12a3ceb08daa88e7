"""Rules on the course of a training: a loss that diverges, gradient norms that are odd, inf and nan in both, weights
that jump, and layers that are missed.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.base.counts import many, some_of
from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import (
    COLLECT_EACH_STEP,
    NEEDS_EACH_STEP,
    Changed,
    Rule,
    RuleCheck,
    Sighting,
    Sightings,
    find_absences,
    layers_of_change,
)
from te_precision_callbacks.diagnosis.rules.parameters import UNCLIPPED, ParameterRule
from te_precision_callbacks.flight import changes
from te_precision_callbacks.flight.rows import FINITE_AGAIN
from te_precision_callbacks.parameters.parameter import NORMS_DIFFER
from te_precision_callbacks.runs.summary import is_loss, is_training_loss, loss_first, words_of
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, holds_any, total
from te_precision_callbacks.statistics.names import CLIPPED_NORM, CLIPPING_LIMIT

UNFILTERED = "loss_step"
"""The loss of a step as the backward gets it, from a trainer that leaves inf and nan out of what it logs."""

OF_SKIPPED_STEP = """
    Nothing, if the script skips such a step on purpose, and the forward updates no buffers, as BatchNorm does: they
    are not checked. Otherwise look for the cause: debug='activation_overflow' stops at the module and batch
"""

_DIVIDE = """
    Divide the loss of each micro-batch by the number of micro-batches before backward(), unless only the logged
    value is a sum. Otherwise the gradients are that many times too large
"""


class LoggedNumber(NamedTuple):
    """A number that the trainer logs in an iteration, its name, and the last loss then."""

    iteration: int
    name: str
    value: float
    loss: float


_OF_EVALUATION = frozenset({"eval", "val", "valid", "validation", "test"})


def _is_loss_of_training(name: str) -> bool:
    """Return whether a scalar is a loss of the training, or a part of one."""
    return is_loss(name) and words_of(name).isdisjoint(_OF_EVALUATION)


MOST_POINTS = 512 * 30
"""The least number of last points in a history; always a multiple of it was dropped."""


@dataclass(kw_only=True)
class Logged(RuleCheck):
    """A condition on the history of a number that the trainer logs.

    Attributes:
        number: chooses name and value of the number among the metrics. Returns None without it, and may set ``lacks``.
        find: yields the sightings.
        values: the metrics of an iteration.
        counts: how often each metric was logged so far.
        loss: the last loss, of the training or a part of one; nan before the first.
    """

    number: Callable[[Logged], tuple[str, float] | None]
    find: Callable[[Logged], Sightings]
    kind_of_step: str = "logged step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.history: list[LoggedNumber] = []
        self.values: Mapping[str, float] = {}
        self.counts: Counter[str] = Counter()
        self.loss = math.nan

    def facts(self, facts: Facts) -> Sightings:
        return self.find(self) if self.history else ()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Sightings:
        self.values = values
        self.counts.update(values.keys())
        for name in loss_first(filter(_is_loss_of_training, values))[:1]:
            self.loss = values[name]
        number = self.number(self)
        if number is None:
            return ()
        self.applies = True
        self.note_data(iteration)
        if len(self.history) == 2 * MOST_POINTS:
            del self.history[:MOST_POINTS]
        self.history.append(LoggedNumber(iteration, *number, self.loss))
        return self.find(self)


def _training_loss(check: Logged) -> tuple[str, float] | None:
    """The training loss, of several ones a loss that is inf or nan; None where the trainer filters these."""
    values = check.values
    if check.run.settings.loss_is_filtered and not check.counts[UNFILTERED]:
        check.lacks = (
            "the Trainer filters inf and nan from the logged loss: set logging_nan_inf_filter=False in"
            " TrainingArguments"
        )
        return None
    losses = loss_first(filter(is_training_loss, values))
    if losses:
        name = min(losses, key=lambda name: math.isfinite(values[name]))
        return name, values[name]
    if names := list(filter(_is_loss_of_training, check.counts)):
        check.lacks = (
            f"no logged name clearly is the training loss (logged: {some_of(names)}): also log it as loss or train_loss"
        )
    return None


def _is_norm(name: str) -> bool:
    return {"grad", "norm"} <= words_of(name) or "gradnorm" in words_of(name)


def _gradient_norm(check: Logged) -> tuple[str, float] | None:
    """A logged gradient norm in runs that log one in most steps, else the norm that clipping was seen to use. Of
    several ones a norm that is inf or nan.
    """
    values = check.values
    norms = [name for name in check.counts if _is_norm(name) and name != CLIPPED_NORM]
    if 2 * max(map(check.counts.__getitem__, norms), default=0) <= check.counts[CLIPPED_NORM]:
        norms = [CLIPPED_NORM]
    logged = [(math.isfinite(values[name]), name != "grad_norm", len(name), name) for name in norms if name in values]
    if not logged:
        return None
    name = min(logged)[-1]
    return name, values[name]


def _positive_norm(check: Logged) -> tuple[str, float] | None:
    norm = _gradient_norm(check)
    if norm is not None and 0 < norm[1] < math.inf:
        return norm
    return None


def _clipped(check: Logged) -> tuple[str, float] | None:
    """The gradient norm before clipping, relative to the limit of clipping."""
    norm = check.values.get(CLIPPED_NORM, math.nan)
    limit = check.values.get(CLIPPING_LIMIT, math.nan)
    is_clipped = math.isfinite(norm) and 0 < limit < math.inf
    return (f"the limit of clipping ({limit:.3g})", norm / limit) if is_clipped else None


def _nonfinite(check: Logged, what: str, step: str) -> Sightings:
    history = check.history
    last = history[-1]
    are_finite = [math.isfinite(point.value) for point in history[-FINITE_AGAIN - 1 :]]
    if not are_finite[-1]:
        yield Sighting(f"{last.name} is {last.value}", since=last.iteration)
    elif are_finite == [False] + [True] * FINITE_AGAIN:
        count = many(sum(not math.isfinite(point.value) for point in history), step)
        seen = f"{what} was inf or nan in {count}, and is finite again"
        yield Sighting(seen, severity="note", remedy=OF_SKIPPED_STEP, replaces=True)


def _nonfinite_norm(check: Logged) -> Sightings:
    settings = check.run.settings
    if settings.are_known and not settings.loss_is_scaled:
        yield from _nonfinite(check, "the gradient norm", "step")


def _jump(check: Logged) -> Sightings:
    """Find a norm far above the median of those before it."""
    history = check.history
    if len(history) <= LEAST_NORMS:
        return
    norms = np.log2([point.value for point in history[-NORMS - 1 :]])
    middle = float(np.median(norms[:-1]))
    sigma = 1.4826 * float(np.median(np.abs(norms[:-1] - middle)))
    rises = norms[-3:] - middle
    least = max(FACTOR, SIGMAS * sigma)
    if rises[-1] >= least:
        lasts = rises.min() >= least
        rise = rises.min() if lasts else rises[-1]
        severity: Severity = "warning" if lasts or rise >= SPIKE else "note"
        seen = f"{history[-1].name} is {history[-1].value:.3g}, {2**rise:.3g} times the median before"
        yield Sighting(seen, since=history[-1].iteration, severity=severity)


def _creeps_up(check: Logged) -> Sightings:
    """Find slow growth in windows of the last values, and in windows of means over more steps."""
    history = check.history
    for count in MEANS:
        if len(history) % count or len(history) < WINDOW * count:
            return  # no new point for windows of longer means either
        points = history[-WINDOW * count :]
        norms = np.log2([point.value for point in points]).reshape(WINDOW, count).mean(axis=1)
        losses = np.array([point.loss for point in points]).reshape(WINDOW, count).mean(axis=1).reshape(3, -1)
        first, middle, last = np.median(norms.reshape(3, -1), axis=1).tolist()
        rise = last - first
        jump = np.diff(np.median(norms.reshape(6, -1), axis=1)).max()
        if rise < RISE or min(middle - first, last - middle) < RISE / 4 or jump > JUMP * rise:
            continue
        loss_at_first, _, loss_at_last = np.median(losses, axis=1).tolist()
        change = (loss_at_last - loss_at_first) / max(abs(loss_at_first), 1e-12)
        if change < -FLAT:
            continue
        apart = np.percentile(losses[2], 25) > np.percentile(losses[0], 75)
        severity: Severity = "warning" if change >= RISING and apart else "note"
        seen = (
            f"{history[-1].name} has become {2**rise:.3g} times as large in {WINDOW * count} logged steps, while the"
            f" loss has changed by {100 * change:+.2g} %"
        )
        yield Sighting(seen, since=points[0].iteration, severity=severity)


def _far_clipped(check: Logged) -> Sightings:
    last = check.history[-CLIPPED_STEPS:]
    ratios = sorted(point.value for point in last)
    least = ratios[round((1 - NEARLY_ALL_CLIPPED) * len(ratios))]
    if len(ratios) == CLIPPED_STEPS and least >= CLIPPED:
        seen = (
            f"the gradient norm was at least {least:.3g} times {last[-1].name} in"
            f" {sum(ratio >= least for ratio in ratios)} of {CLIPPED_STEPS} steps"
        )
        severity: Severity = "warning" if least >= FAR_CLIPPED else "note"
        yield Sighting(seen, since=last[0].iteration, severity=severity)


def _micro_batches(facts: Facts) -> int:
    return min((layer.calls for layer in facts if layer.calls), default=0)


def _first_loss(check: Logged) -> tuple[str, float] | None:
    loss = _training_loss(check)
    is_first = loss is not None and check.counts[loss[0]] == 1
    if is_first and _micro_batches(check.run) > 1:
        return loss
    return None


def _is_sum(check: Logged) -> Sightings:
    """Compare the first loss with the loss of a uniform guess, times the number of micro-batches."""
    count = _micro_batches(check.run)
    iteration, name, loss, _ = check.history[0]
    for head in check.run.heads:
        classes = head.shape[0]
        guess = math.log(max(classes, 2))
        if abs(loss / (count * guess) - 1) <= NEAR_GUESS:
            seen = (
                f"the first {name} is {loss:.3g}, {count} times that of a uniform guess among {classes} classes"
                f" ({guess:.3g}), and a step has {count} micro-batches"
            )
            yield Sighting(seen, since=iteration)


_IN_TURN = "; optimizers step in turn, as in a GAN, where a loss may rise while another falls"

_OF_TURNS = """
    Compare with the losses of the other optimizers. If this one rises for good, lower its learning rate, or step the
    other ones less often
"""


class DivergingLoss(RuleCheck):
    def __init__(self) -> None:
        super().__init__(needed=3, kind_of_step="logged loss value")
        self._curves: dict[str, _Curve] = {}
        self._restored = Event("losses_restored", "", 0, data={"losses": ()})

    def event(self, event: Event) -> Sightings:
        if event.kind == "losses_restored":
            self._restored = event
        if event.kind in ("segment_ended", "stopped"):
            fallen = [curve.fallen() for curve in self._curves.values() if curve.since is not None]
            if all(fallen):
                yield from filter(None, fallen[:1])

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Sightings:
        for name in loss_first(filter(is_training_loss, values)):
            if math.isfinite(values[name]):
                self.note_data(iteration)
                if name not in self._curves:
                    self._curves[name] = _Curve(name)
                    for loss in filter(math.isfinite, self._restored.data["losses"]):
                        list(self._curves[name].add(self._restored.iteration, loss))
                for sighting in self._curves[name].add(iteration, values[name]):
                    if self.run.settings.takes_turns:
                        sighting = sighting._replace(
                            seen=sighting.seen + _IN_TURN, severity="warning", remedy=_OF_TURNS
                        )
                    yield sighting


class _Curve:
    """The history of one loss.

    For a loss that was negative, or is often 0, as in reinforcement learning, ratios make no sense: its lost progress
    and its magnitude are checked instead.

    Attributes:
        since: the first step of the first rise; None without one.
    """

    def __init__(self, name: str) -> None:
        self.since: int | None = None
        self._name = name
        self._start: list[float] = []
        self._steps: deque[int] = deque(maxlen=BLOCK + LASTS)
        self._losses: deque[float] = deque(maxlen=BLOCK + LASTS)
        self._best = math.inf, math.inf  # level and spread
        self._spreads: deque[float] = deque(maxlen=3)
        self._least = math.inf
        self._count = self._zeros = 0
        self._largest_change = 0.0  # without the last STAYS + 1
        self._limit = math.inf, 0.0
        self._level = 0.0  # before the first rise
        self._peak = -math.inf  # since then

    def add(self, iteration: int, loss: float) -> Sightings:
        self._least = min(self._least, loss)
        self._count += 1
        self._zeros += loss == 0
        if self._count <= 3:
            self._start.append(loss)
        self._steps.append(iteration)
        self._losses.append(loss)
        losses = list(self._losses)
        count, level = next(self._rises(losses), (0, 0.0))
        last = losses[-count:]
        if count and not (self._has_ratios and max(last) < NEGLIGIBLE * self._start[0]):
            self._limit = min(last), level
            if self.since is None:
                self.since = self._steps[-count]
                self._level = level
                self._peak = max(last)
            seen = f"{self._name} has risen from {level:.3g} to {statistics.median(last):.3g}"
            yield self._sighting(self._steps[-count], seen)
        elif loss >= self._limit[0]:
            yield self._sighting(iteration, f"{self._name} is {loss:.3g}, after {self._limit[1]:.3g}")
        self._peak = max(self._peak, loss)
        if self._count > LASTS and self._count % BLOCK == LASTS:
            level = statistics.median(losses[:BLOCK])
            spread = sorted(losses[:BLOCK])[int(0.95 * BLOCK) - 1] - level
            self._spreads.append(spread)
            self._best = min(self._best, (level, spread))
        yield from self._jump(losses)

    @property
    def _has_ratios(self) -> bool:
        return self._least >= 0 and self._start[0] > 0 and self._zeros <= MOST_ZEROS * self._count

    def fallen(self) -> Sighting | None:
        """The sighting of a rise that has ended, with the last losses near the level before it; else None."""
        last = list(self._losses)[-LASTS:]
        level = self._level
        usual = max(self._start[0], RISES[-1][2] * level)
        if max(last) > min(usual, level + FALLEN * (self._peak - level)):
            return None
        last_loss = statistics.median(last)
        seen = f"{self._name} rose from {level:.3g} to {self._peak:.3g}, and has fallen to {last_loss:.3g} again"
        return Sighting(seen, since=self.since, severity="note", replaces=True)

    def _sighting(self, since: int, seen: str) -> Sighting:
        start = statistics.median(self._start[:1] if self._count <= BLOCK else self._start)
        is_far = self._has_ratios and min(list(self._losses)[-2:]) >= 2 * start
        return Sighting(seen, since=since, severity="error" if is_far else "warning")

    def _rises(self, losses: Sequence[float]) -> Iterator[tuple[int, float]]:
        """Yield the number of last losses that are far above a level, and that level."""
        for count, least, low, high in RISES if self._has_ratios else OF_SIGNED:
            earlier = losses[-BLOCK - count : -count]
            top = max(map(abs, earlier), default=0.0)
            sizes = list(map(abs, losses[-count:]))
            if len(earlier) >= least and top > 0 and min(sizes) >= low * top and max(sizes) >= high * top:
                yield count, statistics.median(earlier)
        lowest = min(losses[-LASTS:])
        level, spread = self._best
        spread = max([spread, *self._spreads])
        gained = statistics.median(self._start) - level
        if gained <= SPREADS * spread:
            gained = level if self._has_ratios else 0.0
        if gained > 0 and lowest - level >= max(SPREADS * spread, LOST * gained):
            yield LASTS, level
        first = self._start[0]
        if self._has_ratios and len(losses) > LASTS and lowest >= OF_FIRST * first:
            logarithms = [math.log(loss) for loss in losses[1:][-BLOCK:] if loss]
            distance = statistics.mean(logarithms[-LASTS:]) - math.log(first)
            if distance >= FIRST_SPREADS * statistics.stdev(logarithms):
                yield LASTS, first

    def _jump(self, losses: Sequence[float]) -> Sightings:
        """Find a jump from one step to the next that stays: code may have written the weights."""
        if len(losses) <= STAYS + 2:
            return
        earlier, base, *last = losses[-STAYS - 2 :]
        self._largest_change = max(self._largest_change, abs(earlier - losses[-STAYS - 3]))
        jump = last[0] - base
        is_far = jump >= max(TIMES_CHANGE * self._largest_change, OF_LOSS * abs(base)) > 0
        stays = min(last) >= base + jump / 2
        if stays and is_far and self._has_ratios and len(losses) >= STAYS + 2 + LEAST_CHANGES:
            times = jump / self._largest_change if self._largest_change else math.inf
            seen = (
                f"{self._name} has jumped from {base:.3g} to {last[0]:.3g} in one step, {times:.3g} times its largest"
                " change before, and stays there"
            )
            yield Sighting(seen, since=self._steps[-STAYS], severity="warning")


_NORM = 'session.log({"grad_norm": ...}) in each step; the Hugging Face Trainer logs it, with logging_steps=1'

RISES = ((2, 1, 5.0, 30.0), (3, 1, 4.0, 4.0), (3, 3, 3.0, 3.0), (5, 5, 2.5, 2.5))
"""The last losses, the least number of losses before them, and the factors by which the least and the greatest of the
last ones are above all of the 20 before."""

SIGNED = 3
TIMES_SIGNED = 30.0
OF_SIGNED = ((SIGNED, 5, TIMES_SIGNED, TIMES_SIGNED),)
"""The same in magnitude, where a loss was 0 or negative."""

BLOCK = 20
LASTS = 5
"""Losses of which a level is the median; last losses that must all be above it."""

SPREADS = 4.0
LOST = 0.8
"""A rise above the best level, in spreads (95th percentile above the median); the share of the progress that is lost,
or of the best level where there is no progress."""

OF_FIRST = 2.5
FIRST_SPREADS = 3.0
"""How many times as large as the first loss the last ones are, where the loss rises before it has a level; the same in
standard deviations of the logarithm, since the first batch may be an easy one."""

MOST_ZEROS = 0.1
"""The share of losses of exactly 0 up to which the others are compared by their ratios."""

NEGLIGIBLE = 0.01
"""The share of the first loss below which no loss has diverged."""

FALLEN = 0.25
"""The share of a rise that is left when the loss has fallen again."""

TIMES_CHANGE = 10.0
OF_LOSS = 0.1
STAYS = 4
LEAST_CHANGES = 8
"""A jump of the loss: how many times as large as the largest change before, as a share of the loss, the losses in which
half of it stays, and the least number of changes before."""

FACTOR = 3.0
SIGMAS = 7.0
LEAST_NORMS = 20
NORMS = 128
"""Powers of two and standard deviations of the logarithm above the median of the norms before; how many of them."""

SPIKE = math.log2(5000)
"""Powers of two above the median for a single norm."""

WINDOW = 30
MEANS = (1, 8, 64, 512)
"""Points of a window, and the logged numbers of which a point is the mean; see also :data:`MOST_POINTS`."""

RISE = 1.0
"""Powers of two by which the median norm of a window's last third is above that of its first third."""

JUMP = 0.6
"""The share of the rise between two neighbouring sixths of a window above which the norm has jumped."""

FLAT = 0.01
RISING = 0.10
"""The share by which the loss may fall over the window, and the share by which it rises for a warning."""

CLIPPED = 50.0
CLIPPED_STEPS = 20
NEARLY_ALL_CLIPPED = 0.9
"""How many times the limit a gradient norm is before clipping, the last steps with clipping, and their share."""

FAR_CLIPPED = 1e4
"""The same for a warning: with SGD, next to nothing is left of a gradient."""

NEAR_GUESS = 0.1
"""The relative difference between a first loss and a multiple of the loss of a uniform guess."""


_REMEDY_OF_RATE = """
    Look at the learning-rate scheduler, and at code that sets the learning rate: it must not rise that far in one
    step. Resume from an earlier checkpoint
"""


class WeightJump(ParameterRule):
    def __init__(self) -> None:
        super().__init__(rule="weight-jump", needed=3)
        # Statistic -> its last collection step, and the logarithms of the weights in it, with their changes before it.
        self._last: dict[str, tuple[int, Floats]] = {}
        self._rise: Event | None = None
        self._changed: int | None = None  # the step of the last sudden change

    def step(self, numbers: StepNumbers) -> Sightings:
        for statistic in ("cur_amax", "std", "l2_norm"):
            weights = numbers.are_known(statistic, "weight")
            if not holds_any(weights):
                continue
            self.note_data(numbers.iteration)
            values = numbers.finite(statistic)
            bits = np.where(weights, numbers.bits(statistic), np.nan)
            last_iteration, last = self._last.get(statistic, (0, np.empty((0, 2))))
            last_bits, changes_before = extend_rows(last, len(bits), np.nan).T
            vanished = weights & (values == 0) & np.isfinite(last_bits)
            if statistic != "std" and holds_any(vanished):
                rows = np.flatnonzero(vanished).tolist()
                seen = f"all elements are 0, and were not in an earlier step; {many(len(rows), 'layer')}"
                layers = tuple(numbers.names[row] for row in rows)
                yield Sighting(seen, layers, "weight", numbers.column(statistic).label(rows[0]), numbers.iteration)
            jumped = np.abs(changes_before) <= STEADY
            jumped &= np.abs(bits - last_bits) >= WEIGHT_JUMP
            if total(jumped) >= max(2, total(weights) / 2):
                rows = numbers.in_order(np.flatnonzero(jumped).tolist())
                row = rows[0]
                label = numbers.column(statistic).label(row)
                seen = (
                    f"{label} has changed from {2 ** last_bits[row]:.3g} in step {last_iteration} to {values[row]:.3g},"
                    f" and by {2**WEIGHT_JUMP:g} times or more in {len(rows)} of {many(int(total(weights)), 'layer')}"
                )
                layers = tuple(numbers.names[row] for row in rows)
                yield self._of_optimizer(layers, label, seen, numbers.iteration)
            self._last[statistic] = numbers.iteration, np.array([bits, bits - last_bits]).T

    def event(self, event: Event) -> Sightings:
        for written in super().event(event):
            # It says more than the size of the change, in the step of the write or, after the optimizer's, in the next.
            replaces = self._changed is not None and written.since in (self._changed, self._changed + 1)
            yield written._replace(tensor="weight", key="", replaces=replaces)
        if event.kind == "learning_rate_rose":
            self._rise = event
        if event.kind == "changed" and event.data["kind"] == "weights":
            jump = self._of_optimizer(layers_of_change(event), "", event.text, event.iteration)
            if event.data["of_all"] and not jump.key:
                jump = jump._replace(severity="note")
            else:
                self._changed = event.iteration
            self.note_data((jump.since or 0) - 1)  # which was watched
            yield jump

    def _of_optimizer(self, layers: tuple[str, ...], statistic: str, seen: str, since: int) -> Sighting:
        """A jump in a step; the optimizer's if the learning rate rose before."""
        rise = self._rise
        jump = Sighting(seen, layers, "weight", statistic, since)
        last_good = max((step for step in self.steps if step < since), default=0)
        if rise is None or not min(last_good, since - changes.LEAST_HISTORY) <= rise.iteration <= since:
            return jump
        seen += f", after {rise.text[0].lower()}{rise.text[1:-1]} in step {rise.iteration}"
        return jump._replace(seen=seen, since=rise.iteration, key="rate", remedy=_REMEDY_OF_RATE)


WEIGHT_JUMP = 4.0
STEADY = 1.0
"""Powers of two of a jump between collection steps, and the most between those before it."""

_BACK = "A note once all such layers have one again. A layer is missed again after twice its longest gap"

OF_LAST_STEPS = "a tensor's largest magnitude is far above its last ones"
"""The title of a row of the rule growth."""

RULES = (
    Rule(
        id="nonfinite",
        title="the loss is inf or nan",
        subject="model",
        needs="the logged training loss",
        collect='session.log({"loss": ...}) in each step, named for example loss, train_loss or train/loss',
        condition=f"""
            the logged training loss (loss, train_loss, train/loss or similar) is inf or nan. A note if it is then
            finite in {FINITE_AGAIN} logged steps in a row, as where the script skips a batch
        """,
        silent="""
            evaluation losses; parts of the loss and other metrics, which may be nan without a value; overflow of
            gradients scaled for float16, which leaves the loss finite
        """,
        severity="error",
        source="arithmetic",
        why="the gradients become inf or nan in all layers, and the optimizer step breaks the weights",
        disproof="the script skips the batch, for example a batch without labels",
        remedy="""
            Resume from an earlier checkpoint and pass debug='activation_overflow' to the callback or session. It stops
            at the module and batch with the first inf or nan
        """,
        check=lambda: Logged(
            number=_training_loss,
            find=lambda check: _nonfinite(check, "the loss", "logged step"),
        ),
        essential=True,
        consequence_of=("nonfinite",),
    ),
    Rule(
        id="nonfinite",
        title="the gradient norm is inf or nan",
        subject="model",
        needs="the logged gradient norm",
        collect=_NORM,
        condition=f"""
            the gradient norm that the trainer logs is inf or nan, and no GradScaler scales the loss. A note if it is
            then finite {FINITE_AGAIN} times in a row, as where the script skips a step
        """,
        silent="a run with a GradScaler for float16, which skips such steps and lowers its scale",
        severity="error",
        source="arithmetic",
        why="an optimizer step with inf or nan gradients breaks the weights",
        disproof="the script skipped the step, and the next norms are finite",
        remedy="""
            Resume from an earlier checkpoint with debug='activation_overflow', which stops at the module and batch with
            the first inf or nan
        """,
        check=lambda: Logged(
            number=lambda check: None if check.run.settings.loss_is_scaled else _gradient_norm(check),
            find=_nonfinite_norm,
            kind_of_step="logged gradient norm",
        ),
        consequence_of=("nonfinite",),
    ),
    Rule(
        id="diverging-loss",
        title="the loss rises far above its noise",
        subject="model",
        needs="at least 3 steps of the logged training loss",
        collect='session.log({"loss": ...}) in each step, named for example loss, train_loss or train/loss',
        condition=f"""
            the last losses are far above the maximum of the 20 before: the last 2 by a factor of 5, one of them by 30;
            the last 3 by 4, or by 3 with at least 3 losses before; or the last 5 by 2.5, with at least 5 losses before.
            Or the last {LASTS} are above the best level (the median of {BLOCK} losses) by {SPREADS:g} times its spread
            (95th percentile minus median) and by {100 * LOST:g} % of the progress since the start, or of the level if
            there is no progress. Or, for a loss that was 0 or negative, the last {SIGNED} are {TIMES_SIGNED:g} times as
            large in magnitude as all of the 20 before. Or the last {LASTS} are all {OF_FIRST:g} times as large as the
            first loss, and {FIRST_SPREADS:g} standard deviations of the logarithm above it. Or it rises in one step by
            {TIMES_CHANGE:g} times its largest change before (of at least {LEAST_CHANGES}) and by {100 * OF_LOSS:g} %,
            and half of that stays for {STAYS} steps. An error if the loss is twice its first value, unless optimizers
            step in turn; else a warning. At the end of the run a note, if the loss has fallen again, so that
            {100 * FALLEN:g} % of the rise or less are left
        """,
        silent=f"""
            evaluation losses, parts of the loss, generator and critic losses; single spikes; losses below
            {100 * NEGLIGIBLE:g} % of the first one. For losses that were 0 or negative, as in reinforcement learning,
            only magnitudes are compared
        """,
        severity="error",
        source="calibrated on trainings of small models: docs/rules.md; the thresholds are this project's",
        why="a run whose loss has left its level seldom recovers, and its other statistics grow too",
        disproof="the data or the loss function changed at that step, and the loss falls again",
        remedy="""
            Lower the learning rate (with Adam, gradient clipping does not replace this), or use a longer warmup, and
            resume from an earlier checkpoint. If the loss jumped in one step, check that step for a restored
            checkpoint, overwritten weights, or a bad batch
        """,
        check=DivergingLoss,
        essential=True,
        consequence_of=("resume", "weight-jump", "learning-rate", "kept-gradient", "growth of weight", OF_LAST_STEPS),
    ),
    Rule(
        id="gradient-norm",
        title="the gradient norm jumps far above its earlier values",
        subject="model",
        needs=f"at least {LEAST_NORMS} steps of the logged gradient norm",
        collect=_NORM,
        condition=f"""
            the gradient norm is at least 2^{FACTOR:g} times the median of the last {NORMS}, and {SIGMAS:g} standard
            deviations of its logarithm (from the median deviation) above it. A warning if 3 norms in a row are, or if
            one is 5,000 times the median; else a note
        """,
        silent="nothing: a few large norms, which clipping handles, are a note",
        source="OLMo 2, arXiv 2501.00656 (7 sigma of the last 1,000 steps); SPAM, arXiv 2501.06842 (5,000 times)",
        why="a large step can undo what was learned",
        disproof="the learning rate or the data changed at that step, and the loss continues as before",
        remedy="""
            Clip the gradient norm, or lower the learning rate. Check the batch of that step, and skip it if it is
            damaged
        """,
        check=lambda: Logged(
            needed=LEAST_NORMS, number=_positive_norm, find=_jump, kind_of_step="logged gradient norm"
        ),
        consequence_of=("resume", "weight-jump", "diverging-loss"),
    ),
    Rule(
        id="gradient-norm",
        title="the gradient norm creeps up while the loss no longer falls",
        subject="model",
        needs=f"at least {WINDOW} steps of the logged training loss and gradient norm",
        collect="""
            session.log({"loss": ..., "grad_norm": ...}) in each step; the Hugging Face Trainer logs both, with
            logging_steps=1
        """,
        condition=f"""
            over {WINDOW} logged steps, or over {WINDOW} means of {", ".join(map(str, MEANS[1:]))} logged steps each,
            the median gradient norm of the last third is at least 2^{RISE:g} times that of the first third, with the
            middle third in between and without a jump, and the loss has not fallen by {100 * FLAT:g} %. A warning if it
            has risen by {100 * RISING:g} % or more, beyond its quartiles; else a note
        """,
        silent="a loss that still falls, norms after clipping, evaluation losses",
        source="arXiv 2506.20752: in MX formats it precedes spikes without recovery; the thresholds are this project's",
        why="with block formats a slowly growing gradient norm came before runs diverged",
        disproof="the learning rate or the data changed at that step, or a BF16 run has the same norm",
        remedy="""
            Resume from an earlier checkpoint with a lower learning rate, or with the low-precision parts in BF16: the
            forward, or activations and LayerNorm
        """,
        cost="higher precision runs at the speed of BF16",
        check=lambda: Logged(
            needed=WINDOW,
            number=lambda check: _positive_norm(check) if math.isfinite(check.loss) else None,
            find=_creeps_up,
        ),
    ),
    Rule(
        id="gradient-norm",
        title="the gradients have the wrong size",
        subject="model",
        needs=f"at least {CLIPPED_STEPS} steps with torch.nn.utils.clip_grad_norm_",
        collect="clipping by torch.nn.utils.clip_grad_norm_, which a session observes",
        condition=f"""
            before clipping, the gradient norm is at least {CLIPPED:g} times the limit in {100 * NEARLY_ALL_CLIPPED:g} %
            of {CLIPPED_STEPS} steps; a warning from {FAR_CLIPPED:,.0f} times on
        """,
        silent="clipping by a limit of inf, which only measures the norm; clipping by DeepSpeed, Megatron or FSDP",
        source="Megatron-LM issue 1532: a loss that was a sum over tokens; the thresholds are this project's",
        why="""
            clipping then sets the size of each step, and the part of the gradient that is too large hides all other
            parts
        """,
        disproof="the limit is small on purpose, to normalize all gradients",
        remedy="""
            Look for a loss, or an auxiliary loss, that is a sum instead of a mean over tokens or micro-batches. With a
            GradScaler, call scaler.unscale_(optimizer) before clipping. If the loss is right, raise the limit to the
            usual norm
        """,
        check=lambda: Logged(
            needed=CLIPPED_STEPS,
            number=_clipped,
            find=_far_clipped,
            applies=False,
            kind_of_step="clipped step",
        ),
    ),
    Rule(
        id="gradient-norm",
        title="the gradients have the wrong size, as the first loss shows",
        subject="model",
        needs="the logged training loss",
        collect='session.log({"loss": ...}) in each step',
        condition=f"""
            the first loss is, within {100 * NEAR_GUESS:g} %, N times ln(outputs of the model's last layer), and a step
            has N micro-batches
        """,
        silent="a single micro-batch",
        severity="note",
        source="insightface issue 2258: a loss that was not divided; the threshold is this project's",
        why="the gradients, and all thresholds on them, are as many times too large as a step has micro-batches",
        disproof="only the logged value is a sum",
        remedy=_DIVIDE,
        check=lambda: Logged(number=_first_loss, find=_is_sum, applies=False),
    ),
    Rule(
        id="gradient-norm",
        title="clipping by the norm of a part of the gradients",
        subject="layer",
        needs="steps of a torch.optim optimizer",
        collect="at least 6 steps of the optimizer",
        condition=f"""
            in {UNCLIPPED} steps of an optimizer, torch's clip_grad_norm_ got some of its parameters with gradients, and
            not these. Or, in a sampled step, the norms by which ranks have clipped differ by {NORMS_DIFFER:.1%} or
            more: a warning
        """,
        silent="""
            an optimizer that steps none of the clipped parameters; clipping of master weights or without torch; norms
            of DTensors, which torch adds up
        """,
        severity="note",
        source="arithmetic; the number of steps is this project's",
        why="the logged norm lacks their part, and their gradients are not limited",
        disproof="a part is clipped on purpose",
        remedy="Pass all parameters of the optimizer to clip_grad_norm_, for example model.parameters()",
        check=lambda: ParameterRule(rule="gradient-norm"),
    ),
    Rule(
        id="weight-jump",
        title="weights are overwritten, or jump by the learning rate",
        subject="layer",
        needs="steps of a torch optimizer; cur_amax, std or l2_norm of weights in at least 3 collection steps",
        collect="LogTensorStats with tensors: [weight] and stats: [cur_amax], or the default config; and a longer run",
        condition=f"""
            amax, std or norm of the weights of at least 2 layers, and of half of all, changes by 2^{WEIGHT_JUMP:g} or
            more between two collection steps, up or down, after a change of at most 2^{STEADY:g} before. Or a weight is
            0 in a collection step, and was not before. Or code has written a weight in place between two optimizer
            steps, more often than ever, and the sampled elements are 0, are those of one of the 8 samples of the weight
            again (the first and the last ones; sampled at least every 100 steps, and at checkpoints), or differ from
            the last sample by half their norm and 8 times the ordinary change. Or a weight's largest magnitude stayed
            within 2^{changes.STEADY:g} for 16 to 32 steps, and leaves their range by 2^{changes.SPIKE["weight"]:g} in
            one step. Or a sample of a layer's weight changes from step to step by {changes.LEAST_UPDATE:.0%} of its
            norm or more, and by 2^{changes.SPIKE_OF_UPDATE:g} times as much as in each of the {changes.LEAST_HISTORY}
            updates before; a note if nearly all weights do so at once, as where a script writes averages. It is the
            optimizer's if the learning rate rose by 10 times in one of the {changes.LEAST_HISTORY} steps before
        """,
        silent="""
            weights that grow from 0 or from small values; a learning rate that is large from the start; regular writes,
            such as clamping; averaged weights that are swapped in for an evaluation, and out again. Smaller writes
            through .data and flat buffers, which do not raise the version, old values of other steps, and other values
            than 0 in weights that exist only quantized: see diverging-loss
        """,
        source="NVIDIA/Megatron-LM#5236 (overwritten at a checkpoint), #1842 (after a resume); factor: this project",
        why="an optimizer step with a usual learning rate does not do this, and it undoes what was learned",
        disproof="the script set or rescaled the weights at that step",
        remedy="""
            Find the code that writes weights between these steps: saving or restoring a checkpoint, gathering sharded
            weights, copying master weights, in-place quantization. If there is none, look at the optimizer's state of
            the weight. Resume from an earlier checkpoint
        """,
        check=WeightJump,
        consequence_of=("diverging-loss",),
    ),
    Rule(
        id="uncalled-layer",
        title="a layer does not run any more",
        subject="layer",
        needs=NEEDS_EACH_STEP,
        collect=COLLECT_EACH_STEP,
        condition=f"""
            a layer had a GEMM in each of {LEAST_PRESENT} training steps in a row, and has had none for {LEAST_ABSENT}
            steps, in which other layers had. {_BACK}
        """,
        silent="layers that are left out at random, or in turn, from the start",
        source="this project",
        why="its weights do not change any more, and the model without it is another model",
        disproof="the script leaves the layer out on purpose from that step on",
        remedy="Look for what chooses the layers of a step: a schedule, the data, routing, early exits, eval()",
        check=lambda: Changed(kinds=("uncalled",), find=find_absences),
        consequence_of=("evaluation-mode",),
    ),
    Rule(
        id="frozen-layer",
        title="the weights of a layer get no gradient any more",
        subject="layer",
        needs=NEEDS_EACH_STEP,
        collect=COLLECT_EACH_STEP,
        condition=f"""
            a layer had a wgrad other than 0 in each of {LEAST_PRESENT} training steps in a row, and has had none for
            {LEAST_ABSENT} steps, in which its forward ran. Or the gradient of a matrix was not 0 at the optimizer's
            steps in {LEAST_PRESENT} steps, and then is 0 at {LEAST_ABSENT} of them in a row. {_BACK}
        """,
        silent="""
            layers that are trained in turn from the start; at the optimizer's step also layers in lists of a block,
            such as experts
        """,
        source="this project",
        why="its weights do not learn any more",
        disproof="the script freezes the layer on purpose from that step on",
        remedy="""
            Look for what stops the gradient: requires_grad_(False), detach(), torch.no_grad(), a loss term or a gate
            that is 0 from that step on, code or hooks that set gradients to 0. After a spike under delayed scaling,
            gradients may be 0 until its amax leaves the history: use a shorter amax_history_len, or current scaling
        """,
        consequence_of=("growth", "stale-scale", "uncalled-layer", "evaluation-mode"),
        check=lambda: Changed(kinds=("frozen",), find=find_absences),
    ),
)
