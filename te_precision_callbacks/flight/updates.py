"""The change of each weight from one step to the next, as a share of the weight, without waiting for the device."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.linalg import vector_norm

from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.flight.rows import UPDATE
from te_precision_callbacks.parameters.optimizers import SteppedWeight
from te_precision_callbacks.te import modules as te_modules

ELEMENTS = 64
"""The elements of a weight that are compared."""


class _Known(NamedTuple):
    """A parameter: another object of the same name is another one."""

    number: int
    weight: weakref.ReferenceType[torch.Tensor]
    slot: int | None


class _Samples(NamedTuple):
    """Samples of the weights of one dtype, after a step of their optimizers.

    Attributes:
        numbers: of the parameters.
        places: int64, [weights]: their slots in the ring, on the device.
        values: float32, [weights, ELEMENTS].
        norms: float32, [weights].
    """

    numbers: list[int]
    places: torch.Tensor
    values: torch.Tensor
    norms: torch.Tensor


class UpdateSizes:
    """Adds a number for the weight of each layer to the ring, after the steps of optimizers.

    The number is norm(w - w') / norm(w') over the same :data:`ELEMENTS` elements of the weight now (w) and after the
    last step of its optimizer (w'). The optimizer and other code count alike. Quantized and flattened weights are left
    out.
    """

    def __init__(self, ring: Ring) -> None:
        self._ring = ring
        self._known: dict[str, _Known] = {}  # by the name of the parameter
        self._numbers = itertools.count()
        self._last: dict[tuple[torch.device, torch.dtype], _Samples] = {}
        self._earlier: dict[int, torch.Tensor] = {}  # number -> sample, of optimizers that did not step last

    @torch.no_grad()
    def add(self, weights: Iterable[SteppedWeight]) -> None:
        """Add the stepped weights of an iteration; of a sharded weight, this rank's part counts."""
        alike: dict[tuple[torch.device, torch.dtype], tuple[list[_Known], list[torch.Tensor]]] = {}
        for name, weight, module in weights:
            if weight.ndim < 2:
                continue
            known = self._known.get(name)
            if known is None or known.weight() is not weight:
                known = _Known(next(self._numbers), weakref.ref(weight), self._slot_of(name, module))
                if known.slot is not None or te_modules.find(type(module)) is None:  # others may run later
                    self._known[name] = known
            own = weight if type(weight) in PLAIN else getattr(weight, "_local_tensor", weight)
            size = own.nbytes // own.itemsize
            if known.slot is not None and size >= ELEMENTS and own.is_contiguous():
                kind = own.device, own.dtype
                if kind not in alike:
                    alike[kind] = [], []
                of_kind, samples = alike[kind]
                of_kind += (known,)
                apart = ((size - 1) // (ELEMENTS - 1) - 1) | 1  # odd, so that they are in different columns
                samples += (own.as_strided((ELEMENTS,), (apart,)),)
        for kind, (of_kind, samples) in alike.items():
            now = torch.stack(samples)
            if kind[1] is not torch.float32:
                now = now.float()
            slots = [known.slot for known in of_kind if known.slot is not None]
            before = self._before(kind, [known.number for known in of_kind], slots)
            self._ring.put(slots, before.places, vector_norm(now - before.values, dim=1) / before.norms)
            self._last[kind] = before._replace(values=now, norms=vector_norm(now, dim=1))

    def _before(self, kind: tuple[torch.device, torch.dtype], numbers: list[int], slots: list[int]) -> _Samples:
        """Return the last samples of parameters: nan for a new one."""
        before = self._last.get(kind)
        if before is not None:
            if before.numbers == numbers:
                return before
            self._earlier.update(zip(before.numbers, before.values, strict=True))
        new = torch.full((ELEMENTS,), torch.nan, device=kind[0])
        values = torch.stack([self._earlier.get(number, new) for number in numbers])
        return _Samples(numbers, torch.tensor(slots, device=kind[0]), values, vector_norm(values, dim=1))

    def _slot_of(self, name: str, module: torch.nn.Module) -> int | None:
        path, _, own = name.rpartition(".")
        row = te_modules.find(type(module))
        if row is not None:
            layer = row.layer_of(own, [f"{path}{end}" for end in row.layers(module)])
            if (layer, "weight") in self._ring.places:
                return self._ring.slot(layer, UPDATE)
        return None
