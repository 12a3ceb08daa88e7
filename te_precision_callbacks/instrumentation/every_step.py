"""Adds the operands of each GEMM to the ring, in every step, also if nothing else observes the layer.

Each operand counts where the first GEMM reads it, in the codes that this GEMM gets: a weight once in a step, an
activation in each fprop, a gradient in each dgrad or wgrad. A result counts if no other GEMM reads it, which is true of
wgrad; and in float16, where finite operands can overflow. A wgrad that is added to others, as in ``main_grad``, does
not count.

What the codes say of inf and nan follows from the casts of Transformer Engine 2.20.2: FP8 keeps nan, and MXFP8 keeps
inf in its scales. Casts saturate otherwise, so an inf in FP8, or a nan in NVFP4, is a large number from there on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics.formats import E5M2 as E5M2_FORMAT
from te_precision_callbacks.base.numerics.layouts import (
    NVFP4,
    PER_TENSOR,
    PLAIN,
    fp8_format,
    gemm_operand,
    read_stored,
    scaling_mode,
)
from te_precision_callbacks.base.vocabulary import GEMM_OF_LAYOUT
from te_precision_callbacks.engine.kernels.columns import E4M3, E5M2, E8M0, FLOAT32, FORMATS, MAGNITUDE, SCALE, Largest
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.instrumentation.current_call import Forward


class EveryStep:
    """The watch of every step.

    Attributes:
        modules: the ids of watched modules; empty if nothing is watched.
        unwatched: classes and dtypes of tensors that were not added -> their number.
    """

    def __init__(self, ring: Ring, report: Callable[[str, str, Exception], None]) -> None:
        self.ring = ring
        self.modules: Collection[int] = ()
        self.unwatched: Counter[str] = Counter()
        self._report = report
        self._weights: set[str] = set()
        self._per_tensor: set[type] = set()
        self._numbers: dict[int, int] = {}

    def end_step(self) -> None:
        self._weights.clear()

    def note(self, forward: Forward, operands: Sequence[Any], keywords: Mapping[str, Any], result: Any) -> None:
        """Add the tensors of a forward's last GEMM, if it is watched."""
        gradients = forward.watched
        if gradients is None or not self.modules:
            return
        index = forward.half if forward.halves else 0
        layer = forward.layers[index]
        if len(operands) != 2:
            self.unwatched["GEMMs of experts"] += 1
            return
        try:
            gemm = GEMM_OF_LAYOUT[keywords.get("layout", "TN")]
            found: list[tuple[str, Any]] = []
            if gemm == "fprop":
                if layer not in self._weights:
                    self._weights.add(layer)
                    found.append(("weight", operands[0]))
                found.append(("activation", operands[1]))
            elif index not in gradients:
                gradients.add(index)
                found.append(("gradient", operands[1]))
            out = result[0]
            if (gemm == "wgrad" or out.dtype is torch.float16) and not keywords.get("accumulate"):
                found.append(("output" if gemm == "fprop" else gemm, out))
            tensors: list[Largest] = []
            order = len(self.ring.order)
            for name, tensor in found:
                slot = self.ring.places.get((layer, name))
                if slot is None:
                    slot = self.ring.slot(layer, name)
                kind = type(tensor)
                if kind in PLAIN and tensor.dtype in FORMATS:
                    if name == "activation":
                        self.ring.high.add(layer)
                    part = tensor, FORMATS[tensor.dtype], None, slot, order, MAGNITUDE
                elif kind in self._per_tensor:
                    codes = tensor._data
                    codes = tensor._transpose if codes is None else codes
                    part = codes, self._numbers[int(tensor._fp8_dtype)], tensor._scale_inv, slot, order, MAGNITUDE
                else:
                    parts = self._parts(gemm_operand(tensor, columnwise=gemm == "wgrad"), slot, order)
                    tensors += parts
                    order += bool(parts)
                    continue
                if part[0].numel():
                    tensors.append(tuple.__new__(Largest, part))  # Largest() would call a Python function
                    order += 1
            if tensors:
                device = tensors[0].values.device
                if device.type != "cuda" or not torch._C._cuda_isCurrentStreamCapturing():
                    self.ring.add(tensors, device)
        except Exception as error:
            self.modules = ()  # a second failure would only slow the training
            self.unwatched["failed"] += 1
            self._report("watching the GEMMs of", layer, error)

    def _parts(self, tensor: Any, slot: int, order: int) -> list[Largest]:
        """Return a tensor, and the scales of its blocks, as the ring takes them; empty if it takes no such tensor."""
        kind = type(tensor)
        if kind in PLAIN:
            if tensor.dtype in FORMATS:
                return [Largest(tensor, FORMATS[tensor.dtype], None, slot, order)]
            self.unwatched[str(tensor.dtype)] += 1
            return []
        mode = scaling_mode(tensor)
        if mode is None:
            self.unwatched[kind.__name__] += 1
            return []
        if mode == NVFP4:
            amax = tensor._amax_rowwise
            return [Largest(tensor._amax_columnwise if amax is None else amax, FLOAT32, None, slot, order)]
        number = E5M2 if fp8_format(tensor) is E5M2_FORMAT else E4M3
        if mode == PER_TENSOR:
            self._numbers[int(tensor._fp8_dtype)] = number
            if len(self._numbers) == 2:
                self._per_tensor.add(kind)
            codes = tensor._data
            codes = tensor._transpose if codes is None else codes
            return [Largest(codes, number, tensor._scale_inv, slot, order)] if codes.numel() else []
        stored = read_stored(tensor, columnwise=tensor._rowwise_data is None)
        if stored is None or not stored.codes.numel():
            return []
        codes = Largest(stored.codes, number, None, slot, order)
        if stored.scale_format is not None:
            return [codes, Largest(stored.scales, E8M0, None, slot, order, SCALE)]
        scales = torch.where(stored.scales == 1.0, 0.0, stored.scales)  # TE gives a block of zeros the scale 1
        return [codes, Largest(scales, FLOAT32, None, slot, order, SCALE)]
