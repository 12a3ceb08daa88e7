"""Rules on the precision of products, on the dtypes of states, and on the whole run: the scaling of the loss, the
reduction of amaxes, the arguments of recipes, and its outcome (an exception, a broken contract, a failed observation).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from itertools import chain

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.coverage.coverage import EXCLUDED, REMEDIES, Reason
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.diagnosis.finding import FAILED_OBSERVATION
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import (
    COLLECT_EACH_STEP,
    NEEDS_EACH_STEP,
    Changed,
    FactHolds,
    Reported,
    Rule,
    RuleCheck,
    Sighting,
    Sightings,
)
from te_precision_callbacks.flight.changes import GAP, LEAST_HISTORY, SHARE
from te_precision_callbacks.layers.folding import fold_for_sentence, form_of, numbers_of
from te_precision_callbacks.runs.summary import ended_by, summarize_broken_contract
from te_precision_callbacks.sinks.step_records import Event

_BLOCK = re.compile(r"(?P<series>.*?)(?<![^./])(?P<number>\d+)(?=[./])")
"""A name up to its first number that is a whole part of the path."""

_LEFT = "ran in high precision after steps in low precision"

_NO_HOLES = frozenset({"", Reason.SECTION.name, Reason.BACKWARD_OVERRIDE.name, Reason.RECIPE_EXCEPTION.name})


class Hole(RuleCheck):
    """A layer in high precision among similar layers in low precision, or after steps in low precision."""

    _low: Set[str] = frozenset()
    _left: Sequence[LayerFacts] = ()  # by te.autocast(enabled=False), unlike others

    def facts(self, facts: Facts) -> Sightings:
        self._left = [
            layer for layer in facts.layers_that_ran if layer.name in self._low and layer.is_explicit and facts.has_low
        ]
        yield from self._left_low_precision(facts)
        yield from _blocks_in_high_precision(facts)
        explicit: list[str] = []
        for form, unordered in group_by_key((form_of(layer.name), layer) for layer in facts.layers_that_ran).items():
            self.checked = True
            similar = sorted(unordered, key=lambda layer: numbers_of(layer.name))
            low = [layer.name for layer in similar if "fprop" in layer.low]
            high = [layer for layer in similar if _is_hole(layer) and layer.name not in self._low]
            outside = [layer.name for layer in high if layer.is_of_te and layer.reason[0] == "NO_AUTOCAST"]
            if low and len(outside) >= max(len(low), LEAST_OUTSIDE):
                count = f"{len(similar) - len(low)} of {len(similar)} similar layers run outside of te.autocast"
                yield Sighting(count, tuple(outside), severity="note", key=form)
            elif len(low) >= LEAST_LOW:
                ends = similar[0].name, similar[-1].name
                holes = [(layer.reason, layer.name) for layer in high if layer.name not in ends]
                in_regions = [
                    layer.name for layer in similar[1:-1] if layer.is_explicit and layer.name not in self._low
                ]
                explicit += in_regions if len(in_regions) < len(low) else ()
                example = f"{len(low)} similar layers are in low precision, such as {fold_for_sentence(low[0])}"
                for reason, names in group_by_key(holes).items() if len(holes) < len(low) else ():
                    seen = f"ran in high precision: {_describe_reason(*reason)}; {example}"
                    yield Sighting(seen, tuple(names), key=f"{form} {reason[0]}")
        if explicit:
            seen = "run inside te.autocast(enabled=False), and similar layers in low precision"
            yield Sighting(seen, tuple(explicit), severity="note", key="explicit")

    def _left_low_precision(self, facts: Facts) -> Sightings:
        ran = facts.layers_that_ran
        layers = [layer for layer in ran if layer.name in self._low and _is_hole(layer)]
        self._low = self._low | {layer.name for layer in ran if "fprop" in layer.low}
        reasons = group_by_key(((layer.reason, layer.since), layer.name) for layer in layers)
        for (reason, since), names in reasons.items():
            seen = f"{_LEFT}: {_describe_reason(*reason)}"
            yield Sighting(seen, tuple(names), since=since, key=f"left {reason[0]} {since}")

    def step(self, numbers: StepNumbers) -> Sightings:
        return self._left_by_region(numbers.iteration)

    def event(self, event: Event) -> Sightings:
        if event.kind == "segment_ended":
            yield from self._left_by_region(event.iteration)

    def _left_by_region(self, iteration: int) -> Sightings:
        for layer in self._left:
            if iteration - layer.since >= GAP:
                self.note_data(layer.since - 1)
                yield Sighting(
                    f"{_LEFT}: {_describe_reason(*layer.reason)}",
                    (layer.name,),
                    since=layer.since,
                    key=f"by a region {layer.since}",
                )


def _blocks_in_high_precision(facts: Facts) -> Sightings:
    """Find a block without Transformer Engine layers among blocks that have them, whatever its layers are called.

    A block is the part of a name up to its first number. Blocks of another size are another part of the model.
    """
    ran = [(match, layer) for layer in facts.layers_that_ran if layer.shape and (match := _BLOCK.match(layer.name))]
    blocks = group_by_key(((match["series"], int(match["number"])), layer) for match, layer in ran)
    for series, numbered in group_by_key((series, block) for (series, _), block in sorted(blocks.items())).items():
        low = [block for block in numbered if any("fprop" in layer.low for layer in block)]
        forms = {form_of(layer.name) for block in low for layer in block if "fprop" in layer.low}
        without = [
            block
            for block in numbered[1:-1]
            if not any(form_of(layer.name) in forms or layer.low or layer.is_of_te for layer in block)
        ]
        if len(without) == 1 and len(low) >= LEAST_LOW:
            (block,) = without
            if sorted(map(_size, low))[len(low) // 2] <= OF_A_BLOCK * _size(block):
                reason = _describe_reason(*block[0].reason)
                count = f"{len(low)} similar blocks have such layers"
                seen = f"no layer of the block runs in low precision: {reason}; {count}"
                yield Sighting(seen, tuple(layer.name for layer in block), key=f"block {series}")


def _size(layers: Iterable[LayerFacts]) -> int:
    return sum(layer.shape[0] * layer.shape[1] for layer in layers)


def _describe_reason(reason: str, exactly: str) -> str:
    text = Reason[reason].value if reason in Reason.__members__ else reason
    if exactly in ("", text, EXCLUDED):
        return exactly or text
    return f"{text} ({exactly})"


def _is_hole(layer: LayerFacts) -> bool:
    return layer.reason[0] not in _NO_HOLES and not layer.is_explicit


class NoLowPrecision(RuleCheck):
    _has_low = False
    _steps = 0

    def facts(self, facts: Facts) -> Sightings:
        if not self._has_low and (facts.has_low or _recomputed_layers(facts)):
            self._has_low = self.checked = True
            yield Sighting("", withdraws=True)
        self.applies = self._has_low or not facts.unobserved

    def step(self, numbers: StepNumbers) -> Sightings:
        self._steps += bool(self.run.layers_that_ran)
        if self._steps >= LEAST_STEPS:
            yield from self._find()
        yield from self._has_left(numbers.iteration)

    def event(self, event: Event) -> Sightings:
        if event.kind == "segment_ended" and self.run.has_run:
            yield from self._find()
            yield from self._has_left(event.iteration, has_ended=True)

    def _has_left(self, iteration: int, *, has_ended: bool = False) -> Sightings:
        """Find a model that left low precision by te.autocast(enabled=False); the rule hole names single layers.

        A warning needs as many steps since then as before: the last part of a run may be in high precision on purpose.
        """
        layers = self.run.te_layers_that_ran
        if self._has_low and layers and not self.run.has_low and all(layer.is_explicit for layer in layers):
            since = max(layer.since for layer in layers)
            lasts = iteration - since + 1
            sighting = Sighting("the last steps ran in high precision, earlier steps in low precision", since=since)
            if lasts >= max(since, GAP):
                yield sighting
            elif has_ended and lasts >= GAP:
                yield sighting._replace(severity="note")

    def _find(self) -> Sightings:
        if self._has_low or not self.applies:
            return
        self.checked = True
        te_layers = self.run.te_layers_that_ran
        expected = self.run.settings.expects_low
        ran = te_layers or (self.run.layers_that_ran if expected else [])
        if not ran:
            return
        reasons = Counter(chain.from_iterable(layer.reasons.values() for layer in ran))
        name, exactly = reasons.most_common(1)[0][0]
        reason = Reason.__members__.get(name, Reason.UNKNOWN)
        why = _describe_reason(reason.name, exactly)
        though = f", although {expected}" if expected else ""
        layers = many(len(te_layers), "Transformer Engine layer") if te_layers else "no Transformer Engine layers"
        seen = f"no product runs in low precision{though}; {layers}; reason: {why}"
        yield Sighting(seen, severity="warning" if expected else "note", remedy=_remedy(reason))


def _remedy(reason: Reason) -> str:
    text = REMEDIES.get(reason, "")
    return text[:1].upper() + text[1:]


def _recomputed_layers(facts: Facts) -> tuple[str, ...]:
    """Return the layers with a forward in low precision that a checkpoint recomputes in high precision."""
    recomputed = Reason.RECOMPUTED.name
    return tuple(
        layer.name for layer in facts.layers_that_ran if any(name == recomputed for name, _ in layer.reasons.values())
    )


def _recomputed(facts: Facts) -> Sightings:
    if layers := _recomputed_layers(facts):
        yield Sighting("the forward runs in low precision, the backward does not: " + Reason.RECOMPUTED.value, layers)


def _of_mxfp8(facts: Facts) -> list[LayerFacts]:
    return [layer for layer in facts if "mxfp8" in layer.recipe]


def _mxfp8_gradients_in_e5m2(facts: Facts) -> Sightings:
    if names := [layer.name for layer in _of_mxfp8(facts) if layer.formats.get("gradient") == "MXFP8 E5M2"]:
        yield Sighting("gradients are in E5M2: the recipe has Format.HYBRID", tuple(names), "gradient")


def _nvfp4_tail(facts: Facts) -> Sightings:
    ordered = sorted(facts.layers_that_ran, key=lambda layer: facts.order_key(layer.name, "activation"))
    tail = ordered[-max(1, round(TAIL * len(ordered))) :]
    if all(layer.recipe == "nvfp4" and "fprop" in layer.low for layer in tail):
        names = tuple(layer.name for layer in tail)
        yield Sighting(f"the last {len(tail)} of {len(ordered)} layers run in NVFP4", names)


_STATES = {
    "optimizer_state": "the optimizer keeps its state in bfloat16",
    "main_grad": "gradients are accumulated in bfloat16",
    "reduce": "gradients are reduced over ranks in bfloat16",
}


def _states_in_bfloat16(facts: Facts) -> Sightings:
    for subject, text in _STATES.items():
        if "bfloat16" in facts.states.get(subject, ()) and subject == "optimizer_state":
            yield Sighting(text, key=subject)
        elif "bfloat16" in facts.states.get(subject, ()) and facts.micro_batches >= MANY:
            yield Sighting(f"{text} over {facts.micro_batches} micro-batches", key=subject)


_COLLECT = "a run recorded by a session, in which layers of the model run"

LEAST_STEPS = 3
"""Collection steps without low precision."""

LEAST_LOW = 3
"""Alike layers in low precision that make another one a hole."""

LEAST_OUTSIDE = 2
"""Alike layers outside of te.autocast that are no exception for a first or last layer."""

OF_A_BLOCK = 1.5
"""How many times the weights of a block without Transformer Engine layers the similar blocks may have."""

TAIL = 0.15
"""The last share of the layers that NVFP4 is advised against."""

MANY = 8
"""Micro-batches in a step."""


_NEEDS_SCALER = """
    Gradients in float16 below 6e-8 are 0: scale the loss with torch.amp.GradScaler, which needs weights in float32
    under torch.autocast(dtype=torch.float16). Or train in bfloat16
