"""Rules on sudden changes: weights that jump, and layers that are missed, also between collection steps."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.diagnosis.numbers import StepNumbers, extend_rows
from te_precision_callbacks.diagnosis.rule import Rule, Sighting, Sightings
from te_precision_callbacks.diagnosis.rules.parameters import ParameterRule
from te_precision_callbacks.diagnosis.shapes import (
    COLLECT_EACH_STEP,
    NEEDS_EACH_STEP,
    Changed,
    find_absences,
    layers_of_change,
)
from te_precision_callbacks.flight import changes
from te_precision_callbacks.sinks.step_records import Event
from te_precision_callbacks.statistics.arrays import Floats, holds_any, total

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
        super().__init__(rule="weight-jump", needed=3)
        self._last: dict[str, _Sizes] = {}  # by statistic
        self._rise: Event | None = None
        self._changed: int | None = None  # the step of the last sudden change

    def step(self, numbers: StepNumbers) -> Sightings:
        for statistic in ("cur_amax", "std", "l2_norm"):
            weights = numbers.are_known(statistic, "weight")
            if not holds_any(weights):
                continue
            self.note_data(numbers.iteration)
            values = np.where(weights, numbers.finite(statistic), np.nan)
            bits: Floats = np.log2(np.where(values == 0, np.nan, values))
            unknown = np.full(len(bits), np.nan)
            last = self._last.get(statistic, _Sizes(0, unknown, unknown))
            last_bits = extend_rows(last.bits, len(bits), np.nan)
            vanished = (values == 0) & np.isfinite(last_bits)
            if statistic != "std" and holds_any(vanished):
                rows = np.flatnonzero(vanished).tolist()
                seen = f"all elements are 0, and were not in an earlier step; {many(len(rows), 'layer')}"
                layers = tuple(numbers.names[row] for row in rows)
                yield Sighting(seen, layers, "weight", numbers.column(statistic).label(rows[0]), numbers.iteration)
            jumped = np.abs(extend_rows(last.changes, len(bits), np.nan)) <= STEADY
            jumped &= np.abs(bits - last_bits) >= WEIGHT_JUMP
            if total(jumped) >= max(2, total(weights) / 2):
                rows = numbers.in_order(np.flatnonzero(jumped).tolist())
                row = rows[0]
                label = numbers.column(statistic).label(row)
                seen = (
                    f"{label} has changed from {2 ** last_bits[row]:.3g} in step {last.iteration} to {values[row]:.3g},"
                    f" and by {2**WEIGHT_JUMP:g} times or more in {len(rows)} of {many(int(total(weights)), 'layer')}"
                )
                layers = tuple(numbers.names[row] for row in rows)
                yield self._of_optimizer(layers, label, seen, numbers.iteration)
            self._last[statistic] = _Sizes(numbers.iteration, bits, bits - last_bits)

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

RULES = (
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
        check=partial(Changed, change="uncalled", find=find_absences),
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
        check=partial(Changed, change="frozen", find=find_absences),
    ),
)
