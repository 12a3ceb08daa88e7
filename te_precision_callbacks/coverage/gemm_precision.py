"""The precision in which each GEMM of a run really ran."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from te_precision_callbacks.base.spans import AnyIteration
from te_precision_callbacks.base.vocabulary import GemmName

FROZEN = "frozen weight"
NO_INPUT_GRADIENT = "input needs no gradient"
NO_GRADIENT = "neither input nor parameters need a gradient"
NO_BACKWARD = "no backward has reached it"

HIGH_PRECISION = "none"
"""What is given as the recipe of a GEMM whose layer ran without one."""


@dataclass(frozen=True)
class GemmPrecision:
    """The precision of one GEMM.

    Attributes:
        layer: the layer.
        gemm: ``fprop``, ``dgrad`` or ``wgrad``.
        operands: tensor -> its format, such as ``FP8 E4M3`` or ``BF16``. If the format changed during the run: all
            formats, joined by an arrow in the order of their first appearance. Empty for a GEMM that has not run.
        seen: whether all of these formats were seen on tensors when they were handed to the GEMM, and no other format
            is suspected. False: some are the formats of the quantizers.
        not_run: why the GEMM has not run in training so far, one of :data:`FROZEN`, :data:`NO_INPUT_GRADIENT`,
            :data:`NO_GRADIENT` and :data:`NO_BACKWARD`; empty if it has run. NO_BACKWARD is reported of the steps in
            which the layer is asked, since it can be seen only there, if a backward has reached other parts of the
            model.
        since: the first debug iteration in which this held; in ``session.precision`` the first one of the GEMM.
        until: the last debug iteration in which this held; None while it still holds.
        recipe: the recipe under which the layer ran: one of ``fp8_delayed_scaling``, ``fp8_current_scaling``,
            ``mxfp8``, ``fp8_block_scaling`` and ``nvfp4``, the class of a user's own recipe, or :data:`HIGH_PRECISION`
            outside of FP8. If it changed during the run: all, joined by an arrow. Empty for a GEMM that has not run.
        excluded: whether the layer ran in high precision since a region of ``te.autocast(enabled=False)`` was around
            its forward.
    """

    layer: str
    gemm: GemmName
    operands: Mapping[str, str]
    seen: bool
    not_run: str = ""
    since: int = 0
    until: int | None = None
    recipe: str = ""
    excluded: bool = False


def in_short(operands: Mapping[str, str]) -> str:
    """``FP8 E5M2 * E4M3``; one format where both operands have it, and those of an operand that changed in brackets."""
    return _formats_in_short(tuple(operands.values()))


@functools.cache
def _formats_in_short(formats: tuple[str, ...]) -> str:
    if len(set(formats)) == 1:
        return formats[0]
    if any("->" in text for text in formats):
        return " * ".join(f"({text})" if "->" in text else text for text in formats)
    if all(" " in text and text.split()[0] == formats[0].split()[0] for text in formats):
        return " * ".join([formats[0], *(text.split(maxsplit=1)[1] for text in formats[1:])])
    return " * ".join(formats)


class Precision(AnyIteration[GemmPrecision]):
    """The precision in which each GEMM of a run ran; calling the object gives the precision of one iteration.

    session.precision              # all formats that each GEMM had
    session.precision(at=120)      # those of iteration 120, with the span of iterations in which they held

    Of an iteration these are all GEMMs that were known by then. A GEMM that did not run in the iteration has the reason
    in ``not_run``. A layer that no forward reached in the iteration keeps its previous precision; so do the GEMMs of
    the backward in an iteration without any, such as a batch that the script skips.
    """