"""


def remedy_of_small_gradients(facts: Facts) -> str:
    """The remedy if something runs in float16 although no GradScaler scales the loss; empty otherwise."""
    lacks_scaler = facts.settings.are_known and not facts.settings.loss_is_scaled and _has_float16(facts)
    return _NEEDS_SCALER if lacks_scaler else ""


def is_scaled(facts: Facts) -> bool:
    """Return whether a GradScaler scales the loss for float16, and skips steps with inf or nan."""
    return facts.settings.loss_is_scaled and (facts.settings.float16 or _has_float16(facts))


def _has_float16(facts: Facts) -> bool:
    layers = list(facts)
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


def _failure_of_run(check: Reported, event: Event) -> Sightings:
    first_line = event.text.partition("\n")[0].rstrip(":. ")
    if event.kind == "stopped":
        check.lacks = check.lacks or first_line
    elif event.kind == "earlier_start":
        yield Sighting(first_line, since=event.iteration, severity="note", key=first_line)
    elif event.severity == "error":
        cause = ended_by(first_line)
        if cause and cause != "sys.exit()":
            check.lacks = check.lacks or f"the run was ended by {cause} after step {event.iteration}"
        elif not cause and not first_line.startswith(_EXPLAINED):
            yield Sighting(f"the run was ended by {first_line}", since=event.data.get("step", event.iteration))


def _broken_contract(check: Reported, event: Event) -> Sightings:
    if not event.data.get("checked", True):
        check.lacks = event.text.rstrip(".").replace("The precision contract (require=)", "it")
    elif event.severity != "info":
        yield Sighting(summarize_broken_contract(event.text).rstrip("."), since=event.iteration)


def _failure(check: Reported, event: Event) -> Sightings:
    first_line = event.text.partition("\n")[0].rstrip(".")
    check.lacks = check.lacks or f"in step {event.iteration}, {first_line}"
    return ()


_COLLECT_RUN = "a session, or a run recorded by one"

NOTED_MARGIN = 3
LARGE_MARGIN = 6
"""Powers of two between amax and the format's maximum that are a note, and a warning."""

