"""The expected time of a step, part by part from the ideal time, and the upper bound of the speed-up.

    fall = waterfall(PricedStep.of(step, device))
    for part in fall.parts:
        part.name, part.ms, part.kind
    fall.expected_ms                # the sum of all parts that are known
    fall.speedup, fall.ideal_speedup, fall.ceiling

The ideal runs every linear layer in low precision, and takes nothing for casts. The ceiling is Amdahl's law: the
speed-up if linear layers took no time at all. Both count the rest of the step only where its time is known.

Time outside of linear layers is estimated from bytes, at the bandwidth of other kernels:

- an optimizer reads and writes its state and the weights it updates, and reads the gradients;
- a norm outside of Transformer Engine reads and writes in the forward, and reads twice and writes in the backward, a
  tensor as large as what goes from block to block;
- ranks reduce gradients in a ring: each sends 2 (ranks - 1) / ranks of the bytes over its link. A part of that can hide
  behind the backward, which is not known: it counts as if nothing did.

Attention and other products without a weight take the time of their operations, at the share of the peak of BF16
kernels of linear layers, and are marked as estimates, too.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import StateRow
from te_precision_callbacks.speed.costs import gemm_cost
from te_precision_callbacks.speed.devices import Device
from te_precision_callbacks.speed.expected import UNKNOWN, ProductTime, calls_of, shape_of
from te_precision_callbacks.speed.priced import PricedStep
from te_precision_callbacks.speed.recorded import Step

WITHOUT_MASK = "attention with an unknown mask is counted in full: causal attention takes about half"
"""What limits the time of attention."""

WITH_MASK = "causal attention is counted without its masked part"
"""How attention counts whose mask is known."""

Kind = Literal["ideal", "loss", "estimate", "unknown"]


@dataclass(frozen=True)
class Part:
    """A part of a step.

    Attributes:
        name: what it is.
        ms: what it adds to the step; nan if it is not known.
        kind: ``ideal`` for linear layers in low precision without casts; ``loss`` for what comes on top of it in linear
            layers; ``estimate`` for the rest of the step; ``unknown`` for what cannot be estimated.
        why: what it was estimated from, or why it is not known.
    """

    name: str
    ms: float
    kind: Kind
    why: str = ""


@dataclass(frozen=True)
class Waterfall:
    """The parts of a step.

    Attributes:
        recipe: the recipe of the ideal; empty if nothing runs in low precision and none was given.
        parts: in the order in which they add up.
        linear_high_ms: all linear layers in BF16.
    """

    recipe: str
    parts: tuple[Part, ...]
    linear_high_ms: float

    @property
    def expected_ms(self) -> float:
        """The expected time of the step: of all that is known of it."""
        return sum(part.ms for part in self.parts if not math.isnan(part.ms))

    @property
    def rest_ms(self) -> float:
        """The known time outside of linear layers."""
        return sum(part.ms for part in self.parts if part.kind == "estimate")

    @property
    def ideal_ms(self) -> float:
        """The step if every linear layer ran in low precision, without casts."""
        return self.rest_ms + sum(part.ms for part in self.parts if part.kind == "ideal")

    @property
    def high_ms(self) -> float:
        """The step in BF16."""
        return self.linear_high_ms + self.rest_ms

    @property
    def speedup(self) -> float:
        """The expected speed-up of the step."""
        return _ratio(self.high_ms, self.expected_ms)

    @property
    def ideal_speedup(self) -> float:
        """The speed-up of the ideal."""
        return _ratio(self.high_ms, self.ideal_ms)

    @property
    def ceiling(self) -> float:
        """The speed-up if linear layers took no time; inf if nothing else is known of the step."""
        return _ratio(self.high_ms, self.rest_ms)

    @property
    def unknown(self) -> tuple[Part, ...]:
        """What is in no figure."""
        return tuple(part for part in self.parts if part.kind == "unknown")

    def as_json(self) -> dict[str, object]:
        """As ``te-precision speed --json`` has it."""
        return {
            "recipe": self.recipe or None,
            "parts": [
                {"name": p.name, "ms": None if math.isnan(p.ms) else p.ms, "kind": p.kind, "why": p.why}
                for p in self.parts
            ],
            "high_ms": self.high_ms,
            "ideal_ms": self.ideal_ms,
            "expected_ms": self.expected_ms,
            "speedup": self.speedup,
            "ideal_speedup": self.ideal_speedup,
            "ceiling": self.ceiling,
        }


def waterfall(priced: PricedStep) -> Waterfall:
    """The parts of a step. The ideal of layers in high precision is in :attr:`PricedStep.recipe`."""
    step, device, times, ideal_recipe = priced.step, priced.device, priced.times, priced.recipe
    linear = [one for one in times if one.gemm in GEMMS]
    no_gain = layers_without_gain(linear)
    ideal = 0.0
    losses: dict[str, float] = defaultdict(float)
    unknown: dict[str, int] = defaultdict(int)
    other = 0.0
    for one, product in zip(times, priced.products, strict=True):
        if one.gemm not in GEMMS:
            if one.recipe:
                unknown[f"{'attention' if one.family == 'attention' else 'other products'} in low precision"] += 1
            else:
                other += one.high_ms
        elif one.cost is not None:
            ideal += one.cost.kernel_ms
            if one.layer in no_gain:
                losses["shapes that gain nothing: their casts, padding and launches"] += one.low_ms - one.cost.kernel_ms
            else:
                losses["casts"] += one.cost.cast_ms
                losses["launches of casts"] += one.cost.launch_ms
                losses["padding"] += one.cost.padding_ms
        elif one.recipe == UNKNOWN:
            unknown["linear layers in FP8 of an unknown recipe"] += 1
        elif ideal_recipe:
            kernel = gemm_cost(shape_of(product), ideal_recipe, device).kernel_ms * calls_of(product)
            ideal += kernel
            losses[f"in high precision: {_cause(one)}"] += one.high_ms - kernel
        else:
            ideal += one.high_ms
    name = f"linear layers, all in {ideal_recipe}, without casts" if ideal_recipe else "linear layers in BF16"
    parts = [Part(name, ideal, "ideal")]
    in_order = sorted(losses.items(), key=lambda item: -item[1])
    parts += [Part(cause, ms, "loss") for cause, ms in in_order if ms]
    if other:
        shares = {one.mask_share for one in times if one.family == "attention" and not one.recipe}
        why = "their operations, as linear layers take"
        if shares - {None, 1}:
            why += f"; {WITH_MASK}"
        if None in shares:
            why += f"; {WITHOUT_MASK}"
        parts.append(Part("attention and other products", other, "estimate", why))
    parts += [Part(what, math.nan, "unknown", f"{count} products") for what, count in unknown.items()]
    parts += [Part(what, math.nan, "unknown", why) for what, why in step.unknown.items()]
    parts += _rest(step, device)
    high = sum(one.high_ms for one in linear if not one.recipe or one.cost is not None)
    return Waterfall(ideal_recipe, tuple(parts), high)


def layers_without_gain(times: Sequence[ProductTime]) -> set[str]:
    """The layers whose products in low precision take as long as in BF16, or longer: their casts counted once."""
    sums: dict[str, float] = defaultdict(float)
    for one in times:
        if one.cost is not None:
            sums[one.layer] += one.low_ms - one.high_ms
    return {layer for layer, more in sums.items() if more >= 0}


def _cause(one: ProductTime) -> str:
    return one.reason.value if one.reason is not None else "for a reason that is not known"


def _rest(step: Step, device: Device) -> list[Part]:
    """What is known of norms, the optimizer and communication from the types that are kept."""
    bytes_ms = 1 / (device.bandwidth_tbs * 1e9 * device.fitted.bandwidth)
    state: dict[str, list[StateRow]] = defaultdict(list)
    for row in step.coverage.state:
        state[row.subject].append(row)

    def kept(subject: str) -> int:
        return sum(row.bytes for row in state[subject])

    parts = []
    norms, between = sum(row.tensors for row in state["norm"]), sum(row.tensors for row in state["residual"])
    if norms and between and kept("residual"):
        moved = 5 * norms * kept("residual") / between
        parts.append(Part("norms outside of Transformer Engine", moved * bytes_ms, "estimate", f"{moved:.3g} bytes"))
    else:
        why = "no run has recorded their sizes"
        if step.coverage.state and not norms:
            why = "the run has no norm outside of Transformer Engine, by which they are estimated"
        parts.append(Part("norms and activations", math.nan, "unknown", why))
    if kept("optimizer_state") and kept("parameter"):
        updated = kept("master_weight") or kept("parameter")
        written = kept("parameter") if kept("master_weight") else 0
        gradients = kept("main_grad") or kept("gradient") or kept("parameter")
        moved = 2 * kept("optimizer_state") + 2 * updated + written + gradients
        parts.append(Part("optimizer", moved * bytes_ms, "estimate", f"{moved:.3g} bytes"))
    else:
        parts.append(Part("optimizer", math.nan, "unknown", "the bytes of its state were not recorded"))
    if step.world == 1:
        return parts
    if step.world and kept("reduce") and device.link_gbs:
        moved = 2 * (step.world - 1) / step.world * kept("reduce")
        why = f"{moved:.3g} bytes over the link, none of it hidden"
        parts.append(Part("reduction of gradients", moved / (device.link_gbs * 1e6), "estimate", why))
    else:
        parts.append(Part("communication", math.nan, "unknown", "what ranks exchange was not recorded"))
    return parts


def _ratio(a: float, b: float) -> float:
    return a / b if b else math.inf
