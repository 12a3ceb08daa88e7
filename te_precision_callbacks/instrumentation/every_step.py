"""Adds the operands of each GEMM to the ring, in every step, also if nothing else observes the layer.

Each operand counts where a GEMM reads it, in the codes that this GEMM gets: a weight once in a step, and again after a
step of an optimizer; an activation in each fprop; a gradient in wgrad, or in dgrad if no wgrad follows or the codes of
both differ. A result counts if no other GEMM reads it, which is true of wgrad; and in float16, where finite operands
can overflow. A wgrad that is added to others, as in ``main_grad``, does not count. Of the input of a norm, the largest
RMS of a token counts (LayerNorm: standard deviation), whose reciprocal the norm keeps for its backward: a wrong result
of an earlier GEMM is seen there, and the norm hides it from the next.

What the codes say of inf and nan follows from the casts of Transformer Engine 2.20.2: FP8 keeps nan, and MXFP8 keeps
inf in its scales. Casts saturate otherwise. With delayed scaling, the largest magnitude is read from the quantizer,
which has it before the cast, with inf; with NVFP4, what a module without a norm gets is read before the cast. Otherwise
an inf in FP8 is a large number, and so is a nan in a gradient in NVFP4, which the check of gradients then finds.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from te_precision_callbacks.base.failures import Report
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
from te_precision_callbacks.engine.kernels.columns import (
    E4M3,
    E5M2,
    E8M0,
    FLOAT32,
    FORMATS,
    MAGNITUDE,
    RECIPROCAL,
    SCALE,
    Largest,
    of_amax,
)
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.instrumentation.arguments import GemmTensors
from te_precision_callbacks.instrumentation.current_call import Forward
from te_precision_callbacks.layers.forwards import is_in_backward


class EveryStep:
    """The watch of every step.

    Attributes:
        is_on: whether anything is watched.
        cast_hides_nan: whether a GEMM in NVFP4 has run, so that modules' inputs are added before the cast.
    """

    def __init__(self, ring: Ring, report: Report) -> None:
        self.ring = ring
        self.is_on = False
        self.cast_hides_nan = False
        self._report = report
        self._weights: set[str] = set()
        self._per_tensor: set[type] = set()
        self._numbers: dict[int, int] = {}

    def note_update(self) -> None:
        """Note that an optimizer has stepped parameters of the model: weights are read again."""
        self._weights.clear()
        if self.ring.updated_at is None:
            self.ring.updated_at = len(self.ring.order)

    def end_step(self) -> None:
        self._weights.clear()

    def note(self, forward: Forward, layout: str, gemms: Iterable[GemmTensors], *, accumulates: bool | None) -> None:
        """Add the tensors of a forward's last GEMM, or of the GEMMs of its experts.

        Args:
            gemms: A, B and the result of each.
            accumulates: whether each is added to its result.
        """
        known = forward.watched
        if known is None or not self.is_on:
            return
        gemm = GEMM_OF_LAYOUT[layout]
        first = forward.half if forward.halves else 0
        other_experts = gemm == "fprop" and not forward.halves and forward.layers[1:]
        try:
            tensors: list[Largest] = []
            order = self.ring.order
            if gemm == "fprop":
                # A reentrant checkpoint runs it in a backward, which may be of an earlier call.
                is_known = not (self.ring.is_late and is_in_backward())
                forward.micro_batch = self.ring.called if is_known else -1
            if forward.micro_batch != self.ring.turn:
                self.ring.turn_to(forward.micro_batch)
            if forward.norm is not None:
                of_norm = self.ring.slot(forward.layers[0], "input")
                tensors.append(Largest(forward.norm, RECIPROCAL, None, of_norm, len(order)))
                order.append(of_norm)
                forward.norm = None
            for index, (a, b, out) in enumerate(gemms, first):
                layer = forward.layers[index]
                result = None if accumulates else out
                if other_experts and out is not None:
                    self.ring.add_tokens(layer, out.numel() // out.shape[-1])
                for name, tensor in self._to_add(forward, known, index, gemm, (a, b, result)):
                    slot = self.ring.places.get((layer, name))
                    if slot is None:
                        slot = self.ring.slot(layer, name)
                    place = len(order)
                    order.append(slot)
                    kind = type(tensor)
                    if kind in self._per_tensor:
                        codes = tensor._data
                        if codes is None:
                            codes = tensor._transpose
                        part = codes, self._numbers[int(tensor._fp8_dtype)], tensor._scale_inv, slot, place, MAGNITUDE
                        amax = getattr(tensor._quantizer, "amax", None)
                        if amax is not None and not (name == "weight" and getattr(tensor, "requires_grad", False)):
                            tensors.append(of_amax(amax, slot, place))
                    elif kind in PLAIN and tensor.dtype in FORMATS:
                        if name == "activation":
                            self.ring.high.add(layer)
                        part = tensor, FORMATS[tensor.dtype], None, slot, place, MAGNITUDE
                    else:  # the debug path has tensors of its own
                        read = tensor if kind in PLAIN else gemm_operand(tensor, columnwise=gemm == "wgrad")
                        tensors += self._parts(read, slot, place)
                        continue
                    if part[0].numel():
                        tensors.append(tuple.__new__(Largest, part))  # Largest() would call a Python function
            if tensors:
                self.ring.add(tensors)
        except Exception as error:
            self._fail(forward.layers[first], error)

    def note_before_cast(self, forward: Forward, tensor: Any) -> None:
        """Add the activation that a module without a norm gets, which NVFP4 quantizes afterwards: its cast hides nan.

        Gradients are not read before their cast: that would cost more than all else together.
        """
        if forward.watched is None or not self.is_on or type(tensor) not in PLAIN or tensor.dtype not in FORMATS:
            return
        try:
            forward.watched.add((0, "activation"))
            if self.ring.called != self.ring.turn:
                self.ring.turn_to(self.ring.called)
            place = len(self.ring.order)
            slot = self.ring.slot(forward.layers[0], "activation")
            self.ring.order.append(slot)
            if tensor.numel():
                self.ring.add([Largest(tensor, FORMATS[tensor.dtype], None, slot, place)])
        except Exception as error:
            self._fail(forward.layers[0], error)

    def _fail(self, layer: str, error: Exception) -> None:
        self.is_on = False  # a second failure would only slow the training
        self.ring.unwatched["failed"] += 1
        self._report("watching the GEMMs of", layer, error)

    def _to_add(
        self, forward: Forward, known: set[tuple[int, str]], index: int, gemm: str, tensors: GemmTensors
    ) -> list[tuple[str, Any]]:
        """Return the tensors of a GEMM to add, with their names; ``known``: the tensors that are added."""
        a, b, out = tensors
        found: list[tuple[str, Any]] = []
        if gemm == "fprop":
            layer = forward.layers[index]
            if layer not in self._weights:
                self._weights.add(layer)
                found.append(("weight", a))
            if (index, "activation") not in known:
                found.append(("activation", b))
            if out is not None and out.dtype is torch.float16:
                found.append(("output", out))
            return found
        if (index, "gradient") not in known:
            kind = type(b)
            is_same_in_wgrad = forward.has_wgrad and (kind in self._per_tensor or kind in PLAIN)
            if gemm == "wgrad" or not is_same_in_wgrad or (out is not None and out.dtype is torch.float16):
                known.add((index, "gradient"))
                found.append(("gradient", b))
        if out is not None and (gemm == "wgrad" or out.dtype is torch.float16):
            found.append((gemm, out))
        return found

    def _parts(self, tensor: Any, slot: int, place: int) -> list[Largest]:
        """Return a tensor, and the scales of its blocks, as the ring takes them; empty if it takes no such tensor."""
        kind = type(tensor)
        if kind in PLAIN:
            if tensor.dtype in FORMATS:
                return [Largest(tensor, FORMATS[tensor.dtype], None, slot, place)] if tensor.numel() else []
            self.ring.unwatched[str(tensor.dtype)] += 1
            return []
        mode = scaling_mode(tensor)
        if mode is None:
            self.ring.unwatched[kind.__name__] += 1
            return []
        if mode == NVFP4:
            self.cast_hides_nan = True
            amax = tensor._amax_rowwise
            return [Largest(tensor._amax_columnwise if amax is None else amax, FLOAT32, None, slot, place)]
        number = E5M2 if fp8_format(tensor) is E5M2_FORMAT else E4M3
        if mode == PER_TENSOR:
            self._numbers[int(tensor._fp8_dtype)] = number
            if len(self._numbers) == 2:
                self._per_tensor.add(kind)
            codes = tensor._data
            codes = tensor._transpose if codes is None else codes
            if not codes.numel():
                return []
            largest = [Largest(codes, number, tensor._scale_inv, slot, place)]
            amax = getattr(tensor._quantizer, "amax", None)
            if amax is not None and not getattr(tensor, "requires_grad", False):  # a weight is not cast in its forward
                largest.append(of_amax(amax, slot, place))
            return largest
        stored = read_stored(tensor, columnwise=tensor._rowwise_data is None)
        if stored is None or not stored.codes.numel():
            return []
        codes = Largest(stored.codes, number, None, slot, place)
        if stored.scale_format is not None:
            return [codes, Largest(stored.scales, E8M0, None, slot, place, SCALE)]
        scales = torch.where(stored.scales == 1.0, 0.0, stored.scales)  # TE gives a block of zeros the scale 1
        return [codes, Largest(scales, FLOAT32, None, slot, place, SCALE)]
