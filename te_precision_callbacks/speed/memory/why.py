"""Why memory is not lower: the largest reasons in the order of their bytes, each with what to do.

for reason in reasons(memory):
    print(reason.bytes, reason.why, reason.remedy)
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from te_precision_callbacks.base.counts import size
from te_precision_callbacks.base.vocabulary import ONE_SCALE
from te_precision_callbacks.speed.memory.rows import (
    ACTIVATION_INPUT,
    ACTIVATION_OUTPUT,
    INPUT,
    NORM_INPUT,
    NORM_OUTPUT,
    NORM_STATISTICS,
    QUANTIZED_WEIGHT,
    SAVED,
    WEIGHT,
    Memory,
    MemoryRow,
)

_LEAST_SHARE = 0.005
"""The share of the layers' planned bytes below which a reason is not worth a line."""


@dataclass(frozen=True)
class MemoryReason:
    """A reason why memory is not lower.

    Attributes:
        key: a word for it.
        bytes: what it takes.
        layers: where.
        why: in words.
        remedy: what to do, or that nothing can be done.
    """

    key: str
    bytes: int
    layers: tuple[str, ...]
    why: str
    remedy: str


def reasons(memory: Memory) -> tuple[MemoryReason, ...]:
    """The reasons, the largest first; without those of less than half a percent of the layers' bytes."""
    least = _LEAST_SHARE * (memory.bytes().low - memory.bytes("workspace").low)  # which do not grow with the model
    found = [reason for reason in _all(memory) if reason.bytes and reason.bytes >= least]
    return tuple(sorted(found, key=lambda reason: -reason.bytes))


def break_even_tokens(memory: Memory) -> float | None:
    """The tokens of a forward from which on saved activations save what the codes and scales of weights, and the
    state of delayed scaling, add.

    None without a recipe or tokens, or where a forward saves no fewer bytes than in high precision.
    """
    factor = break_even_factor(memory)
    return None if factor is None or not memory.tokens else factor * memory.tokens


def break_even_factor(memory: Memory) -> float | None:
    """How many times the planned tokens a forward needs to break even; None as of :func:`break_even_tokens`."""
    weights = (row for row in memory if row.kind in (*QUANTIZED_WEIGHT, "parameter", "scaling_state"))
    saved = (row for row in memory if row.kind in SAVED)
    added, saving = sum(row.added for row in weights), -sum(row.added for row in saved)
    if saving <= 0:
        return None
    return max(0.0, added / saving)


def _all(memory: Memory) -> Iterator[MemoryReason]:
    rows = memory.rows
    kept: dict[str, int] = {}
    for row in rows:
        if row.kind == "parameter" and row.what == WEIGHT and row.low:
            kept[row.layer] = kept.get(row.layer, 0) + row.low
    codes = [row for row in rows if row.kind in QUANTIZED_WEIGHT]
    yield from _of_weights(memory, codes, kept)
    columnwise = [row for row in codes if row.kind == "weight_columnwise"]
    if memory.recipe in ONE_SCALE:
        why = "FP8 GEMMs of this GPU take one layout, so that dgrad reads a transpose of the weight's codes"
        remedy = (
            "Nothing to do on this GPU: with compute capability 10.x or 11.x tensor scaling needs no transpose. FSDP2"
            " makes the transposes in the backward alone."
        )
    else:
        why = "the blocks of dgrad's operand run along the other dimension, so that it has codes and scales of its own"
        remedy = "Nothing to do but a recipe with one scale a tensor on a GPU with compute capability 10.x or 11.x."
    yield _reason("columnwise_weights", columnwise, f"Codes of weights are there in both directions: {why}.", remedy)
    yield from _of_activations(rows)
    yield _reason(
        "scales",
        [row for row in rows if row.kind in ("weight_scales", "saved_scales")],
        "Scales of blocks come with the codes, padded to the tiles that GEMMs read.",
        "Nothing to do: 1/32 of the codes' bytes with MXFP8, 1/8 with NVFP4, up to 1/32 with block scaling.",
    )
    yield _reason(
        "scaling_state",
        [row for row in rows if row.kind == "scaling_state"],
        "Delayed scaling keeps a history of amaxes for each tensor.",
        "A smaller amax_history_len of the recipe keeps fewer.",
    )
    yield from _of_steps(memory)


