"""The precision that a GEMM ran in, as a fact of a run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from te_precision_callbacks.errors import PrecisionDebugError
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
        since: the first debug iteration in which this held; in ``session.precision`` that of the GEMM.
        until: the last one; None while it holds.
    """

    layer: str
    gemm: GemmName
    operands: Mapping[str, str]
    seen: bool
    not_run: str = ""
    since: int = 0
    until: int | None = None


class IterationError(PrecisionDebugError, LookupError):
    """An iteration was asked for that has not run."""


class Precision(tuple[GemmPrecision, ...]):
    """The precision that each GEMM ran in, over a run; called, that of one iteration.

    session.precision              # all formats that each GEMM had
    session.precision(at=120)      # those of iteration 120, with the span of iterations in which they held
    """

    _at: Callable[[int], Iterable[GemmPrecision]]

    def __new__(cls, entries: Iterable[GemmPrecision], at: Callable[[int], Iterable[GemmPrecision]]) -> Precision:
        made = super().__new__(cls, tuple(entries))
        made._at = at
        return made

    def __getnewargs__(self) -> tuple[tuple[GemmPrecision, ...], Callable[[int], Iterable[GemmPrecision]]]:
        return tuple(self), self._at

    def __call__(self, *, at: int) -> tuple[GemmPrecision, ...]:
        """The precision of one debug iteration, of the GEMMs of which anything was known by then.

        A GEMM that did not run in it has the reason in ``not_run``. A layer that no forward reached in it has what it
        had before.

        Args:
            at: the debug iteration.

        Raises:
            IterationError: it has not run under this session. It is a LookupError.
        """
        return tuple(self._at(at))
