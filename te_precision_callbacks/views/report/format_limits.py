"""The formats whose limits the page draws, and the format and the kind of scale of a statistic, by its name and by the
layer's own operands.

``page/ranges.js`` looks up the limits of formats with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from te_precision_callbacks.base.numerics.bits import E2M1, E4M3, E5M2, Bits
from te_precision_callbacks.base.vocabulary import ONE_SCALE
from te_precision_callbacks.statistics.names import Request

FORMATS = {each.name: each for each in (E4M3, E5M2, E2M1)}


def formats_of(products: Sequence[Mapping[str, Any]], tensor: str) -> list[str]:
    """The formats of a tensor in a layer's products, as :func:`facts.gemms` gives these."""
    return [found for each in products if (found := each["operands"].get(tensor))]


class OwnFormat(NamedTuple):
    """What a tensor is quantized to in a layer's own products.

    Attributes:
        format: the format.
        fp8: the format in FP8, for statistics of another recipe.
        one_scale: whether there is one scale for the whole tensor.
    """

    format: str
    fp8: str
    one_scale: bool

    @classmethod
    def of(cls, formats: Sequence[str]) -> OwnFormat:
        """From the formats of the tensor in the products; E4M3 where there are none."""
        own = " ".join(formats)
        fp8 = "E5M2" if "E5M2" in own and "E4M3" not in own else "E4M3"
        one_scale = bool(formats) and all(each.startswith("FP8 E") for each in formats)
        return cls("E2M1" if "NVFP4" in own else fp8, fp8, one_scale)


def format_by_name(request: Request | None) -> str | None:
    """The format that a statistic's name says; None where it is that of the layer's own operands."""
    if request is not None and request.recipe == "nvfp4":
        return "E2M1"
    if request is None or request.e5m2 is None:
        return None
    return "E5M2" if request.e5m2 else "E4M3"


def one_scale_by_name(request: Request | None) -> bool | None:
    """Whether the recipe in a statistic's name has one scale for the whole tensor; None where it names no recipe."""
    return request.recipe in ONE_SCALE if request is not None and request.recipe else None


def reach(fmt: Bits) -> float:
    """The smallest scale factor in a tensor, as a share of the largest one, where scales are assumed.

    E2M1 has a scale for each block, a number of E4M3 (Transformer Engine's NVFP4): all blocks together reach down to
    the smallest one.
    """
    return E4M3.min_subnormal / E4M3.max if fmt is E2M1 else 1.0