def _of_weights(memory: Memory, codes: list[MemoryRow], kept: dict[str, int]) -> Iterator[MemoryReason]:
    twice = [row for row in codes if row.layer in kept]
    copies = sum(kept[layer] for layer in dict.fromkeys(row.layer for row in twice))
    when = "from the forward to the backward"
    if any(row.lives == "always" for row in twice):
        when = "all the time, over micro-batches"
    yield _reason(
        "weights_twice",
        twice,
        f"Weights are kept twice: {size(copies)} in high precision, and {size(_sum(twice))} as codes and scales,"
        f" {when}.",
        f"te.quantized_model_init(recipe=...) keeps the codes alone, and saves the {size(copies)}. The optimizer then"
        " has to keep master weights.",
    )
    alone = [row for row in codes if row.layer not in kept]
    high = sum(row.high for row in memory if row.kind == "parameter" and row.what == WEIGHT and not row.low)
    yield _reason(
        "quantized_weights",
        alone,
        f"Quantized weights take {size(_sum(alone))} in place of {size(high)} in high precision.",
        "Codes in both directions are as large as BF16 with FP8, and half of that with NVFP4.",
    )
    yield _reason(
        "init_values",
        memory.of(kind="init_value"),
        "The initial values of quantized weights are in host memory: the optimizer makes its master weights from them.",
        "Call clear_high_precision_init_val() of each parameter once the master weights are made.",
    )


def _of_activations(rows: Iterable[MemoryRow]) -> Iterator[MemoryReason]:
    rows = [row for row in rows if row.kind in SAVED]
    of_what: dict[str, list[MemoryRow]] = {}
    for row in rows:
        if row.kind == "saved_high":
            of_what.setdefault(row.what, []).append(row)
    yield _reason(
        "activation_input",
        of_what.get(ACTIVATION_INPUT, []),
        "The input of the activation function (GELU, SwiGLU) is saved in high precision in every recipe, since its"
        " gradient is computed from it.",
        "LayerNormMLP(checkpoint=True), or activation recompute around the MLP, computes it again in the backward.",
    )
    yield _reason(
        "norm_input",
        [*of_what.get(NORM_INPUT, ()), *of_what.get(NORM_STATISTICS, ())],
        "The input of norms is saved in high precision in every recipe, since their gradient is computed from it.",
        "Activation recompute of the block computes it again in the backward.",
    )
    operands = [row for what in (INPUT, NORM_OUTPUT, ACTIVATION_OUTPUT) for row in of_what.get(what, ()) if row.low]
    yield _reason(
        "high_operands",
        operands,
        "The input of these layers is saved in high precision: their weight's gradient is not computed from codes"
        " (a layer without a recipe or of torch's own, backward_override, save_original_input, or an input that is"
        " gathered before it is quantized).",
        "te-precision check shows why a layer is not in low precision.",
    )
    both = {(row.layer, row.what) for row in rows if row.kind == "saved_columnwise"}
    unread = [row for row in rows if row.kind == "saved_rowwise" and (row.layer, row.what) in both]
    yield _reason(
        "both_directions",
        unread,
        "LayerNormMLP saves the codes of its operands in both directions, of which its backward reads one.",
        "LayerNormLinear and Linear in place of LayerNormMLP drop the rowwise codes; so does checkpoint=True.",
    )


def _of_steps(memory: Memory) -> Iterator[MemoryReason]:
    yield _reason(
        "gradients",
        memory.of(kind="gradient"),
        "Gradients of parameters are in high precision in every recipe.",
        "Shard them over ranks (FSDP, distributed optimizer).",
    )
    yield _reason(
        "gradient_codes",
        _of_the_largest(memory.of(kind="gradient_codes")),
        "The backward of a layer quantizes the gradient of its output, beside the one in high precision.",
        "Nothing to do: it is freed before the next layer's. Smaller micro-batches make it smaller.",
    )
    yield _reason(
        "workspace",
        memory.of(kind="workspace"),
        "GEMMs have workspaces of their own, in every precision.",
        "Nothing to do: they do not grow with the model.",
    )


def _of_the_largest(rows: Iterable[MemoryRow]) -> list[MemoryRow]:
    """The rows of the layer with the most bytes."""
    of_layers: dict[str, list[MemoryRow]] = {}
    for row in rows:
        of_layers.setdefault(row.layer, []).append(row)
    return max(of_layers.values(), key=_sum, default=[])


def _reason(key: str, rows: Iterable[MemoryRow], why: str, remedy: str) -> MemoryReason:
    rows = list(rows)
    return MemoryReason(key, _sum(rows), _layers(rows), why, remedy)


def _sum(rows: Iterable[MemoryRow]) -> int:
    return sum(row.low for row in rows)


def _layers(rows: Iterable[MemoryRow]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(row.layer for row in rows if row.layer))
