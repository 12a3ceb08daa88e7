"""Rules on sudden changes, which the watch of every step finds, also between collection steps."""

from __future__ import annotations

from collections.abc import Iterator

from te_precision_callbacks.base.vocabulary import LEAST_ABSENT, LEAST_PRESENT
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.flight.changes import (
    GAP,
    HISTORY,
    LARGEST_CODES,
    LEAST_HISTORY,
    SHARE,
    SPIKE,
    SPIKE_OF_GRADIENT,
    Kind,
    describe_absences,
)
from te_precision_callbacks.sinks.step_records import Event


class Changed(RuleCheck):
    """Reports the changes of one kind."""

    applies = False

    def __init__(self, kind: Kind) -> None:
        super().__init__()
        self._kind = kind

    def event(self, event: Event) -> Iterator[Sighting]:
        if event.kind == "every_step_watched":
            self.applies = True
            self.checked = True
        if event.kind == "changed" and event.data["kind"] == self._kind:
            self.note_data(event.iteration - 1)  # which was watched
            yield from self._change(event)

    def _change(self, event: Event) -> Iterator[Sighting]:
        slots = event.data["slots"]
        if self._kind != "spike":
            layers, _ = zip(*slots, strict=True)
            yield Sighting(layers, "", "", event.text, event.iteration)
            return
        first = slots[0][1]
        layers = tuple(layer for layer, tensor in slots if tensor == first)
        is_inf = event.data["now"] in LARGEST_CODES
        severity: Severity = "warning" if is_inf else "note"
        remedy = _OF_INF if is_inf else ""
        yield Sighting(layers, first, "", event.text, event.iteration, severity, remedy=remedy)


class Absence(Changed):
    """Reports all layers that were missed as one finding: a note once all of them are back."""

    def __init__(self, kind: Kind) -> None:
        super().__init__(kind)
        self._absences: dict[str, tuple[int, int | None]] = {}  # layer -> first and last step; None if it goes on

    def _change(self, event: Event) -> Iterator[Sighting]:
        is_new = not self._absences
        layers, _ = zip(*event.data["slots"], strict=True)
        self._absences.update(dict.fromkeys(layers, (event.data["since"], event.data["until"])))
        spans = self._absences.values()
        severity: Severity = "warning" if any(last is None for _, last in spans) else "note"
        latest = max(first if last is None else last for first, last in spans)
        found = Sighting(layers, "", "", describe_absences(self._kind, spans), latest, severity)
        if not is_new:
            yield found._replace(replaces=True)
        yield found


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
        condition=(
            f"the activation of a layer was quantized in {LEAST_HISTORY} steps or more, is not quantized for 1"
            f" to {GAP} steps, and is again after them; in one micro-batch or in all; in at most 1 of {SHARE + 1} steps"
            " since the first quantized one"
        ),
        silent=(
            "layers that change their precision for good, as at the end of a warm-up or for the last part of a run, or"
            " that change it often"
        ),
        severity="warning",
        source="this project",
        why="steps in another precision are slower, and hide what low precision does",
        disproof="the script does that on purpose, for example in a measurement",
        remedy=(
            "Look in these steps for a call of the model outside of te.autocast, or with enabled=False, such as a retry"
            " after a failure or an evaluation that trains"
        ),
        check=lambda: Changed("precision"),
    ),
    Rule(
        id="uncalled-layer",
        title="a layer does not run any more",
        subject="layer",
        needs=_NEEDS,
        collect=_COLLECT,
        condition=(
            f"a layer had a GEMM in each of {LEAST_PRESENT} training steps in a row, and has had none for"
            f" {LEAST_ABSENT} steps, in which other layers had. {_BACK}"
        ),
        silent="layers that are left out at random, or in turn, from the start",
        severity="warning",
        source="this project",
        why="its weights do not change any more, and the model without it is another model",
        disproof="the script leaves the layer out on purpose from that step on",
        remedy="Look for what chooses the layers of a step: a schedule, the data, routing, early exits, eval()",
        check=lambda: Absence("uncalled"),
    ),
    Rule(
        id="frozen-layer",
        title="the weights of a layer get no gradient any more",
        subject="layer",
        needs=_NEEDS,
        collect=_COLLECT,
        condition=(
            f"a layer had a wgrad other than 0 in each of {LEAST_PRESENT} training steps in a row, and has had none for"
            f" {LEAST_ABSENT} steps, in which its forward ran. Or the gradient of a matrix was not 0 at the optimizer's"
            f" steps in {LEAST_PRESENT} steps, and then is 0 at {LEAST_ABSENT} of them in a row. {_BACK}"
        ),
        silent=(
            "layers that are trained in turn from the start; at the optimizer's step also layers in lists of a block,"
            " such as experts"
        ),
        severity="warning",
        source="this project",
        why="its weights do not learn any more",
        disproof="the script freezes the layer on purpose from that step on",
        remedy=(
            "Look for what stops the gradient: requires_grad_(False), detach(), torch.no_grad(), a loss term or a gate"
            " that is 0 from that step on, code or hooks that set gradients to 0. After a spike under delayed scaling,"
            " gradients may be 0 until its amax leaves the history: use a shorter amax_history_len, or current scaling"
        ),
        consequence_of=("spike", "stale-scale", "uncalled-layer"),
        check=lambda: Absence("frozen"),
    ),
    Rule(
        id="spike",
        title="a tensor's largest magnitude is far above its last ones",
        subject="tensor",
        needs=_NEEDS,
        collect=_COLLECT,
        condition=(
            f"the largest magnitude of an activation is 2^{SPIKE['activation']:g} times that of the {LEAST_HISTORY} to"
            f" {HISTORY} steps before, or 2^{SPIKE_OF_GRADIENT:g} times for tensors of the backward"
        ),
        silent="what grows over several steps; steps with inf or nan, and weights, which have rules of their own",
        severity="note",  # a warning where it shows an inf
        source="SPAM, arXiv 2501.06842 (gradients of 5,000 times); the factors are this project's",
        why="one batch can undo what was learned, and with delayed scaling its largest elements are clipped",
        disproof="the loss of the next steps goes on as before",
        remedy="Look at the batch of that step; clip the gradient norm if such steps come again",
        check=lambda: Changed("spike"),
    ),
)
