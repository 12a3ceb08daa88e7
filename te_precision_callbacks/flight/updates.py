"""The change of each weight from one step to the next, as a share of the weight, without waiting for the device."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.linalg import vector_norm

from te_precision_callbacks.base.numerics.layouts import PLAIN
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.flight.rows import UPDATE
from te_precision_callbacks.parameters.parameter import Parameter
from te_precision_callbacks.te import modules as te_modules

ELEMENTS = 64
"""The elements of a weight that are compared."""

_Kind = tuple[torch.device, torch.dtype]


class _Samples(NamedTuple):
    """Samples of the weights of one dtype, after a step of their optimizers.

    Attributes:
        places: int64, [weights]: their slots in the ring, on the device.
        values: float32, [weights, ELEMENTS].
        norms: float32, [weights].
    """

    parameters: list[Parameter]
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
        self._last: dict[_Kind, _Samples] = {}

    @torch.no_grad()
    def add(self, parameters: Iterable[Parameter]) -> None:
        """Add the stepped weights of an iteration; of a sharded weight, this rank's part counts."""
        alike: dict[_Kind, list[tuple[Parameter, int, torch.Tensor]]] = defaultdict(list)
        for parameter in parameters:
            weight = parameter.weight
            if weight.ndim < 2 or parameter.is_unwatched:
                continue
            if parameter.slot is None:
                self._find_slot(parameter)
            part = weight if type(weight) in PLAIN else getattr(weight, "_local_tensor", weight)
            size = part.nbytes // part.itemsize
            if parameter.slot is not None and size >= ELEMENTS and part.is_contiguous():
                stride = ((size - 1) // (ELEMENTS - 1) - 1) | 1  # odd, so that they are in different columns
                sample = part.as_strided((ELEMENTS,), (stride,))
                alike[part.device, part.dtype].append((parameter, parameter.slot, sample))
        for kind, entries in alike.items():
            of_kind, slots, samples = map(list, zip(*entries, strict=True))
            values = torch.stack(samples)
            if kind[1] is not torch.float32:
                values = values.float()
            before = self._before(kind, of_kind, slots)
            self._ring.put(slots, before.places, vector_norm(values - before.values, dim=1) / before.norms)
            self._last[kind] = before._replace(values=values, norms=vector_norm(values, dim=1))

    def _before(self, kind: _Kind, parameters: list[Parameter], slots: list[int]) -> _Samples:
        """Return the last samples of parameters: nan for a new one."""
        before = self._last.get(kind)
        if before is not None:
            if before.parameters == parameters:
                return before
            for parameter, sample in zip(before.parameters, before.values, strict=True):
                parameter.stepped_sample = sample
        new = torch.full((ELEMENTS,), torch.nan, device=kind[0])
        samples = [new if parameter.stepped_sample is None else parameter.stepped_sample for parameter in parameters]
        values = torch.stack(samples)
        return _Samples(parameters, torch.tensor(slots, device=kind[0]), values, vector_norm(values, dim=1))

    def _find_slot(self, parameter: Parameter) -> None:
        """Find the slot of a weight; a layer of Transformer Engine may run later."""
        path, _, name = parameter.name.rpartition(".")
        row = te_modules.find(type(parameter.module))
        parameter.is_unwatched = row is None
        if row is not None:
            layer = row.layer_of(name, [f"{path}{end}" for end in row.layers(parameter.module)])
            if (layer, "weight") in self._ring.places:
                parameter.slot = self._ring.slot(layer, UPDATE)
