"""Common base of the quantizer implementations.

A family of quantizers defines the buffers of its tensors in :meth:`Casting.buffers`, both for new tensors and for
existing tensors that a quantizer writes to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, ClassVar, NamedTuple

import torch

from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.te.tensors import scaling_mode

# Transformer Engine's classes are known only at run time.
Quantizer = Any
QuantizedTensor = Any


class Buffer(NamedTuple):
    """A buffer of a quantized tensor; ``zero``, for scales and amaxes: it is initialized to 0.

    Upstream mostly leaves the padding of scales uninitialized; here it is 0.
    """

    shape: Sequence[int]
    element: torch.dtype = torch.uint8
    zero: bool = False

    def allocate(self, device: torch.device, pin_memory: bool = False) -> torch.Tensor:
        """Allocate the buffer; memory is pinned only with an accelerator."""
        pinned = pin_memory and torch.cuda.is_available()
        buffer = torch.empty(list(self.shape), dtype=self.element, device=device, pin_memory=pinned)
        if self.zero:
            return buffer.zero_()
        return buffer


Buffers = dict[str, Buffer | None]
"""Name of an argument of Transformer Engine's tensor classes -> buffer; None where the quantizer's usages need none."""


class Casting(ABC):
    """The implementation of one family of quantizers.

    Attributes:
        modes: the scaling modes of the written tensors, of ``base/numerics/layouts.py``.
        classes: Transformer Engine's tensor class, and the storage class for an internal quantizer.
        attributes: argument of the classes -> attribute of a tensor, unless that is the argument with an underscore.
        data: the attributes of rowwise and columnwise data.
        transposes: whether columnwise data is the transpose.
        codes_per_byte: codes in an element of the data.
        updated: the :meth:`settings` that each quantizer that writes to a tensor also updates.
        rounds_first: whether the float32 result of a norm, an activation or a GEMM is first rounded to the nominal
            dtype.
        sums_unrounded: whether the bias gradient of an activation sums the float32 gradient instead of the rounded one.
    """

    modes: tuple[str, ...]
    classes: tuple[str, str]
    attributes: ClassVar[Mapping[str, str]] = {}
    data = "_rowwise_data", "_columnwise_data"
    transposes = True
    codes_per_byte = 1
    updated: tuple[str, ...] = ()
    rounds_first = True
    sums_unrounded = False

    def takes_amax(self, quantizer: Quantizer) -> bool:
        """Return whether activations pass the amax of their float32 result, before rounding."""
        return False

    @abstractmethod
    def buffers(self, quantizer: Quantizer, shape: Sequence[int]) -> Buffers:
        """The buffers of a tensor with a logical shape.

        Raises:
            ReferenceBackendError: tensors of this quantizer cannot have this shape or these usages.
        """

    @abstractmethod
    def settings(self, quantizer: Quantizer, shape: Sequence[int]) -> dict[str, Any]:
        """The other arguments of the classes."""

    def create(
        self,
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        shape = list(shape)
        arguments = self.settings(quantizer, shape)
        for name, buffer in self.buffers(quantizer, shape).items():
            arguments[name] = None if buffer is None else buffer.allocate(device, pin_memory)
        tensor_class: Any = resolve_name(f"transformer_engine.pytorch.tensor.{self.classes[quantizer.internal]}")
        if quantizer.internal:
            return tensor_class(**arguments, quantizer=quantizer, fake_dtype=dtype)
        stride = torch.empty(shape, device="meta").stride()
        return tensor_class(**arguments, quantizer=quantizer, shape=shape, stride=stride, dtype=dtype, device=device)

    def fit(self, quantizer: Quantizer, out: QuantizedTensor) -> None:
        """Add and remove buffers of ``out`` to match the quantizer's usages.

        Raises:
            ReferenceBackendError: ``out`` is of another family, or has no data.
        """
        if scaling_mode(out) not in self.modes:
            raise ReferenceBackendError(
                f"{type(quantizer).__name__} does not write to a {type(out).__name__}: give it a tensor of its format."
            )
        rowwise, columnwise = (getattr(out, name) for name in self.data)
        data = columnwise if rowwise is None else rowwise
        if data is None:
            raise ReferenceBackendError(f"The {type(out).__name__} to quantize into has no data.")
        shape = [*data.shape[:-1], *(size * self.codes_per_byte for size in data.shape[-1:])]
        if rowwise is None and self.transposes:
            shape = [*shape[1:], *shape[:1]]
        for name, buffer in self.buffers(quantizer, shape).items():
            attribute = self.attributes.get(name, f"_{name}")
            present = getattr(out, attribute)
            if buffer is None:
                setattr(out, attribute, None)
            elif present is None or ("amax" in name and present.numel() != buffer.shape[0]):
                setattr(out, attribute, buffer.allocate(data.device))
        settings = self.settings(quantizer, shape)
        for name in self.updated:
            setattr(out, f"_{name}", settings[name])

    @abstractmethod
    def write(
        self,
        quantizer: Quantizer,
        source: torch.Tensor,
        out: QuantizedTensor,
        skip: bool = False,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantize ``source`` into the buffers of ``out``.

        Args:
            skip: leave data and scales unchanged; collectives run all the same.
            amax: measured unless given, which only :meth:`takes_amax` allows.
        """


def by_usage(quantizer: Quantizer, buffers: Mapping[str, Buffer]) -> Buffers:
    """Select the buffers, named with ``rowwise`` or ``columnwise``, of the quantizer's usages."""
    used: dict[str, Buffer | None] = {}
    for name, buffer in buffers.items():
        usage = quantizer.columnwise_usage if "columnwise" in name else quantizer.rowwise_usage
        used[name] = buffer if usage else None
    return used
