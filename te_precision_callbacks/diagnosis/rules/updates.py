"""Rules on weights after an optimizer's step: stale, lost or too small updates."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.diagnosis.rules.settings import NEEDS_SCALER, needs_scaler
from te_precision_callbacks.statistics.names import BELOW_EPS, STALE, UNCHANGED

STALE_SHARE = 3.0
STALE_STEPS = 2
"""Percent of a weight's elements, and collection steps in a row."""

LOST = 90.0
LOST_STEPS = 2
"""Percent of the elements, and collection steps in a row."""

SMALL = 90.0
SMALL_STEPS = 2
"""Percent of the weights, and collection steps in a row."""


class AboveThreshold(RuleCheck):
    """A statistic at or above a threshold in several collection steps in a row.

    ``seen`` has a place for the value; ``applies_to`` returns whether the rule applies to a run, None if unknown. By
    default it applies if values exist. ``is_of_gradients``: gradients that are too small in float16 can cause it.
    """

    def __init__(
        self,
        statistic: str,
        threshold: float,
        needed: int,
        seen: str,
        applies_to: Callable[[Facts], bool | None] | None = None,
        *,
        is_of_gradients: bool = False,
    ) -> None:
        self.needed = needed
        super().__init__()
        self._statistic = statistic
        self.reads = (statistic,)
        self._threshold = threshold
        self._seen = seen
        self._applies_to = applies_to
        self._is_of_gradients = is_of_gradients
        self.applies = applies_to is not None

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        applies = None if self._applies_to is None else self._applies_to(facts)
        self.applies = self.applies if applies is None else applies
        return ()

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        for column in numbers.columns(self._statistic):
            self.note_data(numbers.iteration)
            self.applies = self.applies or self._applies_to is None
            holds = column.values >= self._threshold
            for sighting in self.streaks.sightings(numbers, facts, column, holds, self._seen, column.values):
                remedy = NEEDS_SCALER if self._is_of_gradients and needs_scaler(facts) else ""
                yield sighting._replace(layers=tuple(filter(None, sighting.layers)), remedy=remedy)


def _has_16_bit_weights(facts: Facts) -> bool | None:
    has_16_bit = None
    for layer in facts.layers.values():
        if layer.weight_dtype:
            has_16_bit = has_16_bit or "float16" in layer.weight_dtype
    return has_16_bit


def _adds_eps(facts: Facts) -> bool | None:
    if facts.settings is None:
        return None
    return facts.settings.adds_eps


_COLLECT = "the default config, or a section named default_statistics"

RULES = (
    Rule(
        id="stale-weights",
        title="a layer uses stale cached weights of an earlier step",
        subject="tensor",
        needs="a forward with is_first_microbatch=False in a collection step",
        collect="any statistic of the layer",
        condition=(
            f"at least {STALE_SHARE:g} % of the elements of a cached weight differ from the current weight by more"
            f" than rounding, in {STALE_STEPS} collection steps in a row"
        ),
        silent="micro-batches 2 to n of a step, frozen weights, learning rates too small to change a code",
        severity="error",
        source="arithmetic; the threshold is this project's",
        why="the layer keeps using the weights of an earlier step, so training it has no effect",
        disproof="the weights are fixed on purpose",
        remedy=(
            "Pass is_first_microbatch=True in the first micro-batch after each optimizer step; in Megatron call"
            " set_is_first_microbatch() of each model chunk. Collection steps on the debug path refresh the cache,"
            " so the run differs without the debugger"
        ),
        check=functools.partial(
            AboveThreshold,
            STALE,
            STALE_SHARE,
            STALE_STEPS,
            "{:.3g} % of the elements of the cached weight differ from the current weight",
        ),
    ),
    Rule(
        id="lost-updates",
        title="the optimizer's updates vanish in rounding",
        subject="model",
        needs=f"{UNCHANGED}, of weights in 16 bits or fewer that an optimizer steps without master weights",
        collect=f"{_COLLECT}; not needed with master weights",
        condition=(
            f"at least {LOST:g} % of the sampled elements with a gradient are unchanged by a step, in {LOST_STEPS}"
            " collection steps in a row, at a learning rate of at least 1 % of its largest"
        ),
        silent="master weights, Kahan summation and stochastic rounding; the end of a decay to 0",
        severity="warning",
        source="this project: bfloat16 keeps 8 bits, so an update below 1/256 to 1/512 of a weight is lost",
        why="the loss stops falling, whatever the precision of the GEMMs",
        disproof="the same run with master weights in float32 has the same loss",
        remedy=(
            "Raise the learning rate if it is far below the usual one. Otherwise use float32 master weights or"
            " stochastic rounding"
        ),
        cost="four more bytes per weight",
        check=functools.partial(
            AboveThreshold,
            UNCHANGED,
            LOST,
            LOST_STEPS,
            "{:.3g} % of the weights in 16 bits or fewer are unchanged by an optimizer step",
            _has_16_bit_weights,
            is_of_gradients=True,
        ),
        consequence_of=("below-eps",),
    ),
    Rule(
        id="below-eps",
        title="gradients are below Adam's eps",
        subject="model",
        needs=f"{BELOW_EPS}, of optimizers of Adam's kind that step the model's own weights",
        collect=_COLLECT,
        condition=(
            f"the root mean square of the gradient of at least {SMALL:g} % of the weights is below the"
            f" optimizer's eps, and"
            f" above 0, in {SMALL_STEPS} collection steps in a row"
        ),
        silent="single weights, such as those of rare tokens",
        severity="warning",
        source="arithmetic of Adam: with sqrt(v) below eps the update is about lr * g / eps; this project: the share",
        why="updates are far smaller than the learning rate, so the model hardly learns",
        disproof="eps is large on purpose",
        remedy=(
            "Look for a loss that is scaled down or averaged twice, and for gradients clipped to a tiny norm;"
            " otherwise lower eps to 1 % of the gradients or less"
        ),
        check=functools.partial(
            AboveThreshold,
            BELOW_EPS,
            SMALL,
            SMALL_STEPS,
            "{:.3g} % of the weights have gradients below the optimizer's eps",
            _adds_eps,
            is_of_gradients=True,
        ),
    ),
)
