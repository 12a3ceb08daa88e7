"""The memory of a model by layer and kind, in low precision and in high precision.

memory = plan_memory(model, modules, recipe, tokens=4096)
memory.bytes("weight_columnwise")     # Bytes(low=..., high=0), of all layers
memory.added(lives="always")          # what low precision adds to what is always there; negative: it saves
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Kind = Literal[
    "parameter",
    "weight_rowwise",
    "weight_columnwise",
    "weight_scales",
    "init_value",
    "gradient",
    "saved_high",
    "saved_rowwise",
    "saved_columnwise",
    "saved_scales",
    "scaling_state",
    "gradient_codes",
]
"""What bytes are of; see :data:`KINDS`."""

KINDS: Mapping[Kind, str] = {
    "parameter": "parameters in high precision",
    "weight_rowwise": "codes of weights, rowwise",
    "weight_columnwise": "codes of weights, columnwise",
    "weight_scales": "scales of weights",
    "init_value": "initial values of quantized weights, in host memory",
    "gradient": "gradients of parameters",
    "saved_high": "activations saved in high precision",
    "saved_rowwise": "codes of saved activations, rowwise",
    "saved_columnwise": "codes of saved activations, columnwise",
    "saved_scales": "scales of saved activations",
    "scaling_state": "scales and amax history of delayed scaling",
    "gradient_codes": "codes and scales of the gradient of the output",
}
"""Kind -> in words. ``init_value`` is host memory, and all others are device memory."""

Lives = Literal["always", "to_backward", "in_backward"]
"""How long bytes are there: from step to step; from a layer's forward to its backward; or in its backward alone."""

LIVES: Mapping[Lives, str] = {
    "always": "always there",
    "to_backward": "from the forward to the backward",
    "in_backward": "in the backward of a layer",
}

SAVED: tuple[Kind, ...] = ("saved_high", "saved_rowwise", "saved_columnwise", "saved_scales")

WEIGHT, INPUT, NORM_INPUT, NORM_STATISTICS, NORM_OUTPUT = (
    "weight",
    "input",
    "norm input",
    "norm statistics",
    "norm output",
)
ACTIVATION_INPUT, ACTIVATION_OUTPUT = "input of the activation function", "output of the activation function"
OTHER_PARAMETERS, OUTPUT_GRADIENT = "biases and norm weights", "gradient of the output"
"""What bytes belong to: :attr:`MemoryRow.what`."""


class Bytes(NamedTuple):
    """Bytes in the precision that is planned, and in high precision."""

    low: int
    high: int

    @property
    def added(self) -> int:
        """What low precision adds; negative: it saves."""
        return self.low - self.high

    def as_json(self) -> dict[str, int]:
        """Return the bytes as JSON has them."""
        return {"low": self.low, "high": self.high, "added": self.added}


@dataclass(frozen=True)
class MemoryRow:
    """Bytes of one kind of one tensor of a layer.

    Attributes:
        layer: its name.
        kind: as :data:`KINDS`.
        what: the tensor, such as ``weight`` or ``norm input``.
        low: planned bytes in the precision that the layer runs in.
        high: planned bytes of the same layer in high precision.
        lives: how long they are there.
    """

    layer: str
    kind: Kind
    what: str
    low: int
    high: int
    lives: Lives

    @property
    def added(self) -> int:
        """What low precision adds; negative: it saves."""
        return self.low - self.high


@dataclass(frozen=True)
class Memory:
    """The memory of a model's layers on one rank.

    Attributes:
        rows: by layer, in the order of the model.
        recipe: as in :data:`~te_precision_callbacks.base.vocabulary.RECIPES`; empty for none, or for several.
        capability: compute capability of the GPU that is planned for.
        tokens: of one forward on this rank; None if unknown, where saved activations are not planned.
        cached: whether quantized weights are kept over micro-batches, with ``is_first_microbatch``.
        transposes: whether per-tensor FP8 keeps a transpose for columnwise use.
        not_planned: modules whose memory is not known -> why.
        notes: what was assumed, and what is unknown.
    """

    rows: tuple[MemoryRow, ...]
    recipe: str
    capability: tuple[int, int]
    tokens: int | None
    cached: bool
    transposes: bool
    not_planned: Mapping[str, str]
    notes: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[MemoryRow]:
        return iter(self.rows)

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers that have rows."""
        return tuple(dict.fromkeys(row.layer for row in self.rows if row.layer))

    def of(
        self, *, kind: Kind | None = None, lives: Lives | None = None, layer: str | None = None, what: str | None = None
    ) -> Iterator[MemoryRow]:
        """The rows of a kind, of a time, of a layer, or of a tensor."""
        for row in self.rows:
            if (
                kind in (None, row.kind)
                and lives in (None, row.lives)
                and layer in (None, row.layer)
                and what in (None, row.what)
            ):
                yield row

    def bytes(self, kind: Kind | None = None, *, lives: Lives | None = None, layer: str | None = None) -> Bytes:
        """The bytes of a kind, on the device unless the kind is ``init_value``.

        What lives in a backward alone counts once, for the layer with the most of it.

        Args:
            kind: None for all kinds.
            lives: None for all times.
            layer: None for all layers.
        """
        return total(self.of(kind=kind, lives=lives, layer=layer), host=kind == "init_value")

    def added(self, *, lives: Lives | None = None) -> int:
        """The bytes of the device that low precision adds; negative: it saves."""
        return self.bytes(lives=lives).added

    def by_kind(self) -> dict[Kind, Bytes]:
        """The kinds that there are, in the order of :data:`KINDS`."""
        return by_kind(self.rows)


def by_kind(rows: Iterable[MemoryRow]) -> dict[Kind, Bytes]:
    """The bytes of each kind that rows have, in the order of :data:`KINDS`."""
    found: dict[Kind, list[MemoryRow]] = {}
    for row in rows:
        found.setdefault(row.kind, []).append(row)
    kinds: tuple[Kind, ...] = get_args(Kind)
    return {kind: total(found[kind], host=kind == "init_value") for kind in kinds if kind in found}


def total(rows: Iterable[MemoryRow], *, host: bool = False) -> Bytes:
    """The sum of rows; of what lives in a backward alone the largest layer.

    Args:
        rows: the rows.
        host: whether to add up host memory in place of the device's.
    """
    low = high = 0
    in_backward: dict[str, list[int]] = {}
    for row in rows:
        if (row.kind == "init_value") != host:
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
