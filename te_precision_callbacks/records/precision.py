"""The precision that a GEMM ran in, as a fact of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from te_precision_callbacks.vocabulary import GemmName

FROZEN = "frozen weight"
NO_INPUT_GRADIENT = "input needs no gradient"
NO_GRADIENT = "neither input nor parameters need a gradient"
NO_BACKWARD = "no backward has reached it"


@dataclass(frozen=True)
class GemmPrecision:
    """The precision of one GEMM.

    Attributes:
        layer: the layer.
        gemm: ``fprop``, ``dgrad`` or ``wgrad``.
        operands: tensor -> its format, such as ``FP8 E4M3`` or ``BF16``; one that changed during the run has all of
            them, joined by an arrow in the order of their first appearance. Empty for a GEMM that has not run.
        seen: whether each of these formats is that of a tensor that was seen when it was handed to the GEMM, and no
            other one is suspected. False: some are those of the quantizers.
        not_run: why the GEMM has not run in training so far, one of :data:`FROZEN`, :data:`NO_INPUT_GRADIENT`,
            :data:`NO_GRADIENT` and :data:`NO_BACKWARD`; empty where it has run. The last is told of layers on which a
            feature acts: only there it can be seen.
    """

    layer: str
    gemm: GemmName
    operands: Mapping[str, str]
    seen: bool
    not_run: str = ""
