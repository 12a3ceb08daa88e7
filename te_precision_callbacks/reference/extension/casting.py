"""Common base of the quantizer implementations.

A family of quantizers states the buffers of its tensors once, in :meth:`Casting.buffers`: for new tensors, and for old
ones that a quantizer writes to.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from te_precision_callbacks.base.numerics.layouts import scaling_mode
from te_precision_callbacks.reference.errors import ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import contiguous_stride

# Transformer Engine's classes are known only at run time.
Quantizer = Any
QuantizedTensor = Any


class Buffer(NamedTuple):
    """A buffer of a quantized tensor; codes are not written, scales and amaxes start as ``zero``.

    Upstream mostly leaves the padding of scales unwritten; here it is 0.
    """

    shape: Sequence[int]
    element: torch.dtype = torch.uint8
    zero: bool = False

    def allocated(self, device: torch.device, pin_memory: bool = False) -> torch.Tensor:
        """The buffer. Without an accelerator there is no pinned memory, and none is requested."""
        pinned = pin_memory and torch.cuda.is_available()
        made = torch.empty(list(self.shape), dtype=self.element, device=device, pin_memory=pinned)
        return made.zero_() if self.zero else made


Buffers = dict[str, Buffer | None]
"""Name of an argument of Transformer Engine's tensor classes -> buffer; None where the quantizer's usages need none."""


class Casting(ABC):
    """The implementation of one family of quantizers.

    Attributes:
        modes: the scaling modes of the tensors that it writes, of ``base/numerics/layouts.py``.
        attributes: argument -> attribute of a tensor, where that is not the argument with an underscore.
        data: the attributes of rowwise and columnwise data.
        transposes: whether columnwise data is the transpose.
        codes_per_byte: codes in an element of the data.
        renewed: the :meth:`settings` that a tensor takes over from each quantizer that writes to it.
        rounds_first: whether the float32 result of a norm, an activation or a GEMM is rounded to the nominal type
            first.
        sums_unrounded: whether the bias gradient of an activation is the sum of its float32 gradient, and not of the
            rounded one.
    """

    modes: tuple[str, ...]
    attributes: ClassVar[Mapping[str, str]] = {}
    data = "_rowwise_data", "_columnwise_data"
    transposes = True
    codes_per_byte = 1
    renewed: tuple[str, ...] = ()
    rounds_first = True
    sums_unrounded = False

    def takes_amax(self, quantizer: Quantizer) -> bool:
        """True if activations pass the amax of their float32 result before rounding."""
        return False

    @abstractmethod
    def classes(self) -> tuple[type, type]:
        """Transformer Engine's tensor class, and the storage class for an internal quantizer."""

    @abstractmethod
    def buffers(self, quantizer: Quantizer, shape: Sequence[int]) -> Buffers:
        """The buffers of a tensor of a logical shape.

        Raises:
            ReferenceBackendError: the quantizer's kind of tensor cannot have this shape or these usages.
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
            arguments[name] = None if buffer is None else buffer.allocated(device, pin_memory)
        tensor_class, storage_class = self.classes()
        if quantizer.internal:
            return storage_class(**arguments, quantizer=quantizer, fake_dtype=dtype)
        stride = contiguous_stride(shape)
        return tensor_class(**arguments, quantizer=quantizer, shape=shape, stride=stride, dtype=dtype, device=device)

    def fit(self, quantizer: Quantizer, out: QuantizedTensor) -> None:
        """Give ``out`` exactly the buffers of the quantizer's usages.

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
                setattr(out, attribute, buffer.allocated(data.device))
        settings = self.settings(quantizer, shape)
        for name in self.renewed:
            setattr(out, f"_{name}", settings[name])

    @abstractmethod
    def write(
        self,
        quantizer: Quantizer,
        source: torch.Tensor,
        out: QuantizedTensor,
        noop: torch.Tensor | None = None,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantize ``source`` into the buffers of ``out``; a given ``amax`` is not measured again."""


def by_usage(quantizer: Quantizer, buffers: Mapping[str, Buffer]) -> Buffers:
    """The ``buffers`` with ``rowwise`` or ``columnwise`` in their names, for the usages that the quantizer has."""
    return {
        name: buffer if (quantizer.columnwise_usage if "columnwise" in name else quantizer.rowwise_usage) else None
        for name, buffer in buffers.items()
    }
