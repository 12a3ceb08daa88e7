"""Rules on metrics of the trainer: a loss that is inf or nan, a gradient norm that grows without a falling loss."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.base.counts import many, some_of
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.flight.rows import FINITE_AGAIN
from te_precision_callbacks.runs.summary import is_loss, is_training_loss, loss_first, words_of
from te_precision_callbacks.statistics.names import CLIPPED_NORM, CLIPPING_LIMIT

_OF_EVALUATION = frozenset({"eval", "val", "valid", "validation", "test"})


def training_losses(values: Iterable[str]) -> list[str]:
    """The names of training losses among the trainer's metrics, the most likely one first."""
    return loss_first(filter(is_training_loss, values))


def _other_losses(values: Iterable[str]) -> list[str]:
    """The names of losses that may be of the training, or parts of one."""
    return [name for name in values if is_loss(name) and words_of(name).isdisjoint(_OF_EVALUATION)]


class GradientNorms:
    """Chooses the gradient norm among the trainer's metrics: a logged one in runs that log one in most steps, else the
    norm that clipping was seen to use.
    """

    def __init__(self) -> None:
        self._logged = self._clipped = 0  # steps with such a norm

    def choose(self, values: Mapping[str, float]) -> tuple[str, float]:
        """Return name and norm, of several ones a norm that is inf or nan; an empty name and nan without a norm."""
        norms = [name for name in values if {"grad", "norm"} <= words_of(name) or "gradnorm" in words_of(name)]
        self._logged += any(name != CLIPPED_NORM for name in norms)
        self._clipped += CLIPPED_NORM in norms
        is_logged = 2 * self._logged > self._clipped

        def order(name: str) -> tuple[bool, bool, int, str]:
            return math.isfinite(values[name]), name != "grad_norm", len(name), name

        name = min((name for name in norms if (name != CLIPPED_NORM) == is_logged), key=order, default="")
        return name, values.get(name, math.nan)


OF_SKIPPED_STEP = (
    "Nothing, if the script skips such a step on purpose, and the forward updates no buffers, as BatchNorm does: they"
    " are not checked. Otherwise look for the cause: debug='activation_overflow' stops at the module and batch"
)

UNFILTERED = "loss_step"
"""The loss of a step as the backward gets it, from a trainer that leaves inf and nan out of what it logs."""


class FiniteAgain:
    """Counts the steps with inf or nan in a number of the trainer, and the finite ones since the last of them."""

    def __init__(self, what: str, step: str) -> None:
        self._what = what
        self._step = step
        self._bad = self._finite = 0

    def add_bad(self) -> None:
        self._bad += 1
        self._finite = 0

    def add_finite(self) -> Iterator[Sighting]:
        """Add a finite step; yield a note with :data:`FINITE_AGAIN` of them in a row after others."""
        self._finite += 1
        if self._bad and self._finite == FINITE_AGAIN:
            seen = f"{self._what} was inf or nan in {many(self._bad, self._step)}, and is finite again"
            yield Sighting(seen, severity="note", remedy=OF_SKIPPED_STEP, replaces=True)


class _Point(NamedTuple):
    iteration: int
    norm: float
    loss: float


class NonfiniteLoss(RuleCheck):
    kind_of_step = "logged step"

    def __init__(self) -> None:
        super().__init__()
        self._others: dict[str, None] = {}
        self._is_filtered = False
        self._has_unfiltered = False
        self._steps = FiniteAgain("the loss", "logged step")

    @property
    def why_not(self) -> str:
        if self._is_filtered:
            return (
                "the Trainer filters inf and nan from the logged loss: set logging_nan_inf_filter=False in"
                " TrainingArguments"
            )
        if self._others:
            return (
                f"no logged name clearly is the training loss (logged: {some_of(self._others)}): also log it as loss or"
                " train_loss"
            )
        return ""

    def facts(self, facts: Facts) -> Iterator[Sighting]:
        if facts.settings is not None:
            self._is_filtered = facts.settings.loss_is_filtered
            self.checked &= self._has_unfiltered or not self._is_filtered
        yield from ()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterator[Sighting]:
        losses = training_losses(values)
        self._has_unfiltered |= UNFILTERED in values
        if losses:
            self.note_data(iteration)
            self.checked &= self._has_unfiltered or not self._is_filtered
        elif not self.checked:
            self._others.update(dict.fromkeys(_other_losses(values)))
        for name in losses:
            if not math.isfinite(values[name]):
                self._steps.add_bad()
                yield Sighting(f"{name} is {values[name]}", since=iteration)
                return
        if losses:
            yield from self._steps.add_finite()


