"""A rule on time: layers that low precision is expected to make slower."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.patches import keep_high
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import Product
from te_precision_callbacks.diagnosis.facts import Facts, LayerFacts
from te_precision_callbacks.diagnosis.rule import Judge, Rule, Sighting

if TYPE_CHECKING:
    from te_precision_callbacks.speed.devices import Device
    from te_precision_callbacks.speed.expected import Total


class SlowerInLowPrecision(Judge):
    """Layers with a longer expected time for GEMMs and casts than in BF16, on the GPU of the run."""

    def facts(self, facts: Facts) -> Iterator[Sighting]:
        from te_precision_callbacks.speed.devices import device_reported

        device = None if facts.settings is None else device_reported(facts.settings.gpu)
        self.applies = device is not None
        if device is None:
            return
        alike: dict[tuple[object, ...], list[LayerFacts]] = defaultdict(list)
        for layer in facts.layers.values():
            if layer.low and layer.rows and layer.shape:
                alike[layer.rows, layer.calls, layer.shape, layer.low, layer.recipe].append(layer)
        slower: list[str] = []
        worst, most = None, 0.0
        for layers in alike.values():
            whole = _expected(layers[0], device)
            if whole is None:
                continue
            self.judged = True
            lost = (whole.low_ms - whole.high_ms) * len(layers)
            if whole.verdict == "slower":
                slower += [layer.name for layer in layers]
                worst, most = (whole, lost) if lost > most else (worst, most)
        if worst is not None:
            low, high = worst.interval
            seen = (
                f"{many(len(slower), 'layer')} of {len(facts.layers)} {'are' if len(slower) > 1 else 'is'} expected to"
                f" be slower than in BF16 on {device.title}: those that lose most take {worst.low_ms:.3f} ms of a step"
                f" in place of {worst.high_ms:.3f} ms, {worst.speedup:.2f} ({low:.2f} to {high:.2f}) times as fast"
            )
            others = facts.layers.keys() - set(slower)
            yield Sighting(tuple(slower), "", "", seen, None, patch=keep_high(*slower, others=others))


def _expected(layer: LayerFacts, device: Device) -> Total | None:
    from te_precision_callbacks.speed.errors import SpeedError
    from te_precision_callbacks.speed.expected import timed, total

    n, (m, k) = layer.rows, layer.shape[:2]
    sizes = {"fprop": (n, m, k), "dgrad": (n, k, m), "wgrad": (m, k, n)}
    low = [gemm for gemm in GEMMS if gemm in layer.low]
    products = [
        Product(layer.name, "te", gemm, gemm != "fprop", *sizes[gemm], 1, layer.calls, n * m * k * layer.calls, {})
        for gemm in low
    ]
    try:
        return total(timed([(product, layer.recipe) for product in products], device), device) if low else None
    except SpeedError:  # the device does not run the recipe, or nothing is known of it
        return None


RULES = (
    Rule(
        id="slower-in-low-precision",
        title="layers are expected to be slower than in BF16",
        subject="layer",
        needs="a GPU whose speed is known, and the sizes and recipes of the first step",
        collect="a run on a GPU that te-precision speed knows",
        condition=(
            "the GEMMs of a layer with their casts are expected to take longer than its GEMMs in BF16, and the interval"
            " of 95 % of the speed-up is below 1"
        ),
        silent="layers whose interval includes 1; a GPU of which nothing is known",
        severity="note",
        source=(
            "docs/speed.md: a model fitted to Transformer Engine's published times. Users' reports: marin-community/"
            "marin#7282 (MXFP8 25 % slower), ms-swift#6980, huggingface/accelerate#3710"
        ),
        why="casts and small GEMMs take longer than the format saves: the layer loses accuracy for nothing",
        disproof="te-precision speed RUN --calibrate measures these shapes as faster on the GPU itself",
        remedy="Keep these layers in BF16, or give each step more tokens. te-precision speed RUN says what it saves",
        judge=SlowerInLowPrecision,
    ),
)
