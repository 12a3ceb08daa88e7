"""Rules on sudden changes, which the watch of every step finds, also between collection steps."""

from __future__ import annotations

from functools import partial

from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.diagnosis.rule import Rule
from te_precision_callbacks.diagnosis.shapes import COLLECT_EACH_STEP, NEEDS_EACH_STEP, AbsentSince

_BACK = "A note once all such layers have one again. A layer is missed again after twice its longest gap"

RULES = (
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
        severity="warning",
        source="this project",
        why="its weights do not change any more, and the model without it is another model",
        disproof="the script leaves the layer out on purpose from that step on",
        remedy="Look for what chooses the layers of a step: a schedule, the data, routing, early exits, eval()",
        check=partial(AbsentSince, change="uncalled"),
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
        severity="warning",
        source="this project",
        why="its weights do not learn any more",
        disproof="the script freezes the layer on purpose from that step on",
        remedy="""
            Look for what stops the gradient: requires_grad_(False), detach(), torch.no_grad(), a loss term or a gate
            that is 0 from that step on, code or hooks that set gradients to 0. After a spike under delayed scaling,
            gradients may be 0 until its amax leaves the history: use a shorter amax_history_len, or current scaling
        """,
        consequence_of=("growth", "stale-scale", "uncalled-layer", "evaluation-mode"),
        check=partial(AbsentSince, change="frozen"),
    ),
)
