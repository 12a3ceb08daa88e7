"""A step measured by the ring."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

FINITE_AGAIN = 3
"""Steps of optimizers, with only finite tensors, after which the training goes on as before: nan in weights lasts."""

UPDATE = "update"
"""The change of a layer's weight from one step to the next, as a share of its norm."""

TOKENS = "tokens"
"""The number of tokens that an expert has got."""

BACKWARD = ("gradient", "dgrad", "wgrad")
"""Tensors of the backward."""

_NEVER = np.iinfo(np.int32).max


class TensorSlot(NamedTuple):
    """A tensor of a layer; ``input`` is what its norm gets."""

    layer: str
    tensor: str

    @property
    def magnitude(self) -> str:
        """The name of the number in :attr:`StepRow.magnitudes`."""
        if self.tensor == UPDATE:
            return "share of the norm of the weight"
        return "largest RMS of a token" if self.tensor == "input" else "largest magnitude"


@dataclass
class StepRow:
    """A step measured by the ring.

    Attributes:
        order: the slots in the order in which GEMMs read or wrote them; one appears once for each micro-batch.
        magnitudes: float32, [slots]: the largest magnitude over the micro-batches, with inf and nan; -1 for a tensor
            that was not read. Of tensors with scaled blocks, an upper bound, at most twice as large (MXFP8). Of the
            input of a norm, the largest RMS of a token (LayerNorm: standard deviation).
        first: the place in ``order`` of the first tensor with inf or nan; None without one.
        high: the layers with an activation in high precision.
        unwatched: tensors and GEMMs of the step that were not added -> their number.
        tokens: slot -> number of tokens of an expert, over the micro-batches.
        updated_at: the place in ``order`` at which an optimizer first stepped parameters of the model; None without.
        turns: places in ``order`` from which on another micro-batch is read or written, with its number, or -1 if that
            is not known.
        micro_batches: their number; 0 if it is not known.
    """

    iteration: int
    order: Sequence[int]
    high: Set[str] = frozenset()
    unwatched: Mapping[str, int] = field(default_factory=dict)
    magnitudes: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty(0, np.float32))
    first: int | None = None
    tokens: Mapping[int, int] = field(default_factory=dict)
    updated_at: int | None = None
    turns: Sequence[tuple[int, int]] = ()
    micro_batches: int = 0

    def micro_batch_of(self, order: int) -> int:
        """Return the micro-batch of a place in ``order``, from 0; -1 if it is not known."""
        return next((number for begin, number in reversed(self.turns) if begin <= order), -1)

    def add(self, row: npt.NDArray[np.int32]) -> None:
        """Add the row of a device: int32, [slots, 3]."""
        bits, scales, first = row.T
        magnitudes = bits.view(np.float32)
        with np.errstate(invalid="ignore", over="ignore"):
            scaled = np.where(scales < 0, magnitudes, magnitudes * scales.view(np.float32))
        new_magnitudes = np.where(bits < 0, np.float32(-1), scaled).astype(np.float32)
        former_magnitudes = np.pad(
            self.magnitudes, (0, max(len(new_magnitudes) - len(self.magnitudes), 0)), constant_values=-1
        )
        self.magnitudes = (
            np.fmax(former_magnitudes, new_magnitudes) if (former_magnitudes >= 0).any() else new_magnitudes
        )
        earliest = int(first.min(initial=_NEVER))
        if earliest != _NEVER and (self.first is None or earliest < self.first):
            self.first = earliest
