"""FP8 in blocks computed independently with numpy, from the formats' specifications and the recipes' formulas.

Nothing of the package is used: E4M3 and E5M2 come from the "OCP 8-bit Floating Point Specification", E8M0 and E2M1
from the "OCP Microscaling Formats Specification"; scales from the docstrings of Transformer Engine's recipes
and the comments of its kernels. Products are rounded to float32 where the kernels round.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

Array = np.ndarray

KINDS = ("random", "spread", "denormal", "huge", "zero", "inf", "nan", "only nan", "negative zero", "sparse")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LARGEST = {torch.float32: 3.4028235e38, torch.bfloat16: 3.3895314e38, torch.float16: 65504.0}


@dataclass(frozen=True)
class Format:
    """E4M3 (no infinity, one NaN), E5M2 (IEEE) or E2M1 (finite numbers alone)."""

    exponent_bits: int
    mantissa_bits: int
    max_code: int

    @property
    def sign(self) -> int:
        return 1 << (self.exponent_bits + self.mantissa_bits)

    @cached_property
    def magnitudes(self) -> Array:
        """Values of the codes 0 to ``max_code``: float64."""
        codes = np.arange(self.max_code + 1)
        exponents, mantissas = codes >> self.mantissa_bits, codes & (2**self.mantissa_bits - 1)
        bias = 2 ** (self.exponent_bits - 1) - 1
        fractions = mantissas / 2**self.mantissa_bits + (exponents > 0)
        return np.ldexp(fractions, np.maximum(exponents, 1) - bias)

    @cached_property
    def middles(self) -> Array:
        """Between each two numbers; behind the last there is none."""
        return np.append((self.magnitudes[1:] + self.magnitudes[:-1]) / 2, np.nan)

    @cached_property
    def numbers(self) -> Array:
        """Values of all codes: float32, NaN where there is no finite number."""
        numbers = np.append(self.magnitudes, [np.nan] * (self.sign - self.max_code - 1))
        return np.concatenate([numbers, -numbers]).astype(np.float32)

    @property
    def max(self) -> np.float32:
        return np.float32(self.magnitudes[-1])

    def encode(self, values: Array) -> Array:
        """The nearest code, of two the even one; larger values become the largest number."""
        size = np.abs(values.astype(np.float64))
        codes = np.searchsorted(self.middles[:-1], size)  # at a middle: the lower one
        codes = codes + ((size == self.middles[codes]) & (codes % 2 == 1))
        return np.where(np.isnan(values), self.sign - 1, codes + self.sign * np.signbit(values)).astype(np.uint8)

    def decode(self, codes: Array) -> Array:
        return self.numbers[codes]


E4M3 = Format(4, 3, 0x7E)
E5M2 = Format(5, 2, 0x7B)
E2M1 = Format(2, 1, 7)


def example(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """A tensor to quantize. The special numbers are in some blocks only, whichever direction they go."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    flat = x.view(-1)
    some = torch.rand(flat.shape, generator=generator) < 0.01
    if kind == "spread":
        x *= 2.0 ** torch.randint(-30, 15, shape, generator=generator)
    elif kind == "denormal":
        x *= torch.finfo(dtype).smallest_normal / 8
    elif kind == "huge":
        x *= torch.finfo(dtype).max / 4
        x.clamp_(-torch.finfo(dtype).max, torch.finfo(dtype).max)
    elif kind == "zero":
        x.zero_()
    elif kind == "inf":
        flat[some] = float("inf") * flat[some].sign()
    elif kind == "nan":
        flat[some] = float("nan")
    elif kind == "only nan":
        x.fill_(float("nan"))
    elif kind == "negative zero":
        x.fill_(-0.0)
    elif kind == "sparse":
        x = x.where(torch.rand(shape, generator=generator) > 0.97, -0.0)
    return x.to(dtype)


def matrix(tensor: torch.Tensor) -> Array:
    return tensor.detach().float().reshape(-1, tensor.shape[-1]).numpy()


