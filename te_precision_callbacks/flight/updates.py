"""The change of each weight from one step to the next, as a share of the weight, without waiting for the device."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.linalg import vector_norm

from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.flight.rows import UPDATE
from te_precision_callbacks.te import modules as te_modules

SteppedWeight = tuple[str, torch.Tensor, torch.nn.Module]
"""The name of a parameter, the parameter and its module."""

ELEMENTS = 64
"""The elements of a weight that are compared."""


class _Samples(NamedTuple):
    """Samples of the weights of one dtype after a step.

    Attributes:
        slots, places: their slots in the ring, on the host and on the device.
        values: float32, [weights, ELEMENTS].
        norms: float32, [weights].
    """

    slots: list[int]
    places: torch.Tensor
    values: torch.Tensor
    norms: torch.Tensor


class UpdateSizes:
    """Adds a number for the weight of each layer to the ring, after the steps of optimizers.

    The number is norm(w - w') / norm(w') over the same :data:`ELEMENTS` elements of the weight now (w) and after the
    last step (w'). The optimizer and other code count alike. Quantized and flattened weights are left out.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._slots: dict[str, int | None] = {}  # name of the parameter -> slot; None if it is no layer's weight
        self._last: dict[tuple[torch.device, torch.dtype], _Samples] = {}

    @torch.no_grad()
    def add(self, weights: Iterable[SteppedWeight]) -> None:
        """Add the stepped weights of an iteration; of a sharded weight, this rank's part counts."""
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[int], list[torch.Tensor]]] = {}
        for name, weight, module in weights:
            if weight.dim() < 2:
                continue
            slot = self._slots[name] if name in self._slots else self._slot_of(name, module)
            own = weight if type(weight) in PLAIN else getattr(weight, "_local_tensor", weight)
            size = own.numel()
            if slot is not None and size >= ELEMENTS and own.is_contiguous():
                slots, samples = alike.setdefault((own.device, own.dtype), ([], []))
                slots.append(slot)
                apart = ((size - 1) // (ELEMENTS - 1) - 1) | 1  # odd, so that they are in different columns
                samples.append(own.as_strided((ELEMENTS,), (apart,)))
        for kind, (slots, samples) in alike.items():
            now = torch.stack(samples)
            if kind[1] is not torch.float32:
                now = now.float()
            before = self._last.get(kind)
            if before is not None and before.slots == slots:
                places = before.places
                self._ring.put(slots, places, vector_norm(now - before.values, dim=1) / before.norms)
            else:
                places = torch.tensor(slots, device=kind[0])
            self._last[kind] = _Samples(slots, places, now, vector_norm(now, dim=1))

    def _slot_of(self, name: str, module: torch.nn.Module) -> int | None:
        path, _, own = name.rpartition(".")
        row = te_modules.find(type(module))
        slot = None
        if row is not None:
            layer = row.layer_of(own, [f"{path}{end}" for end in row.layers(module)])
            if (layer, "weight") in self._ring.places:
                slot = self._ring.slot(layer, UPDATE)
        self._slots[name] = slot
        return slot
