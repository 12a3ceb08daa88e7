"""The precision that each GEMM really ran in.

    for entry in session.precision:
        print(entry.layer, entry.gemm, entry.operands)        # fc1 fprop {'activation': 'BF16', 'weight': 'BF16'}

The log of nvidia-dlfw-inspect tells a plan ("Quantize", "High Precision", "modify_tensor()"). What counts is the type
of the two tensors that the GEMM was handed: this is what is noted where a feature acts. A layer on which no feature
acts runs Transformer Engine's fused path, where nothing is seen: for it, it is the format of that path's quantizers.

The classes of storages and quantizers were read from Transformer Engine 2.20.2 (``pytorch/tensor``). A class that is
none of them is named and not guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.layouts import gemm_operand

GEMMS = ("fprop", "dgrad", "wgrad")

OPERANDS = {"fprop": ("activation", "weight"), "dgrad": ("gradient", "weight"), "wgrad": ("gradient", "activation")}
"""The two tensors that each GEMM multiplies."""

ROWWISE = {"activation": "fprop", "weight": "fprop", "gradient": "dgrad"}
"""The GEMM that reads the rowwise data of a tensor; the other one reads its columnwise data."""

MODIFIED = " (modified)"
"""What is added to the format of a tensor that a feature has made."""

UNKNOWN = "unknown"
"""The format of a tensor that a feature is going to make."""

_FORMATS = {
    "NVFP4TensorStorage": "NVFP4",
    "NVFP4Quantizer": "NVFP4",
    "MXFP8TensorStorage": "MXFP8 {dtype}",
    "MXFP8Quantizer": "MXFP8 {dtype}",
    "Float8BlockwiseQTensorStorage": "FP8 block {dtype}",
    "Float8BlockQuantizer": "FP8 block {dtype}",
    "Float8TensorStorage": "FP8 {dtype}",
    "Float8Quantizer": "FP8 {dtype}",
    "Float8CurrentScalingQuantizer": "FP8 {dtype}",
}
"""The classes of storages and quantizers, of which all others of their format derive, and what they hold."""

_HIGH_PRECISION = {torch.float32: "FP32", torch.bfloat16: "BF16", torch.float16: "FP16", torch.float64: "FP64"}


@dataclass(frozen=True)
class GemmPrecision:
    """The precision of one GEMM.

    Attributes:
        layer: the layer.
        gemm: ``fprop``, ``dgrad`` or ``wgrad``.
        operands: tensor -> its format, such as ``FP8 E4M3`` or ``BF16``; one that changed during the run has all of
            them, joined by an arrow in the order of their first appearance.
        seen: whether each of these formats is that of a tensor that was seen when it was handed to the GEMM, and no
            other one is suspected. False: some are those of the quantizers, also of a GEMM that is never run, such as
            the dgrad of a model's first layer.
    """

    layer: str
    gemm: str
    operands: dict[str, str]
    seen: bool


class Operand(NamedTuple):
    """One of the two tensors of a GEMM."""

    layer: str
    gemm: str
    tensor: str


class PrecisionAudit:
    """Collects the formats of GEMM operands. Holds a short text for each layer, GEMM and tensor, and no tensor."""

    def __init__(self) -> None:
        self._seen: dict[Operand, dict[str, bool]] = {}
        self._doubted: set[str] = set()

    def plan(self, formats: Mapping[Operand, str]) -> None:
        """Note the formats that quantizers are going to make."""
        for operand, text in formats.items():
            self._seen.setdefault(operand, {}).setdefault(text, False)

    def see(self, operand: Operand, text: str, planned: str | None = None) -> None:
        """Note the format of a tensor that a GEMM is handed; it takes the place of the one that was planned for it."""
        texts = self._seen.setdefault(operand, {})
        if planned not in (None, text) and texts.get(planned) is False:
            del texts[planned]
        texts[text] = True

    def tells(self, formats: Mapping[Operand, str]) -> bool:
        """Whether all of these formats are noted, seen or planned."""
        return all(text in self._seen.get(operand, ()) for operand, text in formats.items())

    def doubt(self, formats: Iterable[Operand]) -> None:
        """Note that the layers may have run in a precision that is not noted."""
        self._doubted.update(operand.layer for operand in formats)

    def trust(self, formats: Iterable[Operand]) -> None:
        """Take a doubt back."""
        self._doubted.difference_update(operand.layer for operand in formats)

    def __iter__(self) -> Iterator[GemmPrecision]:
        layers = dict.fromkeys(operand.layer for operand in self._seen)
        for layer in layers:
            for gemm in GEMMS:
                keys = [Operand(layer, gemm, tensor) for tensor in OPERANDS[gemm]]
                texts = {key.tensor: self._seen[key] for key in keys if key in self._seen}
                if texts:
                    seen = len(texts) == len(keys) and all(all(found.values()) for found in texts.values())
                    operands = {tensor: " -> ".join(found) for tensor, found in texts.items()}
                    yield GemmPrecision(layer, gemm, operands, seen and layer not in self._doubted)


def format_of(tensor: Any, *, columnwise: bool) -> str:
    """The format of what a GEMM reads of a tensor that it is handed.

    Args:
        tensor: a plain tensor, or a quantized one or its storage, of any class.
        columnwise: which of its data the GEMM reads.
    """
    held = gemm_operand(tensor, columnwise=columnwise)
    return _known(held, getattr(held, "_fp8_dtype", None)) or _named(held)


def quantizer_format(quantizer: Any, high_precision: torch.dtype | None, *, columnwise: bool) -> str:
    """The format that a quantizer makes.

    Args:
        quantizer: of any class; None for none.
        high_precision: that of a tensor that is not quantized; None where it is not known.
        columnwise: for which data.
    """
    names = _class_names(quantizer)
    if "HybridQuantizer" in names:
        one = quantizer.columnwise_quantizer if columnwise else quantizer.rowwise_quantizer
        return quantizer_format(one, high_precision, columnwise=columnwise)
    if quantizer is None or "IdentityQuantizer" in names:
        return UNKNOWN if high_precision is None else dtype_name(high_precision)
    return _known(quantizer, getattr(quantizer, "dtype", None)) or type(quantizer).__name__


def formats_of_fused_path(module: Any, layers: Sequence[str], *, fp8: bool) -> dict[Operand, str]:
    """The formats in which a module's GEMMs run where no feature acts, by the state that its last forward has left.

    Args:
        module: a module of Transformer Engine that has run.
        layers: the names of its layers, one a set of GEMMs.
        fp8: whether its quantizers act.
    """
    forward, backward = module.quantizers["scaling_fwd"], module.quantizers["scaling_bwd"]
    override = module.fp8_meta["recipe"].backward_override if fp8 else None
    formats: dict[Operand, str] = {}
    for number, layer in enumerate(layers):
        # Of each set of GEMMs input, weight and output, and the gradients of output and input; as FP8FwdTensorIdx and
        # FP8BwdTensorIdx have it (pytorch/constants.py), and GroupedLinear's offsets.
        of_tensor: dict[str, Any] = {}
        if fp8:
            of_tensor = {"activation": forward[3 * number], "weight": forward[3 * number + 1]}
            of_tensor["gradient"] = backward[2 * number]
        for gemm, tensors in OPERANDS.items():
            for tensor in tensors:
                quantizer = of_tensor.get(tensor) if override is None or gemm == "fprop" else None
                formats[Operand(layer, gemm, tensor)] = quantizer_format(
                    quantizer, module.activation_dtype, columnwise=ROWWISE[tensor] != gemm
                )
    return formats


def dtype_name(dtype: torch.dtype) -> str:
    """``FP32``, ``BF16``, ...; of another one torch's own name."""
    return _HIGH_PRECISION.get(dtype, str(dtype))


def _class_names(thing: Any) -> frozenset[str]:
    return frozenset(base.__name__ for base in type(thing).__mro__)


def _known(thing: Any, dtype: Any) -> str | None:
    names = _class_names(thing)
    if getattr(thing, "custom", False):
        return None  # a user's own, whatever it derives from: it has a GEMM of its own
    for name, text in _FORMATS.items():
        if name in names:
            return text.format(dtype=str(getattr(dtype, "name", dtype)).removeprefix("kFloat8"))
    return None


def _named(tensor: Any) -> str:
    """The type of a plain tensor, or the name of a class that is not known."""
    if type(tensor).__module__.partition(".")[0] == "torch":
        return dtype_name(tensor.dtype)
    if "QuantizedTensorStorage" not in _class_names(tensor):
        return dtype_name(tensor.dtype) if isinstance(tensor, torch.Tensor) else type(tensor).__name__
    if getattr(tensor, "custom", False):
        return type(tensor).__name__
    # Transformer Engine hands its GEMM what such a tensor stands for.
    return f"{dtype_name(tensor.dequantize().dtype)} (of {type(tensor).__name__})"
