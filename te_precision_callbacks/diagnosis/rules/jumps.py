"""Rules on sudden changes: a loss that diverges, a gradient norm that jumps or is inf or nan, weights that jump."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.diagnosis.rules.parameters import ParameterRule
from te_precision_callbacks.diagnosis.rules.training import FiniteAgain, GradientNorms, training_losses
from te_precision_callbacks.flight import changes
from te_precision_callbacks.flight.rows import FINITE_AGAIN
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, Mask, holds_any, total


class DivergingLoss(RuleCheck):
    kind_of_step = "logged loss value"

    def __init__(self) -> None:
        super().__init__(3)
        self._curves: dict[str, _Curve] = {}
        self._restored: list[float] = []
        self._restored_at = 0

    def event(self, event: Event) -> Iterator[Sighting]:
        losses = event.data.get("losses") if event.kind == "losses_restored" else None
        if isinstance(losses, list) and all(isinstance(loss, (int, float)) and math.isfinite(loss) for loss in losses):
            self._restored = losses
            self._restored_at = event.iteration
        if event.kind in ("segment_ended", "stopped"):
            risen = [curve for curve in self._curves.values() if curve.since is not None]
            if risen and all(curve.has_fallen for curve in risen):
                yield risen[0].fallen()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterator[Sighting]:
        for name in training_losses(values):
            if not math.isfinite(values[name]):
                continue
            self.note_data(iteration)
            if name not in self._curves:
                self._curves[name] = _Curve(name)
                for loss in self._restored:
                    deque(self._curves[name].add(self._restored_at, loss), maxlen=0)
            yield from self._curves[name].add(iteration, values[name])


class _Curve:
    """The history of one loss.

    For a loss that was negative, or is often 0, as in reinforcement learning, ratios make no sense: its lost progress
    and its magnitude are checked instead.
    """

    def __init__(self, name: str) -> None:
        self.since: int | None = None
        self._name = name
        self._start: list[float] = []
        self._steps: deque[int] = deque(maxlen=BLOCK + LASTS)
        self._losses: deque[float] = deque(maxlen=BLOCK + LASTS)
        self._block: list[float] = []
        self._best: tuple[float, float] | None = None
        self._spreads: deque[float] = deque(maxlen=3)
        self._least = math.inf
        self._count = self._zeros = 0
        self._largest_change = 0.0  # without the last STAYS + 1
        self._limit: tuple[float, float] | None = None
        self._level = 0.0  # before the first rise
        self._peak = -math.inf  # since then

    def add(self, iteration: int, loss: float) -> Iterator[Sighting]:
        self._least = min(self._least, loss)
        self._count += 1
        self._zeros += loss == 0
        if len(self._start) < 3:
            self._start.append(loss)
        self._steps.append(iteration)
        self._losses.append(loss)
        risen = self._rise() or self._lost_level() or self._risen_from_first()
        if risen is not None and not self._is_negligible(risen[0]):
            count, level = risen
            last = self._last(count)
            self._limit = min(last), level
            since = self._steps[-count]
            if self.since is None:
                self.since = since
                self._level = level
                self._peak = max(last)
            yield self._sighting(since, f"{self._name} has risen from {level:.3g} to {statistics.median(last):.3g}")
        elif self._limit is not None and loss >= self._limit[0]:
            yield self._sighting(iteration, f"{self._name} is {loss:.3g}, after {self._limit[1]:.3g}")
        self._peak = max(self._peak, loss)
        if len(self._losses) > LASTS:
            self._add_level(self._losses[-LASTS - 1])
        yield from self._jump()

    def _last(self, count: int) -> list[float]:
        return list(self._losses)[-count:]

    @property
    def _has_ratios(self) -> bool:
        return self._least >= 0 and self._start[0] > 0 and self._zeros <= MOST_ZEROS * self._count

    @property
    def has_fallen(self) -> bool:
        """Return whether the last losses are near the level before the rise again."""
        last = self._last(LASTS)
        is_usual = max(last) <= max(self._start[0], RISES[-1][2] * self._level)
        return is_usual and max(last) <= self._level + FALLEN * (self._peak - self._level)

    def fallen(self) -> Sighting:
        last = statistics.median(self._last(LASTS))
        seen = f"{self._name} rose from {self._level:.3g} to {self._peak:.3g}, and has fallen to {last:.3g} again"
        return Sighting(seen, since=self.since, severity="note", replaces=True)

    def _sighting(self, since: int, seen: str) -> Sighting:
        start = statistics.median(self._start[:1] if len(self._losses) <= BLOCK else self._start)
        last = min(self._last(2))
        severity: Severity = "error" if self._has_ratios and last >= 2 * start else "warning"
        return Sighting(seen, since=since, severity=severity)

    def _is_negligible(self, count: int) -> bool:
        """Return whether the last losses are a small part of the first one, as a loss that has become nearly 0."""
        return self._has_ratios and max(self._last(count)) < NEGLIGIBLE * self._start[0]

    def _risen_from_first(self) -> tuple[int, float] | None:
        """The number of last losses that are all far above the first loss of the run, and that loss; or None."""
        first = self._start[0]
        if not self._has_ratios or len(self._losses) <= LASTS or min(self._last(LASTS)) < OF_FIRST * first:
            return None
        others = self._last(BLOCK)
        others = others[1:] if len(self._losses) <= BLOCK else others
        others = [math.log(loss) for loss in others if loss]
        distance = statistics.mean(others[-LASTS:]) - math.log(first)
        if distance >= FIRST_SPREADS * statistics.stdev(others):
            return (LASTS, first)
        return None

    def _rise(self) -> tuple[int, float] | None:
        """The number of last losses that are far above all losses before, and the median of these; or None."""
        values = list(self._losses)
        if not self._has_ratios:  # compare magnitudes
            before = values[-BLOCK - SIGNED : -SIGNED]
            last = values[-SIGNED:]
            if len(before) >= LASTS and min(map(abs, last)) >= TIMES_SIGNED * max(map(abs, before)) > 0:
                return SIGNED, statistics.median(before)
        for count, least, low, high in RISES:
            before = values[-BLOCK - count : -count]
            last = values[-count:]
            if len(before) >= least and self._has_ratios:
                top = max(before)
                if top > 0 and min(last) >= low * top and max(last) >= high * top:
                    return count, statistics.median(before)
        return None

    def _lost_level(self) -> tuple[int, float] | None:
        """The number of last losses that have lost much of the progress, and the best level; or None."""
        if self._best is None:
            return None
        level, spread = self._best
        rise = min(self._last(LASTS)) - level
        spread = max(spread, *self._spreads)
        progress = statistics.median(self._start) - level
        gained = progress if progress > SPREADS * spread else level if self._has_ratios else 0.0
        if gained > 0 and rise >= max(SPREADS * spread, LOST * gained):
            return (LASTS, level)
        return None

    def _jump(self) -> Iterator[Sighting]:
        """Find a jump from one step to the next that stays: code may have written the weights."""
        values = list(self._losses)
        if len(values) <= STAYS + 2:
            return
        self._largest_change = max(self._largest_change, abs(values[-STAYS - 2] - values[-STAYS - 3]))
        if len(values) < STAYS + 2 + LEAST_CHANGES or not self._has_ratios:
            return
        before, first = values[-STAYS - 1 : -STAYS + 1]
        jump = first - before
        stays = min(values[-STAYS:]) >= before + jump / 2
        if stays and jump >= max(TIMES_CHANGE * self._largest_change, OF_LOSS * abs(before)) > 0:
            times = jump / self._largest_change if self._largest_change else math.inf
            seen = (
                f"{self._name} has jumped from {before:.3g} to {first:.3g} in one step, {times:.3g} times its largest"
                " change before, and stays there"
            )
            yield Sighting(seen, since=self._steps[-STAYS], severity="warning")

    def _add_level(self, loss: float) -> None:
        self._block.append(loss)
        if len(self._block) < BLOCK:
            return
        level = statistics.median(self._block)
        spread = sorted(self._block)[int(0.95 * BLOCK) - 1] - level
        self._block.clear()
        self._spreads.append(spread)
        if self._best is None or level < self._best[0]:
            self._best = level, spread


class GradientJump(RuleCheck):
    kind_of_step = "logged gradient norm"

    def __init__(self) -> None:
        super().__init__(LEAST_NORMS)
        self._chosen = GradientNorms()
        self._norms: deque[float] = deque(maxlen=NORMS)
        self._high: list[float] = []
        self._since = 0  # the first step of these

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterator[Sighting]:
        name, norm = self._chosen.choose(values)
        if not (math.isfinite(norm) and norm > 0):
            return
        self.note_data(iteration)
        bits = math.log2(norm)
        if len(self._norms) >= LEAST_NORMS:
            before = np.array(self._norms)
            middle = float(np.median(before))
            sigma = 1.4826 * float(np.median(np.abs(before - middle)))
            if bits < middle + max(FACTOR, SIGMAS * sigma):
                self._high.clear()
            else:
                if not self._high:
                    self._since = iteration
                self._high.append(bits)
                rise = min(self._high[-3:]) - middle
                lasts = len(self._high) >= 3
                severity: Severity = "warning" if lasts or bits - middle >= SPIKE else "note"
                times = 2 ** (rise if lasts else bits - middle)
                seen = f"{name} is {norm:.3g}, {times:.3g} times the median before"
                yield Sighting(seen, since=self._since, severity=severity)
                if len(self._high) < NORMS // 4:
                    return  # a jump joins the baseline only if it lasts
        self._norms.append(bits)


class NonfiniteGradientNorm(RuleCheck):
    kind_of_step = "logged gradient norm"

    def __init__(self) -> None:
        super().__init__()
        self._chosen = GradientNorms()
        self._is_scaled: bool | None = None
        self._waiting: list[Sighting] = []
        self._steps = FiniteAgain("the gradient norm", "step")

    def facts(self, facts: Facts) -> Iterator[Sighting]:
        if facts.settings is not None:
            self._is_scaled = facts.settings.loss_is_scaled
            self.applies = not self._is_scaled
            yield from self._release()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterator[Sighting]:
        name, norm = self._chosen.choose(values)
        if not name or self._is_scaled:
            return
        self.note_data(iteration)
        if not math.isfinite(norm):
            self._steps.add_bad()
            self._waiting.append(Sighting(f"{name} is {norm}", since=iteration))
        else:
            self._waiting += self._steps.add_finite()
        yield from self._release()

    def _release(self) -> Iterator[Sighting]:
        if self._is_scaled is not None:
            waiting = self._waiting
            self._waiting = []
            yield from () if self._is_scaled else waiting


_REMEDY_OF_RATE = (
    "Look at the learning-rate scheduler, and at code that sets the learning rate: it must not rise that far in one"
    " step. Resume from an earlier checkpoint"
)


class _Sizes(NamedTuple):
    """The logarithms of a statistic of the weights in a collection step, and their changes before it; [rows]."""

    iteration: int
    bits: Floats
    changes: Floats


class WeightJump(ParameterRule):
    def __init__(self) -> None:
        super().__init__("weight-jump", 3)
        self._last: dict[str, _Sizes] = {}  # by statistic
        self._rise: Event | None = None
        self._changed: int | None = None  # the step of the last sudden change

    def step(self, numbers: StepNumbers) -> Iterator[Sighting]:
        for statistic in ("cur_amax", "std", "l2_norm"):
            weights = numbers.are_known(statistic, "weight")
            if not holds_any(weights):
                continue
            self.note_data(numbers.iteration)
            values = np.where(weights, numbers.finite(statistic), np.nan)
            bits: Floats = np.log2(np.where(values == 0, np.nan, values))
            unknown = np.full(len(bits), np.nan)
            last = self._last.get(statistic, _Sizes(0, unknown, unknown))
            before = extend_rows(last.bits, len(bits), np.nan)
            vanished = (values == 0) & np.isfinite(before)
            if statistic != "std" and holds_any(vanished):
                layers = self._layers(numbers, vanished)
                seen = f"all elements are 0, and were not in an earlier step; {many(len(layers), 'layer')}"
                label = numbers.column(statistic).label(int(vanished.argmax()))
                yield Sighting(seen, layers, "weight", label, numbers.iteration)
            jumped = np.abs(extend_rows(last.changes, len(bits), np.nan)) <= STEADY
            jumped &= np.abs(bits - before) >= WEIGHT_JUMP
            count = int(total(jumped))
            if count >= max(2, total(weights) / 2):
                layers = self._layers(numbers, jumped)
                row = next(row for row in np.flatnonzero(jumped).tolist() if numbers.names[row] == layers[0])
                label = numbers.column(statistic).label(row)
                seen = (
                    f"{label} has changed from {2 ** before[row]:.3g} in step {last.iteration} to {values[row]:.3g},"
                    f" and by {2**WEIGHT_JUMP:g} times or more in {count} of {many(int(total(weights)), 'layer')}"
                )
                yield self._of_optimizer(layers, label, seen, numbers.iteration)
            self._last[statistic] = _Sizes(numbers.iteration, bits, bits - before)

    @staticmethod
    def _layers(numbers: StepNumbers, weights: Mask) -> tuple[str, ...]:
        return tuple(numbers.facts.sort_by_execution(numbers.names_of(weights), "weight"))

    def event(self, event: Event) -> Iterator[Sighting]:
        for written in super().event(event):
            # It says more than the size of the change, in the step of the write or, after the optimizer's, in the next.
            replaces = self._changed is not None and written.since in (self._changed, self._changed + 1)
            yield written._replace(tensor="weight", key="", replaces=replaces)
        if event.kind == "learning_rate_rose":
            self._rise = event
        if event.kind == "changed" and event.data["kind"] == "weights":
            layers = tuple(layer for layer, _ in event.data["slots"])
            jump = self._of_optimizer(layers, "", event.text, event.iteration)
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
        before = max((step for step in self.steps if step < since), default=0)
        if rise is None or not min(before, since - changes.LEAST_HISTORY) <= rise.iteration <= since:
            return jump
        seen += f", after {rise.text[0].lower()}{rise.text[1:-1]} in step {rise.iteration}"
        return jump._replace(seen=seen, since=rise.iteration, key="rate", remedy=_REMEDY_OF_RATE)


_NORM = 'session.log({"grad_norm": ...}) in each step; the Hugging Face Trainer logs it, with logging_steps=1'

RISES = ((2, 1, 5.0, 30.0), (3, 1, 4.0, 4.0), (3, 3, 3.0, 3.0), (5, 5, 2.5, 2.5))
"""The last losses, the least number of losses before them, and the factors by which the least and the greatest of the
last ones are above all of the 20 before."""

SIGNED = 3
TIMES_SIGNED = 30.0
"""The last losses, and how many times as large as all of the 20 before they are, where a loss was 0 or negative."""

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

WEIGHT_JUMP = 4.0
STEADY = 1.0
"""Powers of two of a jump between collection steps, and the most between those before it."""

RULES = (
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
            and half of that stays for {STAYS} steps. An error if the loss is twice its first value; else a warning. At
            the end of the run a note, if the loss has fallen again, so that {100 * FALLEN:g} % of the rise or less are
            left
        """,
        silent=f"""
            evaluation losses, parts of the loss, generator and critic losses; single spikes; losses below
            {100 * NEGLIGIBLE:g} % of the first one. For losses that were 0 or negative, as in reinforcement learning,
            only magnitudes are compared
        """,
        severity="error",
        source="calibrated on trainings of small models: docs/proof.md; the thresholds are this project's",
        why="a run whose loss has left its level seldom recovers, and its other statistics grow too",
        disproof="the data or the loss function changed at that step, and the loss falls again",
        remedy="""
            Lower the learning rate (with Adam, gradient clipping does not replace this), or use a longer warmup, and
            resume from an earlier checkpoint. If the loss jumped in one step, check that step for a restored
            checkpoint, overwritten weights, or a bad batch
        """,
        check=DivergingLoss,
        essential=True,
        consequence_of=("weight-jump", "learning-rate"),
    ),
    Rule(
        id="gradient-jump",
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
        severity="warning",
        source="OLMo 2, arXiv 2501.00656 (7 sigma of the last 1,000 steps); SPAM, arXiv 2501.06842 (5,000 times)",
        why="a large step can undo what was learned",
        disproof="the learning rate or the data changed at that step, and the loss continues as before",
        remedy="""
            Clip the gradient norm, or lower the learning rate. Check the batch of that step, and skip it if it is
            damaged
        """,
        check=GradientJump,
        consequence_of=("weight-jump", "diverging-loss"),
    ),
    Rule(
        id="nonfinite-gradient-norm",
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
        check=NonfiniteGradientNorm,
        consequence_of=("nonfinite-loss", "nonfinite"),
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
        severity="warning",
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
)
