"""The memory of a model by layer and kind, in low precision and in high precision.

memory = plan_memory(model, modules, recipe, tokens=4096)
memory.bytes("weight_columnwise")     # Bytes(low=..., high=0), of all layers
memory.added(lives="always")          # what low precision adds to what is always there; negative: it saves
show(memory)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import size
from te_precision_callbacks.layers.folding import folded

KINDS: Mapping[str, str] = {
    "parameter": "parameters in high precision",
    "weight_rowwise": "codes of weights, rowwise",
    "weight_columnwise": "codes of weights, columnwise",
    "weight_scales": "scales of weights",
    "gradient": "gradients of parameters",
    "saved_high": "activations saved in high precision",
    "saved_rowwise": "codes of saved activations, rowwise",
    "saved_columnwise": "codes of saved activations, columnwise",
    "saved_scales": "scales of saved activations",
    "scaling_state": "scales and amax history of delayed scaling",
    "gradient_codes": "codes and scales of the gradient of the output",
}
"""Kind of bytes -> its description."""

Lives = Literal["always", "to_backward", "in_backward"]
"""How long bytes are there: from step to step; from a layer's forward to its backward; or in its backward alone."""

LIVES: Mapping[Lives, str] = {
    "always": "always there",
    "to_backward": "kept from the forward to the backward",
    "in_backward": "kept in the backward of a layer",
}

_MOST_NAMES = 4


class Bytes(NamedTuple):
    """Bytes in the precision that is planned, and in high precision."""

    low: int
    high: int

    @property
    def added(self) -> int:
        """What low precision adds; negative: it saves."""
        return self.low - self.high


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind of one tensor of a layer.

    Attributes:
        layer: its name.
        kind: one of :data:`KINDS`.
        what: the tensor, such as ``weight`` or ``norm input``.
        low: planned bytes in the precision that the layer runs in.
        high: planned bytes of the same layer in high precision.
        lives: how long they are there.
    """

    layer: str
    kind: str
    what: str
    low: int
    high: int
    lives: Lives


@dataclass(frozen=True)
class Memory:
    """The memory of a model's layers on one rank.

    Attributes:
        rows: by layer, in the order of the model.
        recipe: as in :data:`~te_precision_callbacks.base.vocabulary.RECIPES`; empty for none, or for several.
        capability: compute capability of the GPU that is planned for.
        tokens: of one forward on this rank; None if unknown, where saved activations are not planned.
        cached: whether quantized weights are kept over micro-batches, with ``is_first_microbatch``.
        not_planned: modules whose memory is not known -> why.
        notes: what was assumed, and what is unknown.
    """

    rows: tuple[MemoryRow, ...]
    recipe: str
    capability: tuple[int, int]
    tokens: int | None
    cached: bool
    not_planned: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[MemoryRow]:
        return iter(self.rows)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have rows."""
        return tuple(dict.fromkeys(row.layer for row in self.rows if row.layer))

    def bytes(
        self, kind: str | None = None, *, lives: Lives | None = None, layer: str | None = None, what: str | None = None
    ) -> Bytes:
        """Return the bytes of a kind, of a time, of a layer, or of a tensor; None for all.

        Bytes that live in a backward alone count once, for the layer with the most of them.
        """
        low = high = 0
        in_backward: dict[str, list[int]] = {}
        for row in self.rows:
            if (
                kind not in (None, row.kind)
                or lives not in (None, row.lives)
                or layer not in (None, row.layer)
                or what not in (None, row.what)
            ):
                continue
            if row.lives == "in_backward":
                of_layer = in_backward.setdefault(row.layer, [0, 0])
                of_layer[0] += row.low
                of_layer[1] += row.high
            else:
                low += row.low
                high += row.high
        return Bytes(
            low + max((of_layer[0] for of_layer in in_backward.values()), default=0),
            high + max((of_layer[1] for of_layer in in_backward.values()), default=0),
        )

    def added(self, *, lives: Lives | None = None) -> int:
        """Return the bytes that low precision adds; negative: it saves."""
        return self.bytes(lives=lives).added

    def by_kind(self) -> dict[str, Bytes]:
        """Return the bytes of each kind that has any, in the order of :data:`KINDS`."""
        found = {row.kind for row in self.rows}
        return {kind: self.bytes(kind) for kind in KINDS if kind in found}


def show(memory: Memory) -> None:
    """Print the bytes by kind beside high precision, and notes, fitted to the terminal."""
    weights = "kept over micro-batches" if memory.cached else "made in each forward"
    tokens = "unknown tokens" if memory.tokens is None else f"{memory.tokens:,} tokens a forward"
    if memory.tokens is None and memory.bytes(lives="to_backward").high:
        tokens = "the tokens of a batch"
    terminal.show_text(
        f"Memory of {len(memory.layers)} layers on one rank: {memory.recipe or 'no recipe, or several'}, compute"
        f" capability {memory.capability[0]}.{memory.capability[1]}, {tokens}, codes of weights {weights}."
    )
    table = terminal.table("", "planned", "in high precision", "added")
    for column in table.columns[1:]:
        column.justify = "right"
    kinds = [(KINDS[kind], found) for kind, found in memory.by_kind().items()]
    for name, found in [*kinds, ("all on the device", memory.bytes())]:
        added = f"{'+' if found.added > 0 else ''}{size(found.added)}"
        table.add_row(*map(terminal.cell, (name, size(found.low), size(found.high), added)))
    terminal.show(table)
    for lives, text in LIVES.items():
        if any(row.lives == lives for row in memory):
            change = memory.added(lives=lives)
            does = f"{'adds' if change > 0 else 'saves'} {size(abs(change))}" if change else "adds nothing"
            terminal.show_text(f"What is {text}: low precision {does}.")
    for why in dict.fromkeys(memory.not_planned.values()):
        layers = folded([layer for layer, each in memory.not_planned.items() if each == why], most=_MOST_NAMES)
        terminal.show_text(f"Not planned: {', '.join(layers)}: {why}", hanging=2)
    terminal.show_notes(memory.notes)