RULES = (
    Rule(
        id="hole",
        title="a layer in high precision among similar layers in low precision",
        subject="layer",
        needs="the precision of each product, which every session records",
        collect=_COLLECT,
        condition=f"""
            a layer's forward GEMM runs in high precision, but it ran in low precision in earlier steps, or most similar
            layers (names that differ only in numbers; at least {LEAST_LOW}) run in low precision. Or a single block has
            no Transformer Engine layers, but at least two thirds of the weights of the similar blocks. If as many of
            the similar layers run outside of te.autocast as in low precision, or if te.autocast(enabled=False) keeps a
            few of them in high precision from the start, the finding is a note
        """,
        silent="""
            layers that a section of the config or the recipe keeps in high precision; the first and the last of the
            similar layers and blocks; several blocks without Transformer Engine layers, as in hybrid models
        """,
        source="this project",
        why="the run is slower than planned, and a comparison with BF16 is misleading",
        disproof="the layer is in high precision on purpose, set by code that the session does not see",
        remedy="Fix the reason given: replace the layer with a Transformer Engine layer, or call it inside te.autocast",
        check=Hole,
    ),
    Rule(
        id="hole",
        title="layers run in high precision for a few steps",
        subject="layer",
        needs=NEEDS_EACH_STEP,
        collect=COLLECT_EACH_STEP,
        condition=f"""
            the activation of a layer was quantized in {LEAST_HISTORY} steps or more, is not quantized for 1 to {GAP}
            steps, and is again after them; in one micro-batch or in all; in at most 1 of {SHARE + 1} steps since the
            first quantized one
        """,
        silent="""
            layers that change their precision for good, as at the end of a warm-up or for the last part of a run, or
            that change it often
        """,
        source="this project",
        why="steps in another precision are slower, and hide what low precision does",
        disproof="the script does that on purpose, for example in a measurement",
        remedy="""
            Look in these steps for a call of the model outside of te.autocast, or with enabled=False, such as a retry
            after a failure or an evaluation that trains
        """,
        check=lambda: Changed(kinds=("precision",)),
    ),
    Rule(
        id="no-low-precision",
        title="nothing runs in low precision",
        subject="model",
        needs="the precision of each product, which every session records",
        collect=_COLLECT,
        condition=f"""
            no product runs in low precision in the first {LEAST_STEPS} collection steps or by the end. A warning if the
            trainer's settings, or a te.autocast(enabled=True) without layers in it, show that low precision is
            expected; else a note. Or all layers have left low precision by te.autocast(enabled=False): a note, and a
            warning after as many steps in high precision as before
        """,
        silent="""
            models without Transformer Engine layers, unless the trainer was asked to convert them; runs in which layers
            were not observed
        """,
        source="accelerate#2597, LLaMA-Factory#9500, axolotl#3323: runs in BF16 that were meant to be FP8",
        why="the run has the speed and the numerics of high precision",
        disproof="the run is a high-precision baseline",
        remedy="Run the forward inside te.autocast(enabled=True, recipe=...)",
        check=NoLowPrecision,
        essential=True,
    ),
    Rule(
        id="hole",
        title="the backward of a checkpointed layer runs in high precision",
        subject="layer",
        needs="the precision of each product, which every session records",
        collect=_COLLECT,
        condition="a reentrant checkpoint recomputes the forward of a layer outside of te.autocast",
        silent="checkpoints that recompute under the recipe",
        source="torch.utils.checkpoint restores torch's autocast, but not Transformer Engine's",
        why="dgrad and wgrad run in high precision, and do not update the scales of delayed scaling",
        disproof="the backward runs in high precision on purpose",
        remedy=_remedy(Reason.RECOMPUTED),
        check=lambda: FactHolds(find=_recomputed, applies_to=lambda facts: facts.has_run or None),
    ),
    Rule(
        id="mxfp8-hybrid",
        title="MXFP8 with gradients in E5M2",
        subject="config",
        needs="the formats of operands",
        collect=_COLLECT,
        condition="a layer with the MXFP8 recipe has gradients in E5M2",
        silent="FP8 block scaling, for which one user found HYBRID better (NVIDIA/TransformerEngine#2754)",
        source="NVIDIA-NeMo/Megatron-Bridge#638: training diverged; arXiv 2506.08027: E4M3 everywhere",
        why="with a scale per 32 elements, E4M3 has enough range, and E5M2 has one mantissa bit less",
        disproof="a run with Format.E4M3 has the same loss",
        remedy="Use MXFP8BlockScaling(fp8_format=Format.E4M3), the default of the recipe",
        recipes=("mxfp8",),
        check=lambda: FactHolds(find=_mxfp8_gradients_in_e5m2, applies_to=lambda facts: bool(_of_mxfp8(facts))),
    ),
    Rule(
        id="nvfp4-tail",
        title="NVFP4 in the last layers",
        subject="model",
        needs="the precision of each product, which every session records",
        collect=_COLLECT,
        condition=f"all of the last {100 * TAIL:g} % of the layers, in order of execution, run in NVFP4",
        silent="nothing: a note",
        severity="note",
        source="arXiv 2509.25149: a 12B model kept its first 2 and last 8 blocks in BF16; the last 4 suffice",
        why="long runs with NVFP4 in all linear layers diverged",
        disproof="the run is short or a fine-tuning: these may not show the problem",
        remedy="Keep the last layers in BF16 or MXFP8: DisableFP8Layer, or a region of te.autocast",
        cost="these layers run at the speed of BF16",
        recipes=("nvfp4",),
        check=lambda: FactHolds(
            find=_nvfp4_tail,
            applies_to=lambda facts: any(layer.recipe == "nvfp4" for layer in facts.layers_that_ran),
        ),
    ),
    Rule(
        id="bf16-state",
        title="optimizer state or gradients in bfloat16",
        subject="model",
        needs="the dtypes of the optimizer state after the first step",
        collect="a session over at least one step of a torch optimizer of the model",
        condition=(
            f"optimizer state in bfloat16; gradients accumulated or reduced in it over {MANY} micro-batches or more"
        ),
        silent="few micro-batches",
        severity="note",
        source=(
            "Nemotron 3 Ultra: gradients of the output layer accumulated in BF16 were a large run's first divergence"
        ),
        why="runs that seem to diverge in FP8 often lose small updates in this state",
        disproof="the same run with float32 state has the same loss",
        remedy="Keep optimizer state, main_grad and reductions in float32",
        cost="memory: two more bytes per element",
        check=lambda: FactHolds(find=_states_in_bfloat16, applies_to=lambda facts: bool(facts.states) or None),
    ),
    Rule(
        id="grad-scaler",
        title="a GradScaler without float16",
        subject="config",
        needs="the scalers that step the model's optimizers, and the types of the first step",
        collect=_COLLECT_RUN,
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
        check=lambda: FactHolds(find=_scaler_without_float16, applies_to=_are_known),
    ),
    Rule(
        id="stale-scale",
        title="amaxes are not reduced over all ranks that share a layer",
        subject="config",
        needs="delayed scaling on several ranks that reduce their statistics together",
        collect=_COLLECT_RUN,
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
        check=lambda: FactHolds(find=_unreduced_amaxes, applies_to=_reduces_amaxes),
    ),
    Rule(
        id="ignored-argument",
        title="an argument of the recipe has no effect",
        subject="config",
        needs="the recipes that layers used",
        collect=_COLLECT_RUN,
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
        check=lambda: FactHolds(find=_ignored_arguments, applies_to=_are_known),
    ),
    Rule(
        id="stale-scale",
        title="delayed scaling has an unusual margin",
        subject="config",
        needs="a recipe with a margin",
        collect=_COLLECT_RUN,
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
        check=lambda: FactHolds(
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
        check=lambda: Reported(
            kinds=("segment_ended", "stopped", "earlier_start"), find=_failure_of_run, is_of_all=True
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
        check=lambda: Reported(kinds=("contract_checked",), find=_broken_contract),
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
        check=lambda: Reported(
            kinds=("evaluation_mode",),
            find=lambda check, event: [Sighting(event.text, since=event.iteration)],
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
        check=lambda: Reported(kinds=("observation_failed", "records_limited"), find=_failure),
        essential=True,
    ),
)
