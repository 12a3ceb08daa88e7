"""Models of how a device sums the products of a GEMM, and bounds on its error.

A tensor core aligns a group of products and the sum so far to their largest exponent, truncates the bits below the last
one, and adds. Hopper keeps about 14 bits of FP8 products (DeepSeek-V3, arXiv 2412.19437, section 3.3: errors up to 2 %
at K = 4096), which are 13 fraction bits after the leading one (SageAttention2, arXiv 2411.10958: "FP22" on Ada and
Hopper). With ``split_accumulator=True`` partial sums are added in float32 outside of the tensor core; the interval is
not documented, and 128 is DeepSeek's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from te_precision_callbacks.base.numerics.layouts import Stored


@dataclass(frozen=True)
class Accumulator:
    """How products are added: ``group`` products are aligned at once to ``fraction_bits``, and after ``interval``
    products, if any, the sum is added to a separate float32.
    """

    name: str
    fraction_bits: int
    group: int
    interval: int | None = None

    def variance(self, k: int, terms: torch.Tensor, squares: torch.Tensor) -> torch.Tensor:
        """Return a bound on the variance of the error of a sum of k products.

        With u the last bit, a group truncates at most u |S| of the sum S, and as much of each product, with the sign of
        the truncated value. Over a sum: ``steps`` times u / 2 of the sum itself, all of one sign; and of the products
        ``u / 2 sqrt(k rho)``, where rho, the squared sum over the sum of squares, is 1 for products of random signs and
        k for equal products. As in V-ABFT (arXiv 2602.08043) the bound follows from the sizes of the operands.

        Args:
            k: the number of products.
            terms, squares: the sums of the squared products, and the squared sums; both may be added up before.
        """
        length = k if self.interval is None else min(k, self.interval)
        intervals = -(-k // length) if length else 1
        steps = -(-length // self.group)
        coherence = torch.nan_to_num(squares / terms, nan=1.0, posinf=float(k)).clamp(1.0, max(1.0, float(k)))
        largest = torch.maximum(terms, squares)
        lost = length * (coherence / intervals).clamp(min=1.0) + steps**2
        return lost * largest * 4.0 ** -(self.fraction_bits + 1)


FLOAT32 = Accumulator("float32", 23, 16)
"""All products except FP8 on Hopper and Ada: sums in float32, truncated, not rounded."""

HOPPER_FAST = Accumulator("14 bits", 13, 32)
"""FP8 on Hopper and Ada with ``split_accumulator=False``."""

HOPPER_SPLIT = Accumulator("14 bits, added in float32", 13, 32, 128)
"""FP8 on Hopper and Ada with ``split_accumulator=True``."""


def accumulator_of(*operands: Any, split_accumulator: bool, capability: tuple[int, int] | None) -> Accumulator:
    """Return the accumulator of a GEMM with these operands in memory; it is in FP8 if one has codes of eight bits.

    ``capability`` is None for the reference backend, which sums in float32.
    """
    is_fp8 = any(isinstance(operand, Stored) and operand.element_format.bits == 8 for operand in operands)
    if not is_fp8 or capability not in ((8, 9), (9, 0)):
        return FLOAT32
    return HOPPER_SPLIT if split_accumulator else HOPPER_FAST
