"""Floating-point formats of at most one byte (``bits.py``), with encoding and decoding."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from te_precision_callbacks.base.numerics import bits
from te_precision_callbacks.base.numerics.bits import Bits


@dataclass(frozen=True)
class FloatFormat(Bits):
    """A format with at most 8 bits, with conversions; ``dtype`` is torch's dtype of the format, if any."""

    dtype: torch.dtype | None = None

    def encode(self, values: torch.Tensor) -> torch.Tensor:
        """Round float32 to the nearest codes of a signed format, ties to even; infinity and large numbers saturate.

        NaN stays NaN, or becomes the largest number in a format without NaN; -0 stays -0. This equals
        ``cvt.rn.satfinite`` on the GPU (``common/util/ptx.cuh``, and ``cuda_fp8.h`` in upstream's kernels; PTX ISA 8.6
        for E2M1). In contrast, torch's own cast does not saturate and keeps the sign of NaN, and Transformer Engine's
        pure-torch reference of NVFP4 returns 0 for -0 and NaN.

        Returns:
            uint8, same shape, one code per byte.

        Raises:
            ValueError: the format is unsigned: it is for scales, which each recipe rounds in its own way.
        """
        if not self.signed:
            raise ValueError(f"{self.name} has no sign; scales are not rounded to nearest.")
        if self.dtype is None:
            bits = values.view(torch.int32)
            # All numbers at which the code changes end in more than 16 zero bits. Lower bits only break ties.
            upper = ((bits >> 16) & 0xFFFF) | ((bits & 0xFFFF) != 0)
            return _code_table(self, upper.device).index_select(0, upper.reshape(-1)).view(upper.shape)
        codes = values.clamp(-self.max, self.max).to(self.dtype).view(torch.uint8)
        negative_nan = 0x80 | (self.nan_code or 0)
        # The minimum of a tensor with NaN is NaN: one pass, without a temporary.
        if values.numel() > 0 and values.amin().isnan():
            return codes.masked_fill_(codes == negative_nan, negative_nan & 0x7F)
        return codes

    def round(self, values: torch.Tensor) -> torch.Tensor:
        """Round float32 to values of a signed format, as :meth:`encode` does, but can be compiled into a kernel."""
        clamped = values.clamp(-self.max, self.max)
        if self.dtype is not None:
            return clamped.to(self.dtype).to(torch.float32)
        # The power of two below the magnitude: the float32 without its sign and mantissa.
        binade = (clamped.view(torch.int32) & 0x7F800000).view(torch.float32).clamp(min=self.min_normal)
        step = binade * 2.0**-self.mantissa_bits
        return torch.round(clamped / step) * step

    def decode(self, codes: torch.Tensor) -> torch.Tensor:
        """Decode codes (uint8, one per byte) exactly: float32, same shape, contiguous."""
        numbers = table(self, codes.device)
        return numbers.index_select(0, codes.reshape(-1).int()).view(codes.shape)


@functools.cache
def table(fmt: FloatFormat, device: torch.device) -> torch.Tensor:
    return torch.tensor([fmt.value(code) for code in range(2**fmt.bits)], dtype=torch.float32, device=device)


@functools.cache
def _code_table(fmt: FloatFormat, device: torch.device) -> torch.Tensor:
    """Return the code of each float32 number with lower 16 bits of 0, indexed by its upper 16 bits."""
    high = torch.arange(1 << 16, dtype=torch.int32, device="cpu")
    values = torch.where(high < 1 << 15, high, high - (1 << 16)).mul(1 << 16).view(torch.float32)
    numbers = table(fmt, high.device)[: fmt.max_code + 1]
    codes = torch.searchsorted(numbers, fmt.round(values).abs()).clamp(max=fmt.max_code)
    nan_code = fmt.max_code if fmt.nan_code is None else fmt.nan_code
    codes = torch.where(values.isnan(), nan_code, codes + 2 ** (fmt.bits - 1) * torch.signbit(values))
    return codes.to(torch.uint8).to(device)


E4M3 = FloatFormat(**vars(bits.E4M3), dtype=torch.float8_e4m3fn)
E5M2 = FloatFormat(**vars(bits.E5M2), dtype=torch.float8_e5m2)
E2M1 = FloatFormat(**vars(bits.E2M1))
E8M0 = FloatFormat(**vars(bits.E8M0))
