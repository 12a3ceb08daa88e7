"""The plans of five models from their configurations: what low precision is expected to buy on five devices.

    python benchmarks/speed_model.py        # prints the table with those of the speed model

Sizes are local to a rank. Each layer's linear products run in the recipe; the head and attention run in BF16, as they
usually do. Attention is causal, and counts in full, as in a coverage.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from te_precision_callbacks.coverage.coverage import Coverage, Product, Reason
from te_precision_callbacks.coverage.planned_products import gemm_sizes
from te_precision_callbacks.speed import SpeedError, device_named
from te_precision_callbacks.speed.estimate import StepSpeed, estimate_step
from te_precision_callbacks.speed.recorded import Step

DEVICES = ("h100_sxm", "h200_sxm", "h200_nvl", "b200", "b300")
RECIPES = ("fp8_delayed_scaling", "fp8_current_scaling", "fp8_block_scaling", "mxfp8", "nvfp4")
_FORMAT = {"fp8_block_scaling": "FP8 block", "mxfp8": "MXFP8", "nvfp4": "NVFP4"}


@dataclass(frozen=True)
class Model:
    """A configuration of a transformer, and its step.

    Attributes:
        width, inner, layers, heads, kv_heads, head_size: as in the configuration.
        gated: whether the MLP has a gate.
        vocabulary: the rows of the head; 0 without one.
        sequences, length: of a step, on one rank.
        experts, chosen: of a mixture: how many there are, and how many a token takes.
        tensor_parallel: over how many ranks the linear layers are split.
    """

    width: int
    inner: int
    layers: int
    heads: int
    kv_heads: int
    vocabulary: int
    sequences: int
    length: int
    gated: bool = False
    head_size: int = 0
    experts: int = 1
    chosen: int = 1
    tensor_parallel: int = 1

    def products(self, recipe: str) -> Iterator[Product]:
        """The products of a step, with the linear layers of blocks in a recipe."""
        split, tokens = self.tensor_parallel, self.sequences * self.length
        head_size = self.head_size or self.width // self.heads
        qkv = (self.heads + 2 * self.kv_heads) * head_size // split
        fc1 = self.inner * (2 if self.gated else 1) // split
        for number in range(self.layers):
            name = f"layers.{number}"
            yield from _linear(f"{name}.qkv", tokens, (self.width, qkv), recipe)
            yield from self._attention(name, head_size)
            yield from _linear(f"{name}.proj", tokens, (self.heads * head_size // split, self.width), recipe)
            for expert in range(self.experts):
                of = f"{name}.experts.{expert}" if self.experts > 1 else f"{name}.mlp"
                share = tokens * self.chosen // self.experts
                yield from _linear(f"{of}.fc1", share, (self.width, fc1), recipe)
                yield from _linear(f"{of}.fc2", share, (self.inner // split, self.width), recipe)
        if self.vocabulary:
            yield from _linear("head", tokens, (self.width, self.vocabulary // split), "")

    def _attention(self, name: str, head_size: int) -> Iterator[Product]:
        batch, length = self.sequences * self.heads // self.tensor_parallel, self.length
        for gemm, sizes in (("qk", (length, length, head_size)), ("pv", (length, head_size, length))):
            for backward, times in ((False, 1), (True, 2)):
                n, m, k = sizes
                macs = n * m * k * batch * times
                yield Product(
                    f"{name}.attention", "attention", gemm, backward, n, m, k, batch, times, macs,  # type: ignore[arg-type]
                    {"a": "BF16", "b": "BF16"}, reason=Reason.ATTENTION,
                )  # fmt: skip


MODELS: Mapping[str, Model] = {
    "Llama-3 8B, 1 x 8192": Model(4096, 14336, 32, 32, 8, 128256, 1, 8192, gated=True),
    "Llama-3 70B, TP 8, 1 x 8192": Model(8192, 28672, 80, 64, 8, 128256, 1, 8192, gated=True, tensor_parallel=8),
    "Mixtral 8x7B, 1 x 8192": Model(4096, 14336, 32, 32, 8, 32000, 1, 8192, gated=True, experts=8, chosen=2),
    "ViT-L, 128 x 196": Model(1024, 4096, 24, 16, 16, 0, 128, 196),
    "GPT-2 small, 8 x 1024": Model(768, 3072, 12, 12, 12, 50257, 8, 1024),
}


def _linear(name: str, tokens: int, sizes: tuple[int, int], recipe: str) -> Iterator[Product]:
    kind = _FORMAT.get(recipe, "FP8") if recipe else "BF16"
    for gemm, (n, m, k) in gemm_sizes(tokens, *sizes).items():
        reason = None if recipe else Reason.NOT_TE
        family = "te" if recipe else "torch"
        operands = {"a": kind, "b": kind}
        yield Product(name, family, gemm, gemm != "fprop", n, m, k, 1, 1, n * m * k, operands, reason=reason)  # type: ignore[arg-type]


def speed(model: Model, recipe: str, device: str) -> StepSpeed:
    """What is expected of a model's step.

    Raises:
        SpeedError: the device does not run the recipe.
    """
    found = device_named(device)
    found.check_recipe(recipe)
    return estimate_step(Step(Coverage(model.products(recipe)), recipe), found)


def table() -> Iterator[str]:
    """The lines of the table, in Markdown."""
    yield f"| model | device | BF16, ms | {' | '.join(RECIPES)} | layers slower in current scaling | ceiling |"
    yield "|---" * (5 + len(RECIPES)) + "|"
    for name, model in MODELS.items():
        for device in DEVICES:
            cells, slower, high, ceiling = [], "", 0.0, 0.0
            for recipe in RECIPES:
                try:
                    one = speed(model, recipe, device)
                except SpeedError:
                    cells.append("")
                    continue
                cells.append(_cell(one))
                high, ceiling = one.waterfall.high_ms, one.waterfall.ceiling
                if recipe == "fp8_current_scaling":
                    slower = _slower(one)
            yield f"| {name} | {device} | {high:.1f} | {' | '.join(cells)} | {slower} | {ceiling:.1f} |"


def _cell(one: StepSpeed) -> str:
    low, high = one.total.interval
    return f"{one.total.speedup:.2f} ({low:.2f} to {high:.2f})"


def _slower(one: StepSpeed) -> str:
    """How many layers are expected to be slower in low precision, and of how many."""
    sums: dict[str, float] = {}
    for product in one.times:
        if product.cost is not None:
            sums[product.layer] = sums.get(product.layer, 0.0) + product.low_ms - product.high_ms
    return f"{sum(value > 0 for value in sums.values())} of {len(sums)}"
