"""Tensors as a spy sees them: which bytes a GEMM reads, and numpy's view of the numbers.

Nothing here is shared with the project: the numbers of codes are torch's, sums are numpy's in float64.
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
    """Source of the statistics of a high-precision tensor.

    Attributes:
        hash: of its bytes.
        array: its numbers, float64, one after the other.
    """

    hash: str
    array: np.ndarray

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Summary:
        return cls(digest([tensor]), array_of(tensor.detach().to(torch.float64)).reshape(-1))

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
    """An operand of a GEMM: a plain tensor, or codes and scales of one direction, both in logical order."""
    if not is_quantized(tensor):
        return [tensor]
    if not hasattr(tensor, "_scale_inv"):
        direction = "_rowwise" if rowwise else "_columnwise"
        parts = [getattr(tensor, name, None) for name in (f"{direction}_data", f"_amax{direction}")]
        return [part for part in (*parts, scales_of_blocks(tensor, rowwise=rowwise)) if part is not None]
    transpose = getattr(tensor, "_transpose", None)
    stored = transpose is not None and not getattr(tensor, "_transpose_invalid", False)
    if tensor._data is None or (not rowwise and stored):
        return [transpose.reshape(transpose.shape[0], -1).t(), tensor._scale_inv]
    return [tensor._data.reshape(-1, tensor._data.shape[-1]), tensor._scale_inv]


def scales_of_blocks(tensor: Any, *, rowwise: bool) -> torch.Tensor | None:
    """Scales of one direction by block row and block column, without padding, whatever order they lie in.

    Scales of MXFP8 and NVFP4 lie either so, or in the order of "1D Block Scaling Factors Layout" of cuBLAS's manual:
    tiles of 128 rows and 4 columns, one after the other along the row of tiles; in a tile the scale of row i and
    column j is at ``(i % 32) * 16 + (i // 32) * 4 + j``. Rows are the operand's rows as the GEMM sums over it, which
    are the columns of MXFP8's columnwise data. Others have one order, and are left as they lie.
    """
    direction = "_rowwise" if rowwise else "_columnwise"
    data, scales = getattr(tensor, f"{direction}_data"), getattr(tensor, f"{direction}_scale_inv")
    if scales is None or not hasattr(tensor, "_with_gemm_swizzled_scales"):
        return scales
    along_columns = not rowwise and not hasattr(tensor, "_fp4_dtype")
    if tensor._with_gemm_swizzled_scales:
        rows, columns = scales.shape[::-1] if along_columns else scales.shape
        row, column = np.divmod(np.arange(rows * columns), columns)
        tile = row // 128 * (columns // 4) + column // 4
        places = tile * 512 + row % 32 * 16 + row % 128 // 32 * 4 + column % 4
        logical = scales.reshape(-1)[torch.from_numpy(places)].view(rows, columns)
        scales = logical.t() if along_columns else logical
    height, width = data.numel() // data.shape[-1], data.shape[-1]
    if along_columns:
        return scales[: -(-height // 32), :width]
    return scales[:height, : width // 8 if hasattr(tensor, "_fp4_dtype") else -(-width // 32)]


def kind_of(tensor: Any) -> str:
    if not is_quantized(tensor):
        return str(tensor.dtype).removeprefix("torch.")
    name = type(tensor).__name__.removesuffix("Storage").removesuffix("Tensor")
    elements = re.search(r"E\dM\d", repr(getattr(tensor, "_fp8_dtype", "E2M1")))
    return f"{name} {elements.group() if elements else '?'}"


def content(tensor: torch.Tensor) -> bytes:
    flat = tensor.detach().contiguous().view(-1)
    return array_of(flat.view(torch.uint8)).tobytes() if flat.numel() else b""


def array_of(tensor: torch.Tensor) -> np.ndarray:
    """A copy. Once numpy shares a tensor's memory it cannot be resized, as FSDP2 does with gathered parameters."""
    return tensor.clone().numpy()


def digest(tensors: Iterable[torch.Tensor]) -> str:
    result = hashlib.sha256()
    for tensor in tensors:
        result.update(f"{tensor.dtype} {tensor.numel()} {tensor.shape[-1] if tensor.ndim else 1};".encode())
        result.update(content(tensor))
    return result.hexdigest()[:16]


def losses_of_quantization(array: np.ndarray, tensor: Any) -> dict[str, float] | None:
    """Result of quantizing ``array`` with one scale: squared error, underflows, scale; None of other formats."""
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
    values: np.ndarray = table[array_of(data.detach().contiguous().view(torch.uint8)).reshape(-1)]
    return values * float(tensor._scale_inv.reshape(-1)[0])


CODES_OF_FP8 = torch.arange(256, dtype=torch.uint8)
E4M3 = CODES_OF_FP8.view(torch.float8_e4m3fn).double().numpy()
E5M2 = CODES_OF_FP8.view(torch.float8_e5m2).double().numpy()
