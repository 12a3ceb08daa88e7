"""Per-tensor FP8: one scale for a whole tensor, under delayed and under current scaling.

``_data`` is uint8 in the shape of the tensor, ``_transpose`` is uint8, [last dimension, *leading dimensions], and
``_scale_inv`` is float32, [1], for both. If the FP8 GEMM supports only one layout (Hopper), columnwise usage is a
stored transpose. If it supports all layouts (Blackwell), the data serves both usages and is always stored, and a
transpose never is (``pytorch/csrc/quantizer.cpp``, TE 2.20).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from te_precision_callbacks.base.numerics.layouts import PER_TENSOR
from te_precision_callbacks.base.numerics.scaling import amax_of, fp8_scale
from te_precision_callbacks.reference.conversions import encode_blocks
from te_precision_callbacks.reference.errors import MissingFunctionError, ReferenceBackendError
from te_precision_callbacks.reference.extension.buffers import matrix_shape, overwrite, transposed_shape
from te_precision_callbacks.reference.extension.casting import Buffer, Buffers, Casting
from te_precision_callbacks.reference.extension.enums import fp8_format
from te_precision_callbacks.reference.target import capability
from te_precision_callbacks.te.gemm_shapes import takes_any_layout


def has_any_layout_gemm() -> bool:
    return takes_any_layout(capability())


def transpose(data: torch.Tensor) -> torch.Tensor:
    """Move the last dimension to the front, contiguous: the transpose of the tensor viewed as a matrix."""
    if data.dim() > 1:
        return data.movedim(-1, 0).contiguous()
    return data.clone()


class _PerTensorScaling(Casting):
    """Casting with one scale for the whole tensor."""

    modes = (PER_TENSOR,)
    classes = "float8_tensor:Float8Tensor", "storage.float8_tensor_storage:Float8TensorStorage"
    attributes: ClassVar = {"data_transpose": "_transpose", "fp8_scale_inv": "_scale_inv"}
    data = "_data", "_transpose"
    updated = ("fp8_dtype",)

    def buffers(self, quantizer: Any, shape: Sequence[int]) -> Buffers:
        with_data, with_transpose = _usages(quantizer)
        return {
            "data": Buffer(shape) if with_data else None,
            "data_transpose": Buffer(transposed_shape(shape)) if with_transpose else None,
            "fp8_scale_inv": Buffer([1], torch.float32),
        }

    def settings(self, quantizer: Any, shape: Sequence[int]) -> dict[str, Any]:
        # A quantizer's dtype is already a member of Transformer Engine's enumeration.
        return {"fp8_dtype": quantizer.dtype}

    def fit(self, quantizer: Any, out: Any) -> None:
        if not any(_usages(quantizer)):
            raise ReferenceBackendError(f"The {type(quantizer).__name__} has neither rowwise nor columnwise usage.")
        super().fit(quantizer, out)
        out._transpose_invalid = out._transpose is None

    @staticmethod
    def cast(quantizer: Any, source: torch.Tensor, scale: torch.Tensor, out: Any) -> None:
        if out._data is None and out._transpose is not None:
            raise MissingFunctionError(
                "Columnwise-only per-tensor FP8 quantization is not implemented, neither here nor in the compiled "
                "extension: give the quantizer rowwise usage as well."
            )
        shape = matrix_shape(source.shape)
        codes = encode_blocks(source.reshape(shape), scale.view(1, 1), shape, fp8_format(quantizer.dtype)).view(
            source.shape
        )
        overwrite(out._data, codes.view(out._data.shape))
        if out._transpose is not None:
            overwrite(out._transpose, transpose(codes).view(out._transpose.shape))
        overwrite(out._scale_inv, torch.reciprocal(scale))


class DelayedScaling(_PerTensorScaling):
    """The scale comes from earlier steps; this step's amax is recorded for later ones."""

    rounds_first = False
    sums_unrounded = True

    def write(
        self,
        quantizer: Any,
        source: torch.Tensor,
        out: Any,
        skip: bool = False,
        amax: torch.Tensor | None = None,
    ) -> None:
        if source.numel() == 0 or skip:
            return
        measured = amax_of(source)
        self.cast(quantizer, source, quantizer.scale, out)
        if quantizer.amax.numel():  # without elements nothing is recorded, like in a kernel with a null pointer
            overwrite(quantizer.amax, torch.maximum(quantizer.amax, measured.view_as(quantizer.amax)))


class CurrentScaling(_PerTensorScaling):
    def takes_amax(self, quantizer: Any) -> bool:
        return True

    def write(
        self,
        quantizer: Any,
        source: torch.Tensor,
        out: Any,
        skip: bool = False,
        amax: torch.Tensor | None = None,
    ) -> None:
        """Quantize with the scale for the amax of ``source``, reduced over ranks if the quantizer requires it."""
        if source.numel() == 0:
            return
        measured = amax_of(source) if amax is None else amax
        if quantizer.with_amax_reduction:
            # Before the no-op flag, as upstream: if one rank skipped the collective, the others would hang.
            group = quantizer._canonicalized_amax_reduction_group()
            torch.distributed.all_reduce(measured, op=torch.distributed.ReduceOp.MAX, group=group)
        if skip:
            return
        scale = fp8_scale(
            measured,
            fp8_format(quantizer.dtype).max,
            power_of_two=quantizer.force_pow_2_scales,
            epsilon=quantizer.amax_epsilon,
        )
        self.cast(quantizer, source, scale, out)


def _usages(quantizer: Any) -> tuple[bool, bool]:
    if has_any_layout_gemm():
        return True, False
    return bool(quantizer.rowwise_usage), bool(quantizer.columnwise_usage)
