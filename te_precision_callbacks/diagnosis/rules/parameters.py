"""Rules on parameters that do not train, and on parameters that differ between ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import Severity
from te_precision_callbacks.diagnosis.rule import Judge, Rule, Sighting
from te_precision_callbacks.sinks.step_records import Event


class _Kind(NamedTuple):
    """A kind of :class:`~te_precision_callbacks.instrumentation.parameters.Problem`.

    Attributes:
        seen: the description, with places for ``names``, for ``number``, and for ``since``, its first step.
        remedy: by default the rule's remedy.
        severity: by default the rule's severity.
    """

    seen: str
    remedy: str = ""
    severity: Severity | None = None


_KINDS: Mapping[str, Mapping[str, _Kind]] = {
    "missing-gradient": {
        "no_gradient": _Kind("no backward has reached {names} in {number:.0f} steps of the optimizer"),
        "lost_gradient": _Kind(
            "no backward has reached {names} since step {since}, although it had gradients before and its module runs"
        ),
        "left_out": _Kind(
            "no forward has used {names} in {number:.0f} steps, since step {since}",
            "If the module is meant to train, look at why forward() no longer calls it",
            "note",
        ),
        "not_held": _Kind(
            "no optimizer has {names}, although a backward has reached it",
            "Give the optimizer all parameters that train, also those that were added or replaced after it was made",
        ),
        "frozen_held": _Kind(
            "an optimizer has {names}, which needs no gradient",
            "If it is meant to train, set requires_grad=True; else leave it out of the optimizer",
            "note",
        ),
    },
    "frozen-weight": {
        "unchanged": _Kind(
            "no change, not even of a bit, in {names} after {number:.0f} sampled steps of the optimizer that should"
            " have changed it"
        ),
        "unstepped": _Kind(
            "no optimizer of the model has stepped in {number:.0f} steps, since step {since}",
            "Look at why the loop no longer calls optimizer.step(); a GradScaler skips steps with inf or nan",
            "warning",
        ),
        "zeroed": _Kind(
            "at the optimizer's step, each sampled element of the gradient of {names} is 0 in {number:.0f} sampled"
            " steps, and so for nearly all weights",
            "Look for a zero_grad() between backward() and the optimizer's step, and for a loss or gradient that is"
            " multiplied by 0",
            "warning",
        ),
        "still": _Kind(
            "hardly an element of {names} has changed in {number:.0f} steps, and so for nearly all weights",
            "Look at the learning rate, at the factor of the loss, at gradients that are removed before the optimizer's"
            " step, and for code that restores old weights",
            "warning",
        ),
        "apart": _Kind(
            "{number:.3g} % of the sampled elements of {names} are farther from the optimizer's master than rounding"
            " explains",
            "Copy the masters into the weights after each step of the optimizer, and into the masters what a checkpoint"
            " has loaded into the weights",
        ),
        "late": _Kind(
            "the forward uses {names} as the optimizer's master was one step earlier ({number:.3g} % of the sampled"
            " elements show it)",
            "Copy the masters into the weights after the optimizer's step and before the next forward",
        ),
    },
    "replicas-differ": {
        "differs": _Kind("ranks that had the same {names} have different values now"),
        "differs_from_start": _Kind(
            "the ranks have different values of {names} since before the first step, and nothing marks it as sharded",
            "If the ranks train one model, broadcast its parameters from rank 0, as DistributedDataParallel does, and"
            " average the gradients. If they hold different parts, pass scope= to the session",
            "note",
        ),
    },
    "no-reduction": {
        "no_reduction": _Kind(
            "ranks that had the same {names} before the first step have different values now, and so for most"
            " parameters; no wrapper that averages gradients was found"
        )
    },
}


class _OfParameters(Judge):
    """A rule on the events of a run that report its parameters."""

    rule: str

    def event(self, event: Event) -> Iterator[Sighting]:
        if event.kind != "parameters":
            return
        if self.rule in event.data.get("checked", ()):
            self.saw(event.iteration)
        for row in event.data.get("problems", ()):
            kind = _KINDS[self.rule].get(row["what"])
            if kind is not None:
                seen = kind.seen.format(names=_in_words(row["names"]), number=row["number"], since=row["since"])
                layers = layers_of(row["names"])
                key = row["what"]
                yield Sighting(layers, "", "", seen, row["since"], kind.severity, key=key, remedy=kind.remedy)


class MissingGradient(_OfParameters):
    """Parameters that get no gradient, or that no optimizer steps."""

    rule = "missing-gradient"


class FrozenWeight(_OfParameters):
    """Weights that do not change, or do not follow their masters."""

    rule = "frozen-weight"


class _OfRanks(_OfParameters):
    """A rule on several ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.applies = False

    def facts(self, facts: Facts) -> Iterator[Sighting]:
        self.applies = facts.settings is not None and facts.settings.ranks > 1
        yield from ()


class ReplicasDiffer(_OfRanks):
    """Parameters that were alike on all ranks and are not any more."""

    rule = "replicas-differ"


class NoReduction(_OfRanks):
    """Ranks that train apart."""

    rule = "no-reduction"


def layers_of(names: Sequence[str]) -> tuple[str, ...]:
    """The modules of parameters; a parameter of a model without a name stands for itself."""
    return tuple(dict.fromkeys(name.rpartition(".")[0] or name for name in names if name))


