"""The precision that each GEMM really ran in.

    for entry in session.precision:
        print(entry.layer, entry.gemm, entry.operands)        # fc1 fprop {'activation': 'BF16', 'weight': 'BF16'}

The log of nvidia-dlfw-inspect tells a plan ("Quantize", "High Precision", "modify_tensor()"). What counts is the type
of the two tensors that the GEMM was handed: this is what is noted here. A layer without any active feature runs
Transformer Engine's fused path, where nothing is seen: for it, it is the format of that path's quantizers, noted in its
first step and whenever autocast is switched or gets another recipe.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

GEMMS = ("fprop", "dgrad", "wgrad")

OPERANDS = {"fprop": ("activation", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "activation")}
"""The two tensors that each GEMM multiplies."""

_FORMATS = (
    ("NVFP4", "NVFP4"),
    ("MXFP8", "MXFP8 {dtype}"),
    ("Float8Block", "FP8 block {dtype}"),
    ("Float8", "FP8 {dtype}"),
)
"""Class-name prefixes of TE's quantizers and quantized tensors, the longer one first, and what they hold."""

_HIGH_PRECISION = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16", torch.float64: "FP64"}


@dataclass(frozen=True)
class GemmPrecision:
    """The precision of one GEMM.

    Attributes:
        layer: the layer.
        gemm: ``fprop``, ``dgrad`` or ``wgrad``.
        operands: tensor -> its format, such as ``FP8 E4M3`` or ``BF16``; one that changed during the run has all of
            them, joined by an arrow in the order of their first appearance.
        seen: whether the tensors themselves were seen; else the formats are those of the quantizers, also for a GEMM
            that is never run, such as the dgrad of a model's first layer.
    """

    layer: str
    gemm: str
    operands: dict[str, str]
    seen: bool


class PrecisionAudit:
    """Collects the formats of GEMM operands. Holds a short text for each layer, GEMM and tensor, and no tensor."""

    def __init__(self) -> None:
        self._seen: dict[tuple[str, str, str], dict[str, None]] = {}
        self._ran: set[tuple[str, str, str]] = set()

    def planned(self, quantizer: Any, activation_dtype: torch.dtype | None) -> None:
        """Note what a DebugQuantizer is going to do; what it is seen to do later takes its place."""
        from transformer_engine.debug.pytorch.debug_quantization import STANDARD_QUANTIZE

        high_precision = _HIGH_PRECISION.get(activation_dtype, str(activation_dtype)) if activation_dtype else "?"
        for gemm, plan in _plans(quantizer):
            key = (quantizer.layer_name, gemm, quantizer.tensor_name)
            if key not in self._ran:
                text = _format_of(quantizer.parent_quantizer) if plan == STANDARD_QUANTIZE else high_precision
                self._seen.setdefault(key, {})[text] = None

    def ran(self, quantizer: Any, rowwise: Any, columnwise: Any, activation_dtype: torch.dtype | None) -> None:
        """Note the tensors that the GEMMs are handed; those that are not quantized, in the type of the activations."""
        from transformer_engine.debug.pytorch.debug_quantization import API_CALL_MODIFY

        for (gemm, plan), tensor in zip(_plans(quantizer), (rowwise, columnwise), strict=False):
            if tensor is None:
                continue
            key = (quantizer.layer_name, gemm, quantizer.tensor_name)
            text = _format_of(tensor, activation_dtype)
            if plan == API_CALL_MODIFY:
                text += " (modified)"
            if key not in self._ran:
                self._ran.add(key)
                self._seen[key] = {text: None}
            else:
                self._seen[key][text] = None

    def __iter__(self) -> Iterator[GemmPrecision]:
        layers = dict.fromkeys(layer for layer, _, _ in self._seen)
        for layer in layers:
            for gemm in GEMMS:
                operands = {
                    tensor: " -> ".join(self._seen[layer, gemm, tensor])
                    for tensor in OPERANDS[gemm]
                    if (layer, gemm, tensor) in self._seen
                }
                if operands:
                    seen = all((layer, gemm, tensor) in self._ran for tensor in OPERANDS[gemm])
                    yield GemmPrecision(layer, gemm, operands, seen)


def _plans(quantizer: Any) -> tuple[tuple[str, str], tuple[str, str]]:
    return (
        (quantizer.rowwise_gemm_name, quantizer.rowwise_tensor_plan),
        (quantizer.columnwise_gemm_name, quantizer.columnwise_tensor_plan),
    )


def _format_of(thing: Any, high_precision: torch.dtype | None = None) -> str:
    """The format of a tensor, or the one that a quantizer makes."""
    name = type(thing).__name__
    for prefix, text in _FORMATS:
        if name.startswith(prefix):
            dtype = getattr(thing, "_fp8_dtype", None) or getattr(thing, "dtype", None)
            return text.format(dtype=str(getattr(dtype, "name", dtype)).removeprefix("kFloat8"))
    dtype = high_precision or getattr(thing, "dtype", None)
    return _HIGH_PRECISION.get(dtype, str(dtype)) if isinstance(dtype, torch.dtype) else name
