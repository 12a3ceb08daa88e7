"""Quantized tensors of Transformer Engine, read with numpy: torch's numbers of codes, and cuBLAS's layout of scales."""

from typing import Any

import numpy as np
import numpy.typing as npt
import torch

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]


CODES = torch.arange(256, dtype=torch.uint8)
E4M3, E5M2, E8M0 = (
    CODES.view(dtype).float().numpy() for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
)
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0], np.float32)


def compact(scales: npt.NDArray[Any], rows: int, columns: int, *, swizzled: bool) -> npt.NDArray[Any]:
    """The scales of row i and column j, from memory that is padded to 128 x 4 and perhaps swizzled."""
    if not swizzled:
        return scales[:rows, :columns]
    flat, width = scales.reshape(-1), scales.shape[1]
    i, j = np.indices((rows, columns))
    tile = (i // 128) * (width // 4) + j // 4
    return flat[tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4]


def array(tensor: Any) -> npt.NDArray[Any]:
    return np.asarray(tensor.detach().numpy())


def matrix(data: Any, *, transposed: bool) -> Bytes:
    codes = array(data)
    return codes.reshape(codes.shape[0], -1) if transposed else codes.reshape(-1, codes.shape[-1])


def stretched(blocks: npt.NDArray[Any], height: int, width: int, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    i, j = np.indices(shape)
    return blocks[i // height, j // width]


def numbers(tensor: Any, *, columnwise: bool) -> Floats:
    """One direction of a tensor, or of its storage class, dequantized in float32."""
    kind = type(tensor).__name__
    if kind.startswith("Float8Tensor"):
        return per_tensor(tensor, columnwise)
    side = "columnwise" if columnwise else "rowwise"
    data, scales = getattr(tensor, f"_{side}_data"), array(getattr(tensor, f"_{side}_scale_inv"))
    if kind.startswith("NVFP4"):
        return nvfp4(tensor, data, scales, columnwise)
    table = E5M2 if tensor._fp8_dtype.name.endswith("E5M2") else E4M3
    if kind.startswith("MXFP8"):
        codes = matrix(data, transposed=False)
        rows, columns = codes.shape
        swizzled = tensor._with_gemm_swizzled_scales
        if columnwise:
            height, width = 32, 1
            if swizzled:  # in the order of the transpose, with rows padded to 128
                of_blocks = compact(scales.reshape(scales.shape[::-1]), columns, -(-rows // 32), swizzled=True).T
            else:
                of_blocks = scales[: -(-rows // 32), :columns]
        else:
            height, width = 1, 32
            of_blocks = compact(scales, rows, -(-columns // 32), swizzled=swizzled)
        product = table[codes] * E8M0[stretched(of_blocks, height, width, codes.shape)]
        return product.reshape(data.shape)
    codes = matrix(data, transposed=columnwise)
    of_blocks = scales if tensor._is_2D_scaled else scales.T
    product = table[codes] * stretched(of_blocks, 128 if tensor._is_2D_scaled else 1, 128, codes.shape)
    return product.T.reshape(*data.shape[1:], data.shape[0]) if columnwise else product.reshape(data.shape)


def per_tensor(tensor: Any, columnwise: bool) -> Floats:
    table = E5M2 if tensor._fp8_dtype.name.endswith("E5M2") else E4M3
    transpose = None if tensor._transpose_invalid else tensor._transpose
    scale = array(tensor._scale_inv).reshape(())
    if transpose is not None and (columnwise or tensor._data is None):
        codes = array(transpose)
        return (table[codes] * scale).transpose(*range(1, codes.ndim), 0)
    return np.asarray(table[array(tensor._data)] * scale)


def nvfp4(tensor: Any, data: Any, scales: npt.NDArray[Any], columnwise: bool) -> Floats:
    packed = matrix(data, transposed=False)
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    rows, columns = codes.shape
    of_blocks = compact(scales, rows, columns // 16, swizzled=tensor._with_gemm_swizzled_scales)
    amax = array(tensor._amax_columnwise if columnwise else tensor._amax_rowwise).reshape(-1, 1)
    factors = E4M3[of_blocks] * amax * np.float32(1 / (6 * 448))
    product = E2M1[codes] * stretched(factors, 1, 16, codes.shape)
    return product.T if columnwise else product.reshape(*data.shape[:-1], columns)