def _in_words(names: Sequence[Any]) -> str:
    more = f" and {many(len(names) - 1, 'more parameter')}" if len(names) > 1 else ""
    return f"{names[0]}{more}"


_NEEDS = "steps of an optimizer of torch.optim's class"
_COLLECT = "at least 6 steps of the optimizer, each followed by the session's step()"

RULES = (
    Rule(
        id="missing-gradient",
        title="a parameter gets no gradient, or no optimizer steps it",
        subject="layer",
        needs=f"at least 6 {_NEEDS}, or a gradient for each parameter that it has",
        collect=_COLLECT,
        condition=(
            "in 6 steps of its optimizer no backward has reached a parameter; where an alike parameter has a gradient"
            " and the module of this one does not run, in 64. Or a parameter that had gradients gets none in 8 steps in"
            " which its module runs, and in twice as many as ever before. Or a parameter has"
            " gradients and is in no optimizer of the process. A parameter in an optimizer that needs no gradient is a"
            " note"
        ),
        silent=(
            "frozen parameters outside of optimizers; copies that no optimizer has, such as an EMA; optimizers that"
            " step less often than others; gradients that are 0, or removed before the optimizer's step"
        ),
        severity="warning",
        source="Megatron-LM issue 4765, TransformerEngine pull requests 3178 and 3234; the numbers of steps are ours",
        why="the parameter does not learn, and the loss may still fall",
        disproof=(
            "the parameter is meant to be unused or fixed: then set requires_grad=False, and leave it out of the"
            " optimizer"
        ),
        remedy=(
            "Look for a detach() or no_grad() behind the layer, a tensor passed by keyword through te.checkpoint (pass"
            " it by position, or use_reentrant=False), or a module that forward() no longer calls"
        ),
        judge=MissingGradient,
        essential=True,
    ),
    Rule(
        id="frozen-weight",
        title="a weight does not change, or does not follow its master",
        subject="layer",
        needs="some sampled steps of an optimizer of torch.optim's class",
        collect=_COLLECT,
        condition=(
            "a weight with gradients is the same, bit for bit, after 3 sampled steps over at least 6 steps, in which an"
            " update of the learning rate's size is at least 4 units in the last place of some sampled element. Or at"
            " least 1 % of its sampled elements are farther from the optimizer's float32 master than its format rounds,"
            " in 2 checks in a row. A warning if optimizers that have stepped do not step in 20 steps, if the sampled"
            " gradients of at least 90 % of the matrices are 0 in 3 sampled steps in a row over at least 6 steps, or if"
            " at most 5 % of the sampled elements of at least 90 % of the float32 matrices have changed over at least 6"
            " steps"
        ),
        silent=(
            "updates of weights in 16 bits that rounding loses (see lost-updates); frozen weights;"
            " steps that a GradScaler skips; masters that are sharded or not in float32 are not compared"
        ),
        severity="error",
        source="Megatron-LM issues 2272, 4800, 5236, 5487, 5707 and 6754; the thresholds are ours",
        why="the forward computes with weights that the training does not change",
        disproof="the weight is meant to be fixed: then set requires_grad=False",
        remedy=(
            "Look for a copy of the weight that the optimizer steps instead, for example because the model was"
            " converted or moved after the optimizer was made, and for code that restores old weights"
        ),
        judge=FrozenWeight,
        essential=True,
        consequence_of=("missing-gradient", "dead-gradient"),
    ),
    Rule(
        id="replicas-differ",
        title="ranks that should have the same parameters have different ones",
        subject="layer",
        needs="a session on several ranks that reduce statistics together, and parameters that are not sharded",
        collect=_COLLECT,
        condition=(
            "the checksum of a parameter, over about 1,000 elements, differs between ranks by more than 1e-6 of its"
            " absolute values, although all ranks had it alike before the first step, or DistributedDataParallel wraps"
            " the model on all ranks"
        ),
        silent=(
            "DTensors, FSDP, shards of tensor parallelism, experts, DeepSpeed ZeRO 3; parameters that differ before the"
            " first step, and constants where others differ then"
        ),
        severity="error",
        source="transformers issue 48205, TransformerEngine pull request 2698; arithmetic",
        why="each rank computes gradients for another model, and their mean fits none of them",
        disproof="the ranks average weights only every few steps, as local SGD does",
        remedy=(
            "Average the gradients of the parameter on all ranks before the optimizer's step: for norms of tensor"
            " parallelism with sequence parallelism by an all-reduce over the tensor-parallel group, for routers over"
            " the expert-parallel group. Then load a checkpoint on all ranks"
        ),
        judge=ReplicasDiffer,
        essential=True,
        consequence_of=("no-reduction",),
    ),
    Rule(
        id="no-reduction",
        title="several ranks train, and nothing averages their gradients",
        subject="model",
        needs="a session on several ranks that reduce statistics together, and parameters that are not sharded",
        collect=_COLLECT,
        condition=(
            "more than half of the parameters that all ranks had alike before the first step differ now, and no"
            " DistributedDataParallel, FSDP or DeepSpeed engine exists in the process"
        ),
        silent="what is silent for replicas-differ",
        severity="warning",
        source="arithmetic",
        why="the ranks train models of their own, each on its part of the data",
        disproof="the ranks average weights only every few steps, as local SGD does",
        remedy=(
            "Wrap the model with torch.nn.parallel.DistributedDataParallel or FSDP, or let accelerator.prepare() do so"
        ),
        judge=NoReduction,
    ),
)