def amaxes(values: Array, block: tuple[int, int]) -> Array:
    """The largest magnitude of each block; NaN is passed over."""
    height, width = block
    rows, columns = -(-values.shape[0] // height), -(-values.shape[1] // width)
    padded = np.zeros((rows * height, columns * width), dtype=np.float32)
    padded[: values.shape[0], : values.shape[1]] = np.where(np.isnan(values), 0, np.abs(values))
    return padded.reshape(rows, height, columns, width).max(axis=(1, 3), initial=0)


def spread(of_blocks: Array, block: tuple[int, int], shape: tuple[int, ...]) -> Array:
    """One number for each element."""
    rows, columns = np.arange(shape[0]) // block[0], np.arange(shape[1]) // block[1]
    return of_blocks[rows][:, columns]


def e8m0(amax: Array, fmt: Format) -> Array:
    """The code of the smallest power of two that is not below amax / the largest number, within 2**-127 to 2**127."""
    with np.errstate(over="ignore", under="ignore"):
        quotient = amax * np.float32(1.0 / float(fmt.max))
    fractions, exponents = np.frexp(quotient.astype(np.float64))
    exponents = np.where(fractions == 0.5, exponents - 1, exponents)
    exponents = np.where(quotient == 0, -127, np.where(np.isinf(quotient), 127, np.clip(exponents, -127, 127)))
    return (exponents + 127).astype(np.uint8)


def power_of_two(codes: Array) -> Array:
    """Values of E8M0 codes: float64."""
    return np.where(codes == 255, np.nan, np.ldexp(1.0, codes.astype(np.int64) - 127))


def mxfp8(values: Array, block: tuple[int, int], fmt: Format) -> tuple[Array, Array]:
    """Codes, and the E8M0 code of each block."""
    scales = e8m0(amaxes(values, block), fmt)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        scaled = (values.astype(np.float64) / spread(power_of_two(scales), block, values.shape)).astype(np.float32)
    return fmt.encode(scaled), scales


def fp8_block(
    values: Array, block: tuple[int, int], fmt: Format, *, power_of_2: bool, largest: float, epsilon: float = 0.0
) -> tuple[Array, Array]:
    """Codes, and the inverse scale of each block: float32."""
    amax = np.maximum(amaxes(values, block), np.float32(epsilon))
    with np.errstate(over="ignore", divide="ignore", under="ignore", invalid="ignore"):
        scale = fmt.max / amax
        scale = np.where(np.isinf(scale), np.float32(largest), scale).astype(np.float32)
        if power_of_2:
            scale = np.exp2(np.floor(np.log2(scale.astype(np.float64)))).astype(np.float32)
        scale = np.where((amax == 0) | np.isinf(amax), np.float32(1), scale)
        scaled = values * spread(scale, block, values.shape)
    return fmt.encode(scaled), np.float32(1) / scale


def quantized(
    x: torch.Tensor,
    columnwise: bool,
    recipe: str,
    fmt: Format,
    *,
    weight: bool = False,
    force_pow_2_scales: bool = True,
    with_2d_quantization: bool = False,
) -> tuple[Array, Array, tuple[int, int]]:
    """Codes and scales, of the matrix or, for other recipes than MXFP8 columnwise, of its transpose, and the block."""
    values = matrix(x)
    if recipe == "mxfp8":
        block = (32, 32) if with_2d_quantization else (32, 1) if columnwise else (1, 32)
        return (*mxfp8(values, block, fmt), block)
    values = values.T if columnwise else values
    is_per_tensor = recipe == "fp8_current_scaling"
    block = values.shape if is_per_tensor else (128 if weight else 1, 128)
    power_of_2 = force_pow_2_scales and not is_per_tensor
    return (*fp8_block(values, block, fmt, power_of_2=power_of_2, largest=LARGEST[x.dtype]), block)


def decoded(codes: Array, scales: Array, block: tuple[int, int], fmt: Format) -> Array:
    """Values of :func:`quantized`: float64."""
    factors = power_of_two(scales) if scales.dtype == np.uint8 else scales.astype(np.float64)
    return fmt.decode(codes).astype(np.float64) * spread(factors, block, codes.shape)


def stored(scales: Array, block: tuple[int, int], columnwise: bool) -> Array:
    """Scales of :func:`quantized` as they lie in memory, not swizzled."""
    if scales.dtype == np.uint8:
        scales = scales.repeat(32, axis=1 if columnwise else 0) if block == (32, 32) else scales
        return pad(scales, 4, 128) if columnwise else pad(scales, 128, 4)
    return pad(scales if block[0] == 128 else scales.T, 1, 4)


def swizzled(scales: Array) -> Array:
    """The order of cuBLAS's "1D block scaling factors layout", index by index."""
    out = np.zeros(scales.size, dtype=scales.dtype)
    rows, columns = scales.shape
    for i in range(rows):
        for j in range(columns):
            tile = (i // 128) * (columns // 4) + j // 4
            out[tile * 512 + (i % 32) * 16 + (i % 128) // 32 * 4 + j % 4] = scales[i, j]
    return out.reshape(rows, columns)


def up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def pad(scales: Array, rows: int, columns: int) -> Array:
    out = np.zeros((up(scales.shape[0], rows), up(scales.shape[1], columns)), dtype=scales.dtype)
    out[: scales.shape[0], : scales.shape[1]] = scales
    return out
