"""The observed precision of each GEMM of a run."""

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
"""The recipe of a GEMM in a layer without one."""


@dataclass(frozen=True)
class GemmPrecision:
    """The precision of one GEMM.

    Attributes:
        layer: the layer.
        gemm: ``fprop``, ``dgrad`` or ``wgrad``.
        operands: tensor -> its format, such as ``FP8 E4M3`` or ``BF16``. Several formats in a run are joined by arrows
            in the order of their first step. Empty for a GEMM that has not run.
        seen: whether all of these formats were seen on the tensors passed to the GEMM, and no other format is
            suspected. Otherwise some are the formats of the quantizers.
        not_run: the reason if the GEMM has not run in training, one of :data:`FROZEN`, :data:`NO_INPUT_GRADIENT`,
            :data:`NO_GRADIENT` and :data:`NO_BACKWARD`; else empty. NO_BACKWARD is reported only for steps that observe
            the layer, if a backward has reached other parts of the model.
        since: the first debug iteration with these facts; in ``session.precision``, the first one of the GEMM.
        until: the last debug iteration with these facts; None while they hold.
        recipe: the recipe of the layer: ``fp8_delayed_scaling``, ``fp8_current_scaling``, ``mxfp8``,
            ``fp8_block_scaling``, ``nvfp4``, the class of a custom recipe, or :data:`HIGH_PRECISION`. Several recipes
            are joined by arrows. Empty for a GEMM that has not run.
        excluded: whether the layer ran in high precision because its forward is inside ``te.autocast(enabled=False)``.
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
    """``FP8 E5M2 * E4M3``; a single format if both operands have it; brackets around the formats of an operand that
    changed."""
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
    """The observed precision of each GEMM of a run; calling the object returns the precision in one iteration.

    session.precision              # all formats that each GEMM had
    session.precision(at=120)      # the formats in iteration 120, with first and last iteration

    An iteration has all GEMMs known by then. A GEMM that did not run has the reason in ``not_run``. A layer without a
    forward in the iteration keeps its previous precision; so do the GEMMs of the backward in an iteration without one,
    such as a skipped batch.
    """
