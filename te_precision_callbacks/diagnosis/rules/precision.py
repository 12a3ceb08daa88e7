"""Rules on the precision of products, and on the dtypes of states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from functools import partial
from itertools import chain

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.coverage.coverage import EXCLUDED, REMEDIES, Reason
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting, Sightings
from te_precision_callbacks.diagnosis.shapes import COLLECT_EACH_STEP, NEEDS_EACH_STEP, Changed, FactHolds
from te_precision_callbacks.flight.changes import GAP, LEAST_HISTORY, SHARE
from te_precision_callbacks.layers.folding import fold_for_sentence, form_of, numbers_of
from te_precision_callbacks.sinks.step_records import Event

_BLOCK = re.compile(r"(?P<series>.*?)(?<![^./])(?P<number>\d+)(?=[./])")
"""A name up to its first number that is a whole part of the path."""

_CHOSEN = frozenset({Reason.SECTION.name, Reason.BACKWARD_OVERRIDE.name, Reason.RECIPE_EXCEPTION.name})


class Hole(RuleCheck):
    """A layer in high precision among similar layers in low precision, or after steps in low precision."""

    def __init__(self) -> None:
        super().__init__()
        self._low: set[str] = set()

    def facts(self, facts: Facts) -> Sightings:
        yield from self._left_low_precision(facts)
        yield from _blocks_in_high_precision(facts)
        explicit: list[str] = []
        for form, unordered in group_by_key((form_of(layer.name), layer) for layer in facts.layers_that_ran).items():
            self.checked = True
            similar = sorted(unordered, key=lambda layer: numbers_of(layer.name))
            low = [layer.name for layer in similar if "fprop" in layer.low]
            high = [layer for layer in similar if _is_hole(layer) and layer.name not in self._low]
            outside = [layer.name for layer in high if layer.is_of_te and layer.reasons["fprop"][0] == "NO_AUTOCAST"]
            if low and len(outside) >= max(len(low), LEAST_OUTSIDE):
                count = f"{len(similar) - len(low)} of {len(similar)} similar layers run outside of te.autocast"
                yield Sighting(count, tuple(outside), severity="note", key=form)
            elif len(low) >= LEAST_LOW:
                ends = similar[0].name, similar[-1].name
                holes = [(layer.reasons["fprop"], layer.name) for layer in high if layer.name not in ends]
                in_regions = [layer.name for layer in similar[1:-1] if layer.is_explicit]
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
        self._low |= {layer.name for layer in ran if "fprop" in layer.low}
        reasons = group_by_key(((layer.reasons["fprop"], layer.since), layer.name) for layer in layers)
        for (reason, since), names in reasons.items():
            seen = f"ran in high precision after steps in low precision: {_describe_reason(*reason)}"
            yield Sighting(seen, tuple(names), since=since, key=f"left {reason[0]} {since}")


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
                reason = _describe_reason(*block[0].reasons.get("fprop", ("", "")))
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
    return "fprop" in layer.reasons and layer.reasons["fprop"][0] not in _CHOSEN and not layer.is_explicit


class NoLowPrecision(RuleCheck):
    def __init__(self) -> None:
        super().__init__()
        self._facts = Facts()
        self._has_low = False
        self._steps = 0

    def facts(self, facts: Facts) -> Sightings:
        self._facts = facts
        if not self._has_low and (facts.has_low or _recomputed_layers(facts)):
            self._has_low = self.checked = True
            yield Sighting("", withdraws=True)
        self.applies = self._has_low or facts.unobserved is None

    def step(self, numbers: StepNumbers) -> Sightings:
        self._steps += bool(self._facts.layers_that_ran)
        return self._find() if self._steps >= LEAST_STEPS else ()

    def event(self, event: Event) -> Sightings:
        if event.kind == "segment_ended" and self._facts.has_run:
            yield from self._find()
            layers = self._facts.te_layers_that_ran
            ends_in_high = self._has_low and layers and not self._facts.has_low
            if ends_in_high and all(layer.is_explicit for layer in layers):  # else the rule hole names the layers
                seen = "the last steps ran in high precision, earlier steps in low precision"
                yield Sighting(seen, since=max(layer.since for layer in layers), severity="note")

    def _find(self) -> Sightings:
        if self._has_low or not self.applies:
            return
        self.checked = True
        te_layers = self._facts.te_layers_that_ran
        expected = self._facts.settings.expects_low
        ran = te_layers or (self._facts.layers_that_ran if expected else [])
        if not ran:
            return
        reasons = Counter(chain.from_iterable(layer.reasons.values() for layer in ran))
        name, exactly = reasons.most_common(1)[0][0]
        reason = Reason[name] if name in Reason.__members__ else Reason.UNKNOWN
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
    return [layer for layer in facts.layers.values() if "mxfp8" in layer.recipe]


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
            few of them in high precision, the finding is a note
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
        check=partial(Changed, change="precision"),
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
            expected; else a note
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
        check=partial(FactHolds, find=_recomputed, applies_to=lambda facts: facts.has_run or None),
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
        check=partial(FactHolds, find=_mxfp8_gradients_in_e5m2, applies_to=lambda facts: bool(_of_mxfp8(facts))),
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
        check=partial(
            FactHolds,
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
        check=partial(FactHolds, find=_states_in_bfloat16, applies_to=lambda facts: bool(facts.states) or None),
    ),
)
