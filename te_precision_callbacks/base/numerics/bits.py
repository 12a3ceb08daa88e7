"""Floating-point formats of at most one byte, as plain data: readers of recorded runs need no torch.

A format is defined by its numbers of exponent and mantissa bits, and by the codes that are not numbers. E4M3 and E5M2:
"OCP 8-bit Floating Point Specification (OFP8)", revision 1.0. E2M1 and E8M0: "OCP Microscaling Formats (MX)
Specification", version 1.0.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Specials(Enum):
    IEEE = "the highest exponent holds infinities (mantissa 0) and NaN"
    ONE_NAN = "only the code with all exponent and mantissa bits set is NaN; no infinity"
    NONE = "every code is a number"


@dataclass(frozen=True)
class Bits:
    """A format with at most 8 bits; ``mantissa_bits`` are the stored ones."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    specials: Specials
    signed: bool = True

    @property
    def bits(self) -> int:
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def bias(self) -> int:
        return (1 << self.exponent_bits - 1) - 1

    @property
    def _all_ones(self) -> int:
        """The code with all bits set except the sign."""
        return (1 << self.exponent_bits + self.mantissa_bits) - 1

    @property
    def max_code(self) -> int:
        if self.specials is Specials.IEEE:
            return self._all_ones - (1 << self.mantissa_bits)
        if self.specials is Specials.ONE_NAN:
            return self._all_ones - 1
        return self._all_ones

    @property
    def nan_code(self) -> int | None:
        """Code of NaN after a cast (``cvt.rn.satfinite``): all bits except the sign are set. None without NaN."""
        if self.specials is Specials.NONE:
            return None
        return self._all_ones

    @property
    def max(self) -> float:
        return self.value(self.max_code)

    @property
    def min_normal(self) -> float:
        if self.mantissa_bits:
            return 2.0 ** (1 - self.bias)
        return 2.0**-self.bias

    @property
    def min_subnormal(self) -> float:
        return self.min_normal * 2.0**-self.mantissa_bits

    def value(self, code: int) -> float:
        magnitude = code & self._all_ones
        sign = -1.0 if magnitude != code else 1.0
        exponent, mantissa = divmod(magnitude, 1 << self.mantissa_bits)
        if magnitude > self.max_code:
            infinite = self.specials is Specials.IEEE and mantissa == 0
            if infinite:
                return sign * float("inf")
            return float("nan")
        fraction = mantissa * 2.0**-self.mantissa_bits
        if exponent == 0 and self.mantissa_bits > 0:
            return sign * fraction * self.min_normal
        return sign * (1.0 + fraction) * 2.0 ** (exponent - self.bias)


E4M3 = Bits("E4M3", 4, 3, Specials.ONE_NAN)
E5M2 = Bits("E5M2", 5, 2, Specials.IEEE)
E2M1 = Bits("E2M1", 2, 1, Specials.NONE)
E8M0 = Bits("E8M0", 8, 0, Specials.ONE_NAN, signed=False)
