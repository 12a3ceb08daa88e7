"""Rules on a whole run: the scaling of the loss, the reduction of amaxes, the arguments of recipes, and its outcome (an
exception, a broken contract, a failed observation).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.finding import FAILED_OBSERVATION
from te_precision_callbacks.diagnosis.rule import Rule, Sighting, Sightings
from te_precision_callbacks.diagnosis.shapes import FactHolds, Reported
from te_precision_callbacks.runs.summary import ended_by, summarize_broken_contract
from te_precision_callbacks.sinks.step_records import Event

_NEEDS_SCALER = (
    "Gradients in float16 below 6e-8 are 0: scale the loss with torch.amp.GradScaler, which needs weights in float32"
    " under torch.autocast(dtype=torch.float16). Or train in bfloat16"
)


def remedy_of_small_gradients(facts: Facts) -> str:
    """The remedy if something runs in float16 although no GradScaler scales the loss; empty otherwise."""
    lacks_scaler = facts.settings.are_known and not facts.settings.loss_is_scaled and _has_float16(facts)
    return _NEEDS_SCALER if lacks_scaler else ""


def is_scaled(facts: Facts) -> bool:
    """Return whether a GradScaler scales the loss for float16, and skips steps with inf or nan."""
    return facts.settings.loss_is_scaled and (facts.settings.float16 or _has_float16(facts))


def _has_float16(facts: Facts) -> bool:
    layers = facts.layers.values()
    return (
        any("float16" in layer.weight_dtype.replace("bfloat16", "") for layer in layers)
        or any(text.startswith("FP16") for layer in layers for text in layer.formats.values())
        or any("float16" in types for types in facts.states.values())
    )


def _are_known(facts: Facts) -> bool | None:
    """Return True once a layer or an optimizer has run."""
    return (facts.settings.are_known and facts.has_run) or None


def _scaler_without_float16(facts: Facts) -> Sightings:
    if facts.settings.loss_is_scaled and not is_scaled(facts):
        yield Sighting("a GradScaler scales the loss, but nothing runs in float16")


def _reduces_amaxes(facts: Facts) -> bool | None:
    applies = facts.settings.ranks > 1 and facts.has_delayed_scaling
    is_known = _are_known(facts) and (facts.settings.amaxes or not applies)
    return applies if is_known else None


def _unreduced_amaxes(facts: Facts) -> Sightings:
    settings = facts.settings
    for row in settings.amaxes:
        layers = tuple(row["layers"])
        outside = row["outside"]
        if outside:
            over = f"over {many(row['ranks'], 'rank')}" if row["reduced"] else "over no other rank"
            seen = (
                f"amaxes are reduced {over}, but not over {outside} of the {row['tensor_parallel']}"
                " tensor-parallel ranks of the layer"
            )
            yield Sighting(seen, layers, key="tensor parallel")
        elif not row["reduced"]:
            seen = f"the recipe has reduce_amax=False, and {settings.ranks} ranks train together"
            yield Sighting(seen, layers, severity="note", key="not reduced")
        elif settings.alike and row["ranks"] < settings.ranks:
            seen = f"amaxes are reduced over {many(row['ranks'], 'rank')} of {settings.ranks} that have the layer"
            yield Sighting(seen, layers, severity="note", key="smaller group")


def _ignored_arguments(facts: Facts) -> Sightings:
    for row in facts.settings.ignored:
        seen = f"{row['recipe']}: {row['argument']} ({row['value']}) has no effect: {row['why']}. {row['instead']}"
        yield Sighting(seen, key=f"{row['recipe']}.{row['argument']}")


def _unusual_margins(facts: Facts) -> Sightings:
    for margin in facts.settings.margins:
        if margin < 0:
            seen = f"margin={margin:g}: elements above 2^{margin:g} of the largest recent amax are clipped"
            yield Sighting(seen, key=f"{margin:g}")
        elif margin >= NOTED_MARGIN:
            seen = f"margin={margin:g} leaves the upper {margin:g} powers of two of the format unused"
            yield Sighting(seen, severity="warning" if margin >= LARGE_MARGIN else "note", key=f"{margin:g}")


_EXPLAINED = ("PrecisionFindingError", "PrecisionContractError", "ActivationOverflowError")


def _failure_of_run(event: Event) -> Iterator[Sighting | str]:
    first_line = event.text.partition("\n")[0].rstrip(":. ")
    if event.kind == "stopped":
        yield first_line
    elif event.kind == "earlier_start":
        yield Sighting(first_line, since=event.iteration, severity="note", key=first_line)
    elif event.severity == "error":
        cause = ended_by(first_line)
        if cause and cause != "sys.exit()":
            yield f"the run was ended by {cause} after step {event.iteration}"
        elif not cause and not first_line.startswith(_EXPLAINED):
            yield Sighting(f"the run was ended by {first_line}", since=event.data.get("step", event.iteration))


def _broken_contract(event: Event) -> Iterator[Sighting | str]:
    if not event.data.get("checked", True):
        yield event.text.rstrip(".").replace("The precision contract (require=)", "it")
    elif event.severity != "info":
        yield Sighting(summarize_broken_contract(event.text).rstrip("."), since=event.iteration)


def _failure(event: Event) -> Iterator[str]:
    yield f"in step {event.iteration}, {event.text.partition(chr(10))[0].rstrip('.')}"


_COLLECT = "a session, or a run recorded by one"

NOTED_MARGIN = 3
LARGE_MARGIN = 6
"""Powers of two between amax and the format's maximum that are a note, and a warning."""

