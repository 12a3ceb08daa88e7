"""Rules on sudden changes, which the watch of every step finds, also between collection steps."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.diagnosis.rule import Rule, Sighting
from te_precision_callbacks.diagnosis.shapes import AbsentSince, Changed
from te_precision_callbacks.flight.changes import (
    GAP,
    HISTORY,
    LARGEST_CODES,
    LEAST_HISTORY,
    SHARE,
    SPIKE,
    SPIKE_OF_GRADIENT,
)
from te_precision_callbacks.sinks.step_records import Event


class Spike(Changed):
    def sightings(self, event: Event) -> Iterator[Sighting]:
        slots = event.data["slots"]
        _, tensor = slots[0]
        layers = tuple(layer for layer, of_layer in slots if of_layer == tensor)
        spike = Sighting(event.text, layers, tensor, since=event.iteration)
        is_inf = event.data["now"] in LARGEST_CODES
        yield spike._replace(severity="warning", remedy=_OF_INF) if is_inf else spike


_OF_INF = (
    "Look for the inf in the batch of that step, and in what runs before the layer (in the backward: the loss, and what"
    " runs after it): debug='activation_overflow' stops at the module and batch. Skip such batches"
)

_COLLECT = "every_step=True, the default, and a longer run"
_BACK = "A note once all such layers have one again. A layer is missed again after twice its longest gap"
_NEEDS = f"every_step=True, and {LEAST_HISTORY} steps"

RULES = (
    Rule(
        id="precision-gap",
        title="layers run in high precision for a few steps",
        subject="layer",
        needs=_NEEDS,
        collect=_COLLECT,
        condition=f"""
            the activation of a layer was quantized in {LEAST_HISTORY} steps or more, is not quantized for 1 to {GAP}
            steps, and is again after them; in one micro-batch or in all; in at most 1 of {SHARE + 1} steps since the
            first quantized one
        """,
        silent="""
            layers that change their precision for good, as at the end of a warm-up or for the last part of a run, or
            that change it often
        """,
        severity="warning",
        source="this project",
        why="steps in another precision are slower, and hide what low precision does",
        disproof="the script does that on purpose, for example in a measurement",
        remedy="""
            Look in these steps for a call of the model outside of te.autocast, or with enabled=False, such as a retry
            after a failure or an evaluation that trains
        """,
        check=partial(Changed, change="precision"),
    ),
    Rule(
        id="uncalled-layer",
        title="a layer does not run any more",
        subject="layer",
        needs=_NEEDS,
        collect=_COLLECT,
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
    ),
    Rule(
        id="frozen-layer",
        title="the weights of a layer get no gradient any more",
        subject="layer",
        needs=_NEEDS,
        collect=_COLLECT,
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
        consequence_of=("spike", "stale-scale", "uncalled-layer"),
        check=partial(AbsentSince, change="frozen"),
    ),
    Rule(
        id="spike",
        title="a tensor's largest magnitude is far above its last ones",
        subject="tensor",
        needs=_NEEDS,
        collect=_COLLECT,
        condition=f"""
            the largest magnitude of an activation is 2^{SPIKE["activation"]:g} times that of the {LEAST_HISTORY} to
            {HISTORY} steps before, or 2^{SPIKE_OF_GRADIENT:g} times for tensors of the backward
        """,
        silent="what grows over several steps; steps with inf or nan, and weights, which have rules of their own",
        severity="note",  # a warning where it shows an inf
        source="SPAM, arXiv 2501.06842 (gradients of 5,000 times); the factors are this project's",
        why="one batch can undo what was learned, and with delayed scaling its largest elements are clipped",
        disproof="the loss of the next steps goes on as before",
        remedy="Look at the batch of that step; clip the gradient norm if such steps come again",
        check=partial(Spike, change="spike"),
    ),
)
