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

from collections import defaultdict
from typing import Any

import torch

from te_precision_callbacks.base.failures import Report
from te_precision_callbacks.base.numerics.formats import E5M2 as E5M2_FORMAT
from te_precision_callbacks.base.numerics.layouts import NVFP4, PER_TENSOR, PLAIN
from te_precision_callbacks.base.vocabulary import GemmName
from te_precision_callbacks.coverage.formats import format_of_operand
from te_precision_callbacks.coverage.step_table import StepTable
from te_precision_callbacks.engine.kernels import largest
from te_precision_callbacks.engine.kernels.columns import (
    AMAX,
    E4M3,
    E5M2,
    E8M0,
    FLOAT32,
    FORMATS,
    MAGNITUDE,
    RECIPROCAL,
    SCALE,
    LargestOf,
)
from te_precision_callbacks.flight.ring import Ring
from te_precision_callbacks.instrumentation.current_call import Forward
from te_precision_callbacks.layers.forwards import ForwardKind, is_in_backward
from te_precision_callbacks.te.tensors import (
    FP8_FORM,
    PER_TENSOR_PARTS,
    fp8_format,
    gemm_operand,
    nvfp4_amax,
    quantizer_of,
    read_either,
    scaling_mode,
)


class EveryStep:
    """The watch of every step: the format of each GEMM's operands, and the largest magnitudes of its tensors.

    Attributes:
        is_on: whether magnitudes are watched.
        cast_hides_nan: whether a GEMM in NVFP4 has run, so that modules' inputs are added before the cast.
    """

    def __init__(self, ring: Ring, table: StepTable, report: Report) -> None:
        self.ring = ring
        self.table = table
        self.is_on = False
        self.cast_hides_nan = False
        self._report = report
        self._weights: set[str] = set()
        self._numbers: defaultdict[Any, int]  # key of a format -> its number in the kernels, or -1
        self._numbers = defaultdict(lambda: -1, FORMATS)
        self._numbers[RECIPROCAL] = RECIPROCAL
        self._quantized: set[type] = set()  # classes whose format is their dtype
        self._per_tensor: set[type] = set()  # those with one scale
        self._delayed: set[type] = set()  # classes of quantizers of delayed scaling

    def note_update(self) -> None:
        """Note that an optimizer has stepped parameters of the model: weights are read again."""
        self._weights.clear()
        if self.ring.updated_at is None:
            self.ring.updated_at = len(self.ring.order)

    def end_step(self) -> None:
        self._weights.clear()

    def note(self, forward: Forward, gemm: GemmName, index: int, a: Any, b: Any, out: Any) -> None:
        """Note the last GEMM of a forward: the formats of its operands, and tensors that the ring has not read yet.

        Args:
            index: of the layer.
            out: the result; None if it is added to others.
        """
        if forward.kind is ForwardKind.EVALUATION:
            return
        layer = forward.layers[index]
        try:
            formats = self.table.formats
            kind_a = type(a)
            kind_b = type(b)
            if kind_a in PLAIN:
                form_a: Any = a.dtype
            else:
                form_a = FP8_FORM(a) if kind_a in self._quantized else None
                if form_a not in formats:
                    form_a = self._form(a, columnwise=gemm != "fprop")
            if kind_b in PLAIN:
                form_b: Any = b.dtype
            else:
                form_b = FP8_FORM(b) if kind_b in self._quantized else None
                if form_b not in formats:
                    form_b = self._form(b, columnwise=gemm == "wgrad")
            shapes = forward.shapes
            shape: torch.Size | None = None
            if index in shapes:
                shape = None if gemm == "fprop" else shapes[index]  # an fprop that is computed again
            elif gemm == "fprop" and forward.kind is ForwardKind.OBSERVED:
                shape = shapes[index] = out.shape if type(out) in PLAIN else (b if out is None else out).size()
            self.table.calls[layer, gemm, forward.recipe, form_a, form_b, shape] += 1
            watched = forward.watched
            if watched is None or not self.is_on:
                return
            ring = self.ring
            order = ring.order
            parts: list[Any] = []
            if gemm == "fprop":
                # A reentrant checkpoint runs it in a backward, which may be of an earlier call.
                forward.micro_batch = -1 if ring.is_late and is_in_backward() else ring.called
            if forward.micro_batch != ring.turn:
                ring.turn_to(forward.micro_batch)
            adds: list[tuple[str, Any, Any]] = [*forward.unread]
            forward.unread = ()
            if gemm == "fprop":
                if layer not in self._weights:
                    self._weights.add(layer)
                    adds += (("weight", a, form_a),)
                if (index, "activation") not in watched:
                    adds += (("activation", b, form_b),)
                    if kind_b in PLAIN:
                        ring.high.add(layer)
            elif (index, "gradient") not in watched:
                is_same_in_wgrad = forward.has_wgrad and (kind_b in self._per_tensor or kind_b in PLAIN)
                if gemm == "wgrad" or not is_same_in_wgrad or (out is not None and out.dtype is torch.float16):
                    watched.add((index, "gradient"))
                    adds += (("gradient", b, form_b),)
            if out is not None and (gemm == "wgrad" or out.dtype is torch.float16):
                adds += (("output" if gemm == "fprop" else gemm, out, out.dtype if type(out) in PLAIN else None),)
            for order_in_step, (name, tensor, form) in enumerate(adds, len(order)):
                slot = ring.places[layer, name] if (layer, name) in ring.places else ring.slot(layer, name)
                order += (slot,)
                number = self._numbers[form]
                if number < 0:  # in blocks, of the debug path, or of an unknown class
                    tensor = gemm_operand(tensor, columnwise=gemm == "wgrad")
                    number = self._number(tensor)
                if number < 0:
                    parts += self._parts(tensor, slot, order_in_step)
                elif type(tensor) in PLAIN:
                    if tensor.nbytes:
                        parts += ((tensor, number, None, slot, order_in_step, MAGNITUDE),)
                else:
                    codes, transpose, scale, quantizer = PER_TENSOR_PARTS(tensor)
                    codes = transpose if codes is None else codes
                    if not codes.nbytes:
                        continue
                    parts += ((codes, number, scale, slot, order_in_step, MAGNITUDE),)
                    is_stored = name == "weight" and getattr(tensor, "requires_grad", False)  # not cast in its forward
                    if type(quantizer) in self._delayed and not is_stored:
                        parts += ((quantizer.amax, AMAX, None, slot, order_in_step, MAGNITUDE),)
            if parts:
                device = parts[0][0].device
                on = ring.devices.get(device)  # as in Ring.add, mostly without a call of it
                if on is None or len(ring.slots) > on.slots or on.handle_now() not in on.streams or on.captures():
                    ring.add(parts)
                else:
                    largest.add(parts, on.now)
        except Exception as error:
            self.fail(layer, error)

    def _form(self, operand: Any, *, columnwise: bool) -> object:
        """Return the key of an operand's format, and learn a new class of tensors."""
        text = format_of_operand(operand, columnwise=columnwise)
        mode = scaling_mode(operand)
        if mode in (None, NVFP4) or getattr(operand, "custom", False):
            self.table.formats[text] = text
            return text
        kind = type(operand)
        key = FP8_FORM(operand)
        self.table.formats[key] = text
        self._numbers[key] = self._number(operand)
        if mode == PER_TENSOR:
            self._per_tensor.add(kind)
        self._quantized.add(kind)
        return key

    def _number(self, tensor: Any) -> int:
        """Return the number of a plain tensor's format, or of FP8 with one scale; -1 of others."""
        if type(tensor) in PLAIN:
            return FORMATS.get(tensor.dtype, -1)
        if scaling_mode(tensor) != PER_TENSOR:
            return -1
        quantizer = quantizer_of(tensor)
        if hasattr(quantizer, "amax"):
            self._delayed.add(type(quantizer))
        return _number_of_codes(tensor)

    def fail(self, layer: str, error: Exception) -> None:
        self.is_on = False  # a second failure would only slow the training
        self.ring.unwatched["failed"] += 1
        self._report("watching the GEMMs of", layer, error)

    def _parts(self, tensor: Any, slot: int, order: int) -> list[LargestOf]:
        """Return a tensor in blocks and their scales, as the ring takes them; empty if it takes no such tensor."""
        mode = scaling_mode(tensor)
        if mode is None:
            self.ring.unwatched[str(tensor.dtype) if type(tensor) in PLAIN else type(tensor).__name__] += 1
            return []
        if mode == NVFP4:
            self.cast_hides_nan = True
            return [(nvfp4_amax(tensor), FLOAT32, None, slot, order, MAGNITUDE)]
        stored = read_either(tensor)
        if stored is None or not stored.codes.numel():
            return []
        codes = stored.codes, _number_of_codes(tensor), None, slot, order, MAGNITUDE
        if stored.scale_format is not None:
            return [codes, (stored.scales, E8M0, None, slot, order, SCALE)]
        scales = torch.where(stored.scales == 1.0, 0.0, stored.scales)  # TE gives a block of zeros the scale 1
        return [codes, (scales, FLOAT32, None, slot, order, SCALE)]


def _number_of_codes(tensor: Any) -> int:
    return E5M2 if fp8_format(tensor) is E5M2_FORMAT else E4M3
