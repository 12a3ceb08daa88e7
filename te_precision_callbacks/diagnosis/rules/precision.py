"""Rules on the precision of products, and on the dtypes of states."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain

from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.coverage.coverage import EXCLUDED, REMEDIES, Reason
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.diagnosis.shapes import FactHolds
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

    def facts(self, facts: Facts) -> Iterator[Sighting]:
        yield from self._left_low_precision(facts)
        yield from _blocks_in_high_precision(facts)
        forms = group_by_key((form_of(layer.name), layer) for layer in facts.layers_that_ran)
        self.checked |= bool(forms)
        explicit: list[str] = []
        for unordered in forms.values():
            alike = sorted(unordered, key=lambda layer: numbers_of(layer.name))
            low = [layer.name for layer in alike if "fprop" in layer.low]
            outside = [layer.name for layer in alike if _is_outside(layer) and layer.name not in self._low]
            if low and len(outside) >= max(len(low), LEAST_OUTSIDE):
                count = f"{len(alike) - len(low)} of {len(alike)} similar layers run outside of te.autocast"
                yield Sighting(count, tuple(outside), severity="note", key=form_of(low[0]))
                continue
            holes = []
            kept = []
            for layer in alike[1:-1]:
                if layer.is_explicit:
                    kept.append(layer.name)
                elif _is_hole(layer) and layer.name not in self._low:
                    holes.append((layer.reasons["fprop"], layer.name))
            if len(low) >= LEAST_LOW and len(kept) < len(low):
                explicit += kept
            if len(low) < LEAST_LOW or len(holes) >= len(low):
                continue
            for reason, names in group_by_key(holes).items():
                similar = f"{len(low)} similar layers are in low precision, such as {fold_for_sentence(low[0])}"
                seen = f"ran in high precision: {_describe_reason(*reason)}; {similar}"
                yield Sighting(seen, tuple(names), key=f"{form_of(names[0])} {reason[0]}")
        if explicit:
            seen = "run inside te.autocast(enabled=False), and similar layers in low precision"
            yield Sighting(seen, tuple(explicit), severity="note", key="explicit")

    def _left_low_precision(self, facts: Facts) -> Iterator[Sighting]:
        left = []
        for layer in facts.layers_that_ran:
            if layer.name in self._low and _is_hole(layer):
                left.append(((layer.reasons["fprop"], layer.since), layer.name))
            elif "fprop" in layer.low:
                self._low.add(layer.name)
        for (reason, since), names in group_by_key(left).items():
            seen = f"ran in high precision after steps in low precision: {_describe_reason(*reason)}"
            yield Sighting(seen, tuple(names), since=since, key=f"left {reason[0]} {since}")


def _blocks_in_high_precision(facts: Facts) -> Iterator[Sighting]:
    """Find a block without Transformer Engine layers among blocks that have them, whatever its layers are called.

    A block is the part of a name up to its first number. Blocks of another size are another part of the model.
    """
    blocks: dict[str, dict[int, list[LayerFacts]]] = {}
    for layer in facts.layers_that_ran:
        match = _BLOCK.match(layer.name)
        if match and layer.shape:
            blocks.setdefault(match["series"], {}).setdefault(int(match["number"]), []).append(layer)
    for series, numbered in blocks.items():
        sizes: list[int] = []
        forms: set[str] = set()
        for layers in numbered.values():
            low = {form_of(layer.name) for layer in layers if "fprop" in layer.low}
            if low:
                sizes.append(_size(layers))
                forms |= low
        others = []
        for number in sorted(numbered)[1:-1]:
            layers = numbered[number]
            own_forms = {form_of(layer.name) for layer in layers}
            if forms.isdisjoint(own_forms) and not any(layer.low or layer.is_of_te for layer in layers):
                others.append(layers)
        if len(others) != 1 or len(sizes) < LEAST_LOW:
            continue
        if sorted(sizes)[len(sizes) // 2] <= OF_A_BLOCK * _size(others[0]):
            first = others[0][0]
            reason = _describe_reason(*first.reasons["fprop"]) if "fprop" in first.reasons else ""
            count = f"{len(sizes)} similar blocks have such layers"
            seen = f"no layer of the block runs in low precision: {reason}; {count}"
            yield Sighting(seen, tuple(layer.name for layer in others[0]), key=f"block {series}")


def _size(layers: Iterable[LayerFacts]) -> int:
    return sum(layer.shape[0] * layer.shape[1] for layer in layers)


def _describe_reason(reason: str, exactly: str) -> str:
    text = Reason[reason].value if reason in Reason.__members__ else reason
    if exactly in ("", text, EXCLUDED):
        return exactly or text
    return f"{text} ({exactly})"


def _is_outside(layer: LayerFacts) -> bool:
    return _is_hole(layer) and layer.is_of_te and layer.reasons["fprop"][0] == "NO_AUTOCAST"


def _is_hole(layer: LayerFacts) -> bool:
    return "fprop" in layer.reasons and layer.reasons["fprop"][0] not in _CHOSEN and not layer.is_explicit


class NoLowPrecision(RuleCheck):
    def __init__(self) -> None:
        super().__init__()
        self._facts = Facts()
        self._has_low = False
        self._steps = 0

    def facts(self, facts: Facts) -> Iterator[Sighting]:
        self._facts = facts
        if not self._has_low and (facts.has_low or _recomputed_layers(facts)):
            self._has_low = True
            yield Sighting("", withdraws=True)
        self.checked |= self._has_low
        self.applies = self._has_low or facts.unobserved is None

    def step(self, numbers: StepNumbers) -> Iterator[Sighting]:
        facts = numbers.facts
        if self._has_low or not self.applies:
            return
        self._steps += bool(facts.layers_that_ran)
        if self._steps >= LEAST_STEPS:
            self.checked = True
            yield from self._sighting(facts)

    def event(self, event: Event) -> Iterator[Sighting]:
        if event.kind == "segment_ended":
            self.checked |= self._facts.has_run and bool(self.applies)
            yield from self._sighting(self._facts)
            yield from self._ended(self._facts)

    def _ended(self, facts: Facts) -> Iterator[Sighting]:
        of_te = facts.te_layers_that_ran
        ends_in_high = self._has_low and of_te and not facts.has_low
        if ends_in_high and all(layer.is_explicit for layer in of_te):  # else the rule hole names the layers
            seen = "the last steps ran in high precision, earlier steps in low precision"
            yield Sighting(seen, since=max(layer.since for layer in of_te), severity="note")

    def _sighting(self, facts: Facts) -> Iterator[Sighting]:
        ran = facts.layers_that_ran
        of_te = facts.te_layers_that_ran
        expected = "" if facts.settings is None else facts.settings.expects_low
        if self._has_low or not self.applies or not (of_te or (ran and expected)):
            return
        reasons = Counter(chain(*(layer.reasons.values() for layer in of_te or ran)))
        name, exactly = reasons.most_common(1)[0][0]
        reason = Reason[name] if name in Reason.__members__ else Reason.UNKNOWN
        why = _describe_reason(reason.name, exactly)
        though = f", although {expected}" if expected else ""
        layers = many(len(of_te), "Transformer Engine layer") if of_te else "no Transformer Engine layers"
        seen = f"no product runs in low precision{though}; {layers}; reason: {why}"
        yield Sighting(seen, severity="warning" if expected else "note", remedy=_remedy(reason))


def _remedy(reason: Reason) -> str:
    text = REMEDIES.get(reason, "")
    return text[:1].upper() + text[1:]


def _recomputed_layers(facts: Facts) -> tuple[str, ...]:
    """Return the layers with a forward in low precision that a checkpoint recomputes in high precision."""
    names = []
    for layer in facts.layers_that_ran:
        for reason, _ in layer.reasons.values():
            if reason == Reason.RECOMPUTED.name:
                names.append(layer.name)
    return tuple(dict.fromkeys(names))


def _recomputed(facts: Facts) -> Iterator[Sighting]:
    layers = _recomputed_layers(facts)
    if layers:
        yield Sighting("the forward runs in low precision, the backward does not: " + Reason.RECOMPUTED.value, layers)


def _has_mxfp8(facts: Facts) -> bool:
    return any("mxfp8" in layer.recipe for layer in facts.layers.values())


def _mxfp8_gradients_in_e5m2(facts: Facts) -> Iterator[Sighting]:
    layers = [layer for layer in facts.layers.values() if "mxfp8" in layer.recipe]
    names = [layer.name for layer in layers if layer.formats.get("gradient") == "MXFP8 E5M2"]
    if names:
        yield Sighting("gradients are in E5M2: the recipe has Format.HYBRID", tuple(names), "gradient")


def _has_nvfp4(facts: Facts) -> bool:
    return any(layer.recipe == "nvfp4" for layer in facts.layers_that_ran)


def _nvfp4_tail(facts: Facts) -> Iterator[Sighting]:
    ordered = sorted(facts.layers_that_ran, key=lambda layer: facts.order_key(layer.name, "activation"))
    tail = ordered[len(ordered) - max(1, round(TAIL * len(ordered))) :]
    if all(layer.recipe == "nvfp4" and "fprop" in layer.low for layer in tail):
        names = tuple(layer.name for layer in tail)
        yield Sighting(f"the last {len(tail)} of {len(ordered)} layers run in NVFP4", names)


_STATES = {
    "optimizer_state": "the optimizer keeps its state in bfloat16",
    "main_grad": "gradients are accumulated in bfloat16",
    "reduce": "gradients are reduced over ranks in bfloat16",
}


def _states_in_bfloat16(facts: Facts) -> Iterator[Sighting]:
    for subject, text in _STATES.items():
        if "bfloat16" not in facts.states.get(subject, ()):
            continue
        if subject == "optimizer_state":
            yield Sighting(text, key=subject)
        elif facts.micro_batches >= MANY:
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
        severity="warning",
        source="this project",
        why="the run is slower than planned, and a comparison with BF16 is misleading",
        disproof="the layer is in high precision on purpose, set by code that the session does not see",
        remedy="Fix the reason given: replace the layer with a Transformer Engine layer, or call it inside te.autocast",
        check=Hole,
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
        severity="warning",
        source="accelerate#2597, LLaMA-Factory#9500, axolotl#3323: runs in BF16 that were meant to be FP8",
        why="the run has the speed and the numerics of high precision",
        disproof="the run is a high-precision baseline",
        remedy="Run the forward inside te.autocast(enabled=True, recipe=...)",
        check=NoLowPrecision,
        essential=True,
    ),
    Rule(
        id="recomputed",
        title="the backward of a checkpointed layer runs in high precision",
        subject="layer",
        needs="the precision of each product, which every session records",
        collect=_COLLECT,
        condition="a reentrant checkpoint recomputes the forward of a layer outside of te.autocast",
        silent="checkpoints that recompute under the recipe",
        severity="warning",
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
        severity="warning",
        source="NVIDIA-NeMo/Megatron-Bridge#638: training diverged; arXiv 2506.08027: E4M3 everywhere",
        why="with a scale per 32 elements, E4M3 has enough range, and E5M2 has one mantissa bit less",
        disproof="a run with Format.E4M3 has the same loss",
        remedy="Use MXFP8BlockScaling(fp8_format=Format.E4M3), the default of the recipe",
        recipes=("mxfp8",),
        check=partial(FactHolds, find=_mxfp8_gradients_in_e5m2, applies_to=_has_mxfp8),
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
        check=partial(FactHolds, find=_nvfp4_tail, applies_to=_has_nvfp4),
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
