"""Common base of the quantizer implementations."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch

from te_precision_callbacks.base.numerics.layouts import scaling_mode
from te_precision_callbacks.reference.errors import ReferenceBackendError

# Transformer Engine's classes are known only at run time.
Quantizer = Any
QuantizedTensor = Any


class Casting(ABC):
    """The implementation of one family of quantizers.

    Attributes:
        modes: the scaling modes of the tensors that it writes, of ``base/numerics/layouts.py``.
        rounds_first: whether the float32 result of a norm, an activation or a GEMM is rounded to the nominal type
            first.
        sums_unrounded: whether the bias gradient of an activation is the sum of its float32 gradient, and not of the
            rounded one.
    """

    modes: tuple[str, ...]
    rounds_first = True
    sums_unrounded = False

    def takes_amax(self, quantizer: Quantizer) -> bool:
        """True if activations pass the amax of their float32 result before rounding."""
        return False

    @abstractmethod
    def create(
        self,
        quantizer: Quantizer,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device,
        pin_memory: bool = False,
    ) -> QuantizedTensor:
        """A tensor of the quantizer's kind, with unwritten buffers."""

    def fit(self, quantizer: Quantizer, out: QuantizedTensor) -> None:
        """Give ``out`` exactly the buffers of the quantizer's usages.

        Raises:
            ReferenceBackendError: ``out`` is of another family, or has no data.
        """
        if scaling_mode(out) not in self.modes:
            raise ReferenceBackendError(
                f"{type(quantizer).__name__} does not write to a {type(out).__name__}: give it a tensor of its format."
            )
        self._fit(quantizer, out)

    @abstractmethod
    def _fit(self, quantizer: Quantizer, out: QuantizedTensor) -> None:
        """:meth:`fit` for a tensor of the family."""

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