RULES = (
    Rule(
        id="grad-scaler",
        title="a GradScaler without float16",
        subject="config",
        needs="the scalers that step the model's optimizers, and the types of the first step",
        collect=_COLLECT,
        condition="""
            an enabled torch GradScaler steps an optimizer of the model, but no layer, weight, gradient or operand is in
            float16
        """,
        silent="GradScaler(enabled=False); scalers of other models; any float16 in the model",
        source="""
            huggingface/accelerate#1036 and deepspeedai/DeepSpeed#3166: only float16 needs it; pytorch/pytorch#98828: a
            scale that is never lowered grows until it is inf
        """,
        why="""
            bfloat16 and FP8 do not need loss scaling. The scaler doubles the gradients every 2,000 steps, which
            saturates delayed scaling for a step, and can silently skip optimizer steps
        """,
        disproof="a part of the model that the session does not observe runs in float16",
        remedy="""
            Remove the scaler, or create it with GradScaler(enabled=False); in Lightning use precision='bf16-mixed'
        """,
        check=partial(FactHolds, find=_scaler_without_float16, applies_to=_are_known),
    ),
    Rule(
        id="stale-scale",
        title="amaxes are not reduced over all ranks that share a layer",
        subject="config",
        needs="delayed scaling on several ranks that reduce their statistics together",
        collect=_COLLECT,
        condition="""
            tensor-parallel ranks of a layer are not in its amax reduction group, or reduce_amax=False: a warning. Other
            ranks with the layer are not in the group, or reduce_amax=False without tensor parallelism: a note
        """,
        silent="single-rank runs; other recipes; groups without other pipeline stages or other experts",
        source="""
            NVIDIA/Megatron-LM#442: the data-parallel group alone diverged after some 1,000 steps, with 8
            tensor-parallel ranks; AMD-AGI/Primus#669 reduces nothing without tensor parallelism, for speed
        """,
        why="""
            each rank quantizes with local scales, but tensor-parallel ranks read gathered FP8 tensors with one scale,
            and data-parallel ranks round the same weights differently
        """,
        disproof="the scales of the ranks do not differ",
        remedy="""
            Keep reduce_amax=True, and pass a group with all data-parallel and tensor-parallel ranks as
            te.autocast(amax_reduction_group=...), in Megatron get_amax_reduction_group()
        """,
        cost="one small all-reduce in each forward and backward",
        recipes=("fp8_delayed_scaling",),
        check=partial(FactHolds, find=_unreduced_amaxes, applies_to=_reduces_amaxes),
    ),
    Rule(
        id="ignored-argument",
        title="an argument of the recipe has no effect",
        subject="config",
        needs="the recipes that layers used",
        collect=_COLLECT,
        condition="""
            an argument of a recipe is not at its default, and nothing in Transformer Engine 2.20 reads it for this
            recipe and these layers
        """,
        silent="arguments at their default; unknown argument names, which leave no trace",
        source="""
            read from Transformer Engine 2.20.2, most also tested: bit-identical with and without. Table:
            te_precision_callbacks/instrumentation/recipe_arguments.py
        """,
        why="the run does not train as the script specifies",
        disproof="a run without the argument has different losses in its first steps",
        remedy="Apply the fix in the finding, or remove the argument",
        check=partial(FactHolds, find=_ignored_arguments, applies_to=_are_known),
    ),
    Rule(
        id="margin",
        title="delayed scaling has an unusual margin",
        subject="config",
        needs="a recipe with a margin",
        collect=_COLLECT,
        condition=f"""
            the margin of a DelayedScaling recipe is below 0, or at least {LARGE_MARGIN}; a note from {NOTED_MARGIN} on
        """,
        silent="the default 0, and small margins",
        source="""
            Transformer Engine 2.20: scale = format maximum / amax / 2^margin; E4M3 has 18 powers of two, E5M2 32. The
            thresholds are this project's
        """,
        why="a scale too small rounds small elements to 0, and a scale too large clips the largest ones",
        disproof="underflows% and overflows% are as with margin=0",
        remedy="Remove margin= from the recipe",
        recipes=("fp8_delayed_scaling",),
        check=partial(
            FactHolds,
            find=_unusual_margins,
            applies_to=lambda facts: _are_known(facts) and bool(facts.settings.margins),
        ),
    ),
    Rule(
        id="failed-run",
        title="an exception ended the run",
        subject="model",
        needs="the recorded end of a session",
        collect="a run recorded by a session",
        condition="""
            the last process of the run ended with an exception, or with an exit status other than 0. Not checked after
            Ctrl-C or SIGTERM, since the run did not reach its end, or if the session was not stopped and the exit
            status is not known. A failure of an earlier start of a resumed run is a note
        """,
        silent="""
            sys.exit() with status 0; exceptions that te-precision-callbacks raises because of another finding; SIGTERM
            before the run was resumed
        """,
        severity="error",
        source="arithmetic",
        why="the training is incomplete, and a numerical problem may be the cause",
        disproof="the exception ended the run on purpose",
        remedy="Read the traceback in the output of the script",
        check=partial(
            Reported, kinds=("segment_ended", "stopped", "earlier_start"), find=_failure_of_run, is_of_all=True
        ),
        essential=True,
        consequence_of=("nonfinite", "contract"),
    ),
    Rule(
        id="contract",
        title="the run breaks its precision contract",
        subject="model",
        needs="a contract (require=)",
        collect='require="fp8 >= 95%"',
        condition="the products of the run do not meet require=",
        silent="runs without require=",
        severity="error",
        source="the contract itself",
        why="the run does not have the precision that you required",
        disproof="the contract is meant for another model or recipe",
        remedy="Fix what the message names for each product, or change the contract",
        check=partial(Reported, kinds=("contract_checked",), find=_broken_contract),
        essential=True,
    ),
    Rule(
        id="evaluation-mode",
        title="the model trains in evaluation mode",
        subject="model",
        needs="layers of Transformer Engine",
        collect="a run recorded by a session",
        condition="an optimizer of the model steps while all Transformer Engine layers are in evaluation mode",
        silent="models with a layer of Transformer Engine in training mode, or without such layers",
        source="PyTorch's documentation of Module.eval(); this project",
        why="dropout is off, statistics of batch norm are fixed, and a session does not observe the layers",
        disproof="the model trains in evaluation mode on purpose",
        remedy="Call model.train() before the training, and again after each evaluation",
        check=partial(
            Reported, kinds=("evaluation_mode",), find=lambda event: [Sighting(event.text, since=event.iteration)]
        ),
    ),
    Rule(
        id=FAILED_OBSERVATION,
        title="the observation of the run failed",
        subject="model",
        needs="a run without a failure of the observation",
        collect="a run without a failure of the observation",
        condition="a failure was reported, after which statistics or records are missing",
        silent="runs without failures",
        severity="note",
        source="the events of the run",
        why="data that were not observed cannot be checked",
        disproof="you do not need the affected statistics",
        remedy="Read the failure in the log; report it if it is a bug in te-precision-callbacks",
        check=partial(Reported, kinds=("observation_failed", "records_limited"), find=_failure),
        essential=True,
    ),
)
