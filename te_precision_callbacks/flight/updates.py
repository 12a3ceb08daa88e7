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
        samples_by_kind: dict[_Kind, list[tuple[Parameter, int, torch.Tensor]]] = defaultdict(list)
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
                samples_by_kind[part.device, part.dtype].append((parameter, parameter.slot, sample))
        for kind, entries in samples_by_kind.items():
            kind_parameters, slots, samples = map(list, zip(*entries, strict=True))
            values = torch.stack(samples)
            if kind[1] is not torch.float32:
                values = values.float()
            former_samples = self._before(kind, kind_parameters, slots)
            self._ring.put(
                slots, former_samples.places, vector_norm(values - former_samples.values, dim=1) / former_samples.norms
            )
            self._last[kind] = former_samples._replace(values=values, norms=vector_norm(values, dim=1))

    def _before(self, kind: _Kind, parameters: list[Parameter], slots: list[int]) -> _Samples:
        """Return the last samples of parameters: nan for a new one."""
        former_samples = self._last.get(kind)
        if former_samples is not None:
            if former_samples.parameters == parameters:
                return former_samples
            for parameter, sample in zip(former_samples.parameters, former_samples.values, strict=True):
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
