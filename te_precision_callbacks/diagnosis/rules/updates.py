"""Rules on weights after an optimizer's step: stale, lost or too small updates."""

from __future__ import annotations

from functools import partial

from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.rule import Rule
from te_precision_callbacks.diagnosis.rules.settings import remedy_of_small_gradients
from te_precision_callbacks.diagnosis.shapes import AboveLimit
from te_precision_callbacks.statistics.names import BELOW_EPS, STALE, UNCHANGED


def _has_16_bit_weights(facts: Facts) -> bool | None:
    dtypes = [layer.weight_dtype for layer in facts.layers.values() if layer.weight_dtype]
    return any("float16" in dtype for dtype in dtypes) if dtypes else None


def _adds_eps(facts: Facts) -> bool | None:
    return facts.settings.adds_eps


_COLLECT = "the default config, or a section named default_statistics"

RULES = (
    Rule(
        id="stale-weights",
        title="a layer uses stale cached weights of an earlier step",
        subject="tensor",
        needs="a forward with is_first_microbatch=False in a collection step",
        collect="any statistic of the layer",
        condition="""
            at least {limit:g} % of the elements of a cached weight differ from the current weight by more than
            rounding, in {needed} collection steps in a row
        """,
        silent="micro-batches 2 to n of a step, frozen weights, learning rates too small to change a code",
        severity="error",
        source="arithmetic; the threshold is this project's",
        why="the layer keeps using the weights of an earlier step, so training it has no effect",
        disproof="the weights are fixed on purpose",
        remedy="""
            Pass is_first_microbatch=True in the first micro-batch after each optimizer step; in Megatron call
            set_is_first_microbatch() of each model chunk. Collection steps on the debug path refresh the cache, so the
            run differs without the debugger
        """,
        check=partial(
            AboveLimit,
            statistic=STALE,
            limit=3.0,
            needed=2,
            seen="{:.3g} % of the elements of the cached weight differ from the current weight",
        ),
    ),
    Rule(
        id="lost-updates",
        title="the optimizer's updates vanish in rounding",
        subject="model",
        needs=f"{UNCHANGED}, of weights in 16 bits or fewer that an optimizer steps without master weights",
        collect=f"{_COLLECT}; not needed with master weights",
        condition="""
            at least {limit:g} % of the sampled elements with a gradient are unchanged by a step, in {needed} collection
            steps in a row, at a learning rate of at least 1 % of its largest
        """,
        silent="master weights, Kahan summation and stochastic rounding; the end of a decay to 0",
        severity="warning",
        source="this project: bfloat16 keeps 8 bits, so an update below 1/256 to 1/512 of a weight is lost",
        why="the loss stops falling, whatever the precision of the GEMMs",
        disproof="the same run with master weights in float32 has the same loss",
        remedy="""
            Raise the learning rate if it is far below the usual one. Otherwise use float32 master weights or stochastic
            rounding
        """,
        cost="four more bytes per weight",
        check=partial(
            AboveLimit,
            statistic=UNCHANGED,
            limit=90.0,
            needed=2,
            seen="{:.3g} % of the weights in 16 bits or fewer are unchanged by an optimizer step",
            applies_to=_has_16_bit_weights,
            remedy=remedy_of_small_gradients,
        ),
        consequence_of=("below-eps",),
    ),
    Rule(
        id="below-eps",
        title="gradients are below Adam's eps",
        subject="model",
        needs=f"{BELOW_EPS}, of optimizers of Adam's kind that step the model's own weights",
        collect=_COLLECT,
        condition="""
            the root mean square of the gradient of at least {limit:g} % of the weights is below the optimizer's eps,
            and above 0, in {needed} collection steps in a row
        """,
        silent="single weights, such as those of rare tokens",
        severity="warning",
        source="arithmetic of Adam: with sqrt(v) below eps the update is about lr * g / eps; this project: the share",
        why="updates are far smaller than the learning rate, so the model hardly learns",
        disproof="eps is large on purpose",
        remedy="""
            Look for a loss that is scaled down or averaged twice, and for gradients clipped to a tiny norm; otherwise
            lower eps to 1 % of the gradients or less
        """,
        check=partial(
            AboveLimit,
            statistic=BELOW_EPS,
            limit=90.0,
            needed=2,
            seen="{:.3g} % of the weights have gradients below the optimizer's eps",
            applies_to=_adds_eps,
            remedy=remedy_of_small_gradients,
        ),
    ),
)