class GradientNorm(RuleCheck):
    """Checks windows of the last values, and windows of means over more steps, for slow growth."""

    kind_of_step = "logged step"

    def __init__(self) -> None:
        super().__init__(WINDOW)
        self._chosen = GradientNorms()
        self._loss = math.nan
        self._windows: dict[int, deque[_Point]] = defaultdict(lambda: deque(maxlen=WINDOW))
        self._waiting: dict[int, list[_Point]] = defaultdict(list)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterator[Sighting]:
        losses = _other_losses(values)
        if losses:
            self._loss = values[loss_first(losses)[0]]
        name, norm = self._chosen.choose(values)
        if not (math.isfinite(norm) and norm > 0 and math.isfinite(self._loss)):
            return
        self.note_data(iteration)
        point = _Point(iteration, math.log2(norm), self._loss)
        for count in MEANS:
            waiting = self._waiting[count]
            waiting.append(point)
            if len(waiting) < (OF_MEAN if count > 1 else 1):
                return  # no new point for windows of longer means either
            mean = _Point(
                waiting[0].iteration,
                sum(logged.norm for logged in waiting) / len(waiting),
                sum(logged.loss for logged in waiting) / len(waiting),
            )
            waiting.clear()
            self._windows[count].append(mean)
            point = mean
            yield from self._check_window(count, name)

    def _check_window(self, count: int, name: str) -> Iterator[Sighting]:
        window = self._windows[count]
        if len(window) < WINDOW:
            return
        _, norms, losses = np.array(window).T
        losses = losses.reshape(3, -1)
        first, middle, last = np.median(norms.reshape(3, -1), axis=1).tolist()
        rise = last - first
        jump = np.diff(np.median(norms.reshape(6, -1), axis=1)).max()
        if rise < RISE or min(middle - first, last - middle) < RISE / 4 or jump > JUMP * rise:
            return
        before, _, after = np.median(losses, axis=1).tolist()
        change = (after - before) / max(abs(before), 1e-12)
        if change < -FLAT:
            return
        apart = np.percentile(losses[2], 25) > np.percentile(losses[0], 75)
        severity: Severity = "warning" if change >= RISING and apart else "note"
        seen = (
            f"{name} has become {2**rise:.3g} times as large in {WINDOW * count} logged steps, while the"
            f" loss has changed by {100 * change:+.2g} %"
        )
        yield Sighting(seen, since=window[0].iteration, severity=severity)


