"""NVFP4 from the definitions of its formats, in numpy: the reference for the backend's tests.

The scales in float32, one operation after the other.
"""

import numpy as np

from tests.reference.block_formats import E2M1, E4M3

f32 = np.float32
F32_MAX = np.finfo(f32).max
e2m1_numbers, e4m3_numbers = E2M1.decode, E4M3.decode


def amax(matrix: np.ndarray) -> f32:
    magnitudes = np.abs(matrix[~np.isnan(matrix)])
    return f32(magnitudes.max()) if magnitudes.size else f32(0)


def quantize(
    matrix: np.ndarray,
    tensor_amax: np.ndarray | f32,
    *,
    square: bool = False,
    largest_scale: int = 448,
    better_of_two: str | None = None,
    in_e4m3_units: bool = False,
    fused: bool = False,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes [rows, columns], scale codes [rows, columns / 16], and what multiplied each block before it was rounded.

    ``tensor_amax`` is one number, or one for each row.
    """
    rows, columns = matrix.shape
    blocks = matrix.astype(f32).reshape(rows, columns // 16, 16)
    whole = np.broadcast_to(np.asarray(tensor_amax, dtype=f32).reshape(-1, 1), (rows, 1))
    with np.errstate(all="ignore"):
        encode = np.fmin(f32(6 * largest_scale) / whole, F32_MAX)
        encode = (
            np.where(whole > 0, encode, f32(1)) if fused else np.where((whole == 0) | (encode == 0), f32(1), encode)
        )
        magnitudes = np.abs(blocks)
        if not fused:
            magnitudes = np.where(np.isnan(magnitudes), f32(0), magnitudes)
        largest = magnitudes.max(-1)
        if square:
            largest = largest.reshape(rows // 16, 16, -1).max(1).repeat(16, 0)

        def cast(scale: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            codes = E4M3.encode(scale)
            multiplier = f32(1) / (e4m3_numbers(codes) * (f32(1) / encode))
            multiplier = np.minimum(multiplier, F32_MAX) if fused else np.fmin(multiplier, F32_MAX)
            return codes, multiplier, E2M1.encode(blocks * multiplier[..., None])

        if better_of_two is None:
            scales, multiplier, codes = cast(np.minimum(largest * (encode * (f32(1) / f32(6))), F32_MAX))
            return codes.reshape(rows, columns), scales, multiplier

        base = largest / f32(6) * encode
        candidates = [cast(base), cast(base * f32(1.5))]
        errors = []
        for scales, _, codes in candidates:
            error = np.zeros(scales.shape, dtype=f32)
            for index in range(16):
                back = e2m1_numbers(codes[..., index]) * e4m3_numbers(scales)
                if in_e4m3_units:
                    difference = back - blocks[..., index] * encode
                else:
                    difference = back * whole / f32(6 * largest_scale) - blocks[..., index]
                error = error + (difference * difference if better_of_two == "MSE" else np.abs(difference))
            if square:
                parts = error.reshape(rows // 16, 16, -1)
                for half in (8, 4, 2, 1):
                    parts = parts[:, :half] + parts[:, half:]
                error = parts.repeat(16, 1).reshape(error.shape)
            errors.append(error)
        take_4 = errors[1] < errors[0]
        codes = np.where(take_4[..., None], candidates[1][2], candidates[0][2])
        scales = np.where(take_4, candidates[1][0], candidates[0][0])
        multiplier = np.where(take_4, candidates[1][1], candidates[0][1])
        return codes.reshape(rows, columns), scales, multiplier


def hadamard(matrix: np.ndarray, signs: list[int]) -> np.ndarray:
    """Each 16 of a row times diag(signs) @ H / 4, H by Sylvester's construction; exact sums, rounded to float32."""
    transform = np.ones((1, 1))
    while transform.shape[0] < 16:
        transform = np.block([[transform, transform], [transform, -transform]])
    transform = np.diag(signs) @ transform / 4
    with np.errstate(all="ignore"):
        return (matrix.astype(np.float64).reshape(-1, 16) @ transform).astype(f32).reshape(matrix.shape)


def dequantize(codes: np.ndarray, scales: np.ndarray, tensor_amax: np.ndarray | f32, largest_scale: int) -> np.ndarray:
    factors = e4m3_numbers(scales).astype(np.float64) * np.asarray(tensor_amax, np.float64).reshape(-1, 1)
    return e2m1_numbers(codes).astype(np.float64) * factors.repeat(16, 1) / (6 * largest_scale)


def unpack(data: np.ndarray) -> np.ndarray:
    """Codes one a byte; the even one is in the low half."""
    return np.stack([data & 0xF, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def assert_next_to(codes: np.ndarray, exact: np.ndarray) -> None:
    """Each code stands for the number below or above the exact one, with its sign."""
    magnitude, index = np.clip(np.abs(exact), 0, 6), codes & 7
    lower, upper = E2M1.decode(np.maximum(index, 1) - 1), E2M1.decode(np.minimum(index + 1, 7))
    assert ((magnitude > lower) | (index == 0)).all()
    assert ((magnitude < upper) | (index == 7)).all()
    np.testing.assert_array_equal(codes >= 8, np.signbit(exact))
