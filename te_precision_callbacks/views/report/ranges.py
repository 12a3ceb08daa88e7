"""The window of a number format at a scale: the magnitudes that it can hold.

window = Window.at(E4M3, low=scale_inv_min, high=scale_inv_max)
window.bottom, window.top               # as powers of two
"""

from __future__ import annotations

import math
from typing import NamedTuple

from te_precision_callbacks.base.numerics.bits import E2M1, E4M3, E5M2, Bits

FORMATS = {each.name: each for each in (E4M3, E5M2, E2M1)}


class Window(NamedTuple):
    """What a format holds, as powers of two.

    Attributes:
        bottom: the smallest magnitude that is not 0.
        top: the largest magnitude.
    """

    bottom: float
    top: float

    @classmethod
    def at(cls, fmt: Bits, low: float, high: float) -> Window:
        """The window at scale factors from ``low`` to ``high``; at one factor these are the same."""
        return cls(math.log2(fmt.min_subnormal * low), math.log2(fmt.max * high))

    @classmethod
    def assumed(cls, fmt: Bits, amax: float) -> Window:
        """The window if the largest magnitude becomes the format's largest number."""
        high = amax / fmt.max
        return cls.at(fmt, high * reach(fmt), high)


def reach(fmt: Bits) -> float:
    """The smallest scale factor in a tensor, as a share of the largest one, where scales are assumed.

    E2M1 has a scale for each block, a number of E4M3 (Transformer Engine's NVFP4): all blocks together reach down to
    the smallest one.
    """
    return E4M3.min_subnormal / E4M3.max if fmt is E2M1 else 1.0