class GradientSize(RuleCheck):
    """Checks the gradient norm against the limit of clipping, and the first loss against a uniform guess."""

    kind_of_step = "clipped step"
    applies = False

    def __init__(self) -> None:
        super().__init__(CLIPPED_STEPS)
        self._clipped: deque[int] = deque(maxlen=CLIPPED_STEPS)  # the last steps with clipping
        self._ratios: deque[float] = deque(maxlen=CLIPPED_STEPS)  # the norm before it, to its limit
        self._first: tuple[int, str, float] | None = None
        self._heads: list[LayerFacts] = []
        self._micro_batches = 0

    def facts(self, facts: Facts) -> Iterator[Sighting]:
        self._heads = facts.heads
        self._micro_batches = min((layer.calls for layer in facts.layers.values() if layer.calls), default=0)
        yield from self._check_first_loss()

    def scalars(self, iteration: int, values: Mapping[str, float]) -> Iterator[Sighting]:
        losses = training_losses(values)
        if losses and self._first is None:
            self._first = iteration, losses[0], values[losses[0]]
            yield from self._check_first_loss()
        norm = values.get(CLIPPED_NORM, math.nan)
        limit = values.get(CLIPPING_LIMIT, math.nan)
        if not (math.isfinite(norm) and math.isfinite(limit) and limit > 0):
            return
        self.applies = True
        self.note_data(iteration)
        self._clipped.append(iteration)
        self._ratios.append(norm / limit)
        clipped = sorted(self._ratios)
        least = clipped[round((1 - NEARLY_ALL_CLIPPED) * len(clipped))]
        if len(clipped) == CLIPPED_STEPS and least >= CLIPPED:
            seen = (
                f"the gradient norm was at least {least:.3g} times the limit of clipping ({limit:.3g}) in"
                f" {sum(ratio >= least for ratio in clipped)} of {CLIPPED_STEPS} steps"
            )
            severity: Severity = "warning" if least >= FAR_CLIPPED else "note"
            yield Sighting(seen, since=self._clipped[0], severity=severity, key="clipped")

    def _check_first_loss(self) -> Iterator[Sighting]:
        if self._first is None:
            return
        iteration, name, loss = self._first
        count = self._micro_batches
        for head in self._heads:
            classes = head.shape[0]
            guess = math.log(max(classes, 2))
            if count > 1 and abs(loss / (count * guess) - 1) <= NEAR_GUESS:
                seen = (
                    f"the first {name} is {loss:.3g}, {count} times that of a uniform guess among {classes} classes"
                    f" ({guess:.3g}), and a step has {count} micro-batches"
                )
                yield Sighting(seen, since=iteration, severity="note", key="first loss", remedy=_DIVIDE)


_DIVIDE = (
    "Divide the loss of each micro-batch by the number of micro-batches before backward(), unless only the logged"
    " value is a sum. Otherwise the gradients are that many times too large"
)

WINDOW = 30
OF_MEAN = 8
MEANS = (1, 8, 64, 512)
"""Points of a window; a point of the next window is the mean of so many; how many logged numbers that makes."""

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

RULES = (
    Rule(
        id="nonfinite-loss",
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
        check=NonfiniteLoss,
        essential=True,
        consequence_of=("nonfinite",),
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
        severity="warning",
        source="arXiv 2506.20752: in MX formats it precedes spikes without recovery; the thresholds are this project's",
        why="with block formats a slowly growing gradient norm came before runs diverged",
        disproof="the learning rate or the data changed at that step, or a BF16 run has the same norm",
        remedy="""
            Resume from an earlier checkpoint with a lower learning rate, or with the low-precision parts in BF16: the
            forward, or activations and LayerNorm
        """,
        cost="higher precision runs at the speed of BF16",
        check=GradientNorm,
    ),
    Rule(
        id="gradient-size",
        title="the gradients have the wrong size",
        subject="model",
        needs=f"at least {CLIPPED_STEPS} steps with torch.nn.utils.clip_grad_norm_",
        collect="clipping by torch.nn.utils.clip_grad_norm_, which a session observes",
        condition=f"""
            before clipping, the gradient norm is at least {CLIPPED:g} times the limit in {100 * NEARLY_ALL_CLIPPED:g} %
            of {CLIPPED_STEPS} steps; a warning from {FAR_CLIPPED:,.0f} times on. Or the first loss is, within
            {100 * NEAR_GUESS:g} %, N times ln(outputs of the model's last layer), and a step has N micro-batches
        """,
        silent="clipping by a limit of inf, which only measures the norm; clipping by DeepSpeed, Megatron or FSDP",
        severity="warning",
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
        check=GradientSize,
    ),
)
