"""Tensors as a spy sees them: which bytes a GEMM reads, and numpy's view of the numbers.

Nothing here is shared with the project: formats are written from their specification, sums are numpy's in float64.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

# Attributes of Transformer Engine's quantized tensors, read from 2.20.2.
CODES = ("_data", "_transpose", "_rowwise_data", "_columnwise_data")
SCALES = ("_scale_inv", "_rowwise_scale_inv", "_columnwise_scale_inv", "_amax_rowwise", "_amax_columnwise")


@dataclass(frozen=True)
class Summary:
    """What the statistics of a high-precision tensor are made of.

    Attributes:
        hash: of its bytes.
        array: its numbers, float64, one after the other.
    """

    hash: str
    array: np.ndarray

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Summary:
        return cls(digest([tensor]), tensor.detach().to(torch.float64).numpy().reshape(-1))

    @classmethod
    def of_quantized(cls, tensor: Any) -> Summary | None:
        """Of a tensor that is kept in FP8 only: its numbers, rounded to the type that it stands for."""
        exact = dequantized(tensor)
        return None if exact is None else cls.of(torch.from_numpy(exact).float().to(tensor.dtype))

    def figures(self) -> dict[str, Any]:
        """Count, extremes, mean, sum of squares about the mean, sum of magnitudes."""
        if not self.array.size:
            return {"hash": self.hash, "n": 0}
        mean = float(self.array.mean())
        return {
            "hash": self.hash,
            "n": int(self.array.size),
            "min": float(self.array.min()),
            "max": float(self.array.max()),
            "mean": mean,
            "m2": float(np.square(self.array - mean).sum()),
            "l1": float(np.abs(self.array).sum()),
        }


def is_quantized(tensor: Any) -> bool:
    return hasattr(tensor, "_scale_inv") or hasattr(tensor, "_rowwise_data")


def codes(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors of codes that a quantized tensor holds."""
    for name in CODES:
        part = getattr(tensor, name, None)
        if part is not None and part.numel():
            yield part


def all_parts(tensor: Any) -> Iterator[torch.Tensor]:
    """The tensors that hold the numbers of a parameter: quantized, sharded or plain."""
    if hasattr(tensor, "to_local"):
        yield from all_parts(tensor.to_local())
    elif is_quantized(tensor):
        yield from codes(tensor)
        yield from (part for name in SCALES if (part := getattr(tensor, name, None)) is not None)
    else:
        yield tensor


def read_by_gemm(tensor: Any, *, rowwise: bool) -> list[torch.Tensor]:
    """What a GEMM reads: a plain tensor, or codes and scales of one direction. Codes of one scale in logical order."""
    if not is_quantized(tensor):
        return [tensor]
    if not hasattr(tensor, "_scale_inv"):
        direction = "_rowwise" if rowwise else "_columnwise"
        names = (f"{direction}_data", f"{direction}_scale_inv", f"_amax{direction}")
        return [part for name in names if (part := getattr(tensor, name, None)) is not None]
    transpose = getattr(tensor, "_transpose", None)
    stored = transpose is not None and not getattr(tensor, "_transpose_invalid", False)
    if tensor._data is None or (not rowwise and stored):
        return [transpose.reshape(transpose.shape[0], -1).t(), tensor._scale_inv]
    return [tensor._data.reshape(-1, tensor._data.shape[-1]), tensor._scale_inv]


def kind_of(tensor: Any) -> str:
    """Type of a plain tensor; class and code format of a quantized one."""
    if not is_quantized(tensor):
        return str(tensor.dtype).removeprefix("torch.")
    name = type(tensor).__name__.removesuffix("Storage").removesuffix("Tensor")
    elements = re.search(r"E\dM\d", repr(getattr(tensor, "_fp8_dtype", "E2M1")))
    return f"{name} {elements.group() if elements else '?'}"


def content(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row by row."""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""


def digest(tensors: Iterable[torch.Tensor]) -> str:
    """A hash of types, numbers of columns and bytes."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(f"{tensor.dtype} {tensor.numel()} {tensor.shape[-1] if tensor.ndim else 1};".encode())
        found.update(content(tensor))
    return found.hexdigest()[:16]


def losses_of_quantization(array: np.ndarray, tensor: Any) -> dict[str, float] | None:
    """What quantization with one scale made of ``array``: squared error, underflows, scale; None of other formats."""
    back = dequantized(tensor)
    if back is None:
        return None
    return {
        "squared_error": float(np.square(array - back).sum()),
        "underflows": int(((array != 0) & (back == 0)).sum()),
        "scale_inv": float(tensor._scale_inv.reshape(-1)[0]),
    }


def dequantized(tensor: Any) -> np.ndarray | None:
    """The numbers of a tensor quantized with one scale, exact; None of other formats."""
    data = getattr(tensor, "_data", None)
    if data is None or not hasattr(tensor, "_scale_inv"):
        return None
    table = E5M2 if "E5M2" in repr(tensor._fp8_dtype) else E4M3
    values: np.ndarray = table[data.detach().contiguous().view(torch.uint8).numpy().reshape(-1)]
    return values * float(tensor._scale_inv.reshape(-1)[0])


def numbers_of_codes(exponent_bits: int, mantissa_bits: int, *, has_inf: bool) -> np.ndarray:
    """The number of each code of an 8-bit format: OCP 8-bit Floating Point Specification, revision 1.0, section 5."""
    values = np.zeros(256)
    bias, largest = (1 << (exponent_bits - 1)) - 1, (1 << exponent_bits) - 1
    for code in range(256):
        exponent, mantissa = (code & 127) >> mantissa_bits, code & ((1 << mantissa_bits) - 1)
        fraction = mantissa / (1 << mantissa_bits)
        value = fraction * 2.0 ** (1 - bias) if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - bias)
        if has_inf and exponent == largest:
            value = np.inf if mantissa == 0 else np.nan
        elif not has_inf and (code & 127) == 127:
            value = np.nan
        values[code] = -value if code & 128 else value
    return values


E4M3 = numbers_of_codes(4, 3, has_inf=False)
E5M2 = numbers_of_codes(5, 2, has_inf=True)
