"""Rules on wrong kernels: of quantizers and of GEMMs."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from te_precision_callbacks.base.numerics.bits import E2M1, E4M3, E5M2
from te_precision_callbacks.base.vocabulary import RESULT
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import StepNumbers
from te_precision_callbacks.diagnosis.rule import Rule, Sightings, Streaks
from te_precision_callbacks.diagnosis.rules.lost_elements import can_overflow
from te_precision_callbacks.diagnosis.shapes import InARow, runs_low_precision

_GEMM: Mapping[str, str] = {tensor: gemm for gemm, tensor in RESULT.items()}

_ELEMENTS = {
    **{f"{recipe} {bits.name}": bits for recipe in ("FP8", "FP8 block", "MXFP8") for bits in (E4M3, E5M2)},
    "NVFP4": E2M1,
}


class _Limits(NamedTuple):
    """The largest error of an element relative to itself and to its factor, and the largest number of a format."""

    relative: float
    lowest: float
    largest: float


def _limits(facts: Facts, layer: str, tensor: str) -> _Limits:
    bits = _ELEMENTS.get(facts.format_of(layer, tensor))
    if bits is None:
        return _Limits(np.nan, np.nan, np.nan)
    # NVFP4 rounds gradients stochastically: to either neighbor.
    steps = 1.0 if bits is E2M1 and tensor == "gradient" else 0.5
    return _Limits(steps * 2.0**-bits.mantissa_bits + UNROUNDED, steps * bits.min_subnormal, bits.max)


def _wrong_codes(numbers: StepNumbers, streaks: Streaks) -> Sightings:
    """Find a squared error above the largest that the format explains.

    An element is rounded by half of the distance of two values at most: by ``2^-(mantissa bits + 1)`` of itself, or by
    half of the smallest subnormal times its factor. An element above the range, under delayed scaling, is off by the
    distance to the range.
    """
    mse = numbers.finite("mse")
    square = mse * 10 ** (numbers.values("sqnr_db") / 10)
    limits = _Limits(*numbers.by_row(_limits).T)
    factor = numbers.values("scale_inv_max")
    amax = numbers.values("cur_amax")
    beyond = np.fmax(amax - limits.largest * numbers.values("scale_inv_min"), 0.0)
    share = numbers.values("overflows%") / 100
    clipped = np.fmin(share * beyond**2, (beyond / amax) ** 2 * square)
    clipped = np.where((share == 0) | ~numbers.by_row(can_overflow), 0.0, clipped)
    most = limits.relative**2 * square + (limits.lowest * factor) ** 2 + clipped
    return streaks.sightings(
        numbers,
        "mse",
        np.isfinite(most) & (factor > 0) & np.isfinite(mse) & (mse > most),
        lambda row: (
            f"the quantized values are {100 * np.sqrt(mse[row] / square[row]):.3g} % off, relative to the"
            f" norm; rounding explains {100 * np.sqrt(most[row] / square[row]):.3g} %"
        ),
    )


def _unmeasured(facts: Facts) -> str:
    why = facts.settings.unmeasured
    return why and f"LogGemmError has measured nothing: {why}"


def _wrong_gemms(numbers: StepNumbers, streaks: Streaks) -> Sightings:
    """Find results that differ from the product of their operands by more than rounding."""
    settings = numbers.facts.settings
    ratio = numbers.values("gemm_kernel_ratio")
    error = numbers.values("gemm_kernel_error")
    gain = numbers.values("gemm_gain")
    rank = numbers.values("gemm_wrong_rank")
    is_scaled = (np.abs(gain - 1) > GAIN) & (np.abs(error - np.abs(gain - 1)) < GAIN * error)
    is_alone = (settings.ranks > 1 and settings.alike) & (rank >= 0)

    def describe(row: int) -> str:
        gemm = f"the GEMM {_GEMM[str(numbers.tensors[row])]}"
        on_rank = f", only on rank {rank[row]:.0f}" if is_alone[row] else ""
        if is_scaled[row]:
            return f"{gemm} gives {gain[row]:.4g} times the product of its operands{on_rank}"
        return (
            f"{gemm} is {100 * error[row]:.3g} % off the product of its operands, and a row"
            f" {ratio[row]:.3g} times as much as rounding explains{on_rank}"
        )

    for key, holds, remedy in (("", ~is_alone, ""), ("rank", is_alone, _REMEDY_OF_RANK)):
        for sighting in streaks.sightings(numbers, "gemm_kernel_ratio", (ratio > 1) & holds, describe, key=key):
            yield sighting._replace(remedy=remedy, key=key)


_REMEDY_OF_RANK = "Remove this rank's GPU from the job, and test it (dcgmi diag -r 3)"

GAIN = 0.05
"""How far the gain of a scaled result is from 1 at least. A wrong scale is off by a factor of 2 or more."""

UNROUNDED = 2.0**-8
"""The rounding to bfloat16 of a tensor that a fused kernel quantizes before, relative to an element."""

RULES = (
    Rule(
        id="wrong-codes",
        title="a quantizer whose codes and scales do not fit its input",
        subject="tensor",
        needs="mse, sqnr_db, overflows%, scale_inv_min, scale_inv_max and cur_amax of quantized tensors",
        collect="""
            LogFp8TensorStats with stats: [mse, sqnr_db, overflows%, scale_inv_min, scale_inv_max] and LogTensorStats
            with stats: [cur_amax]. The default config lacks mse and sqnr_db
        """,
        condition="""
            mse is above r^2 * x^2 + (d * scale_inv_max)^2. x^2 is the mean square of the tensor, from sqnr_db; r is
            half of the last bit, 2^-(mantissa bits + 1), plus 2^-8 for the rounding to bfloat16; d is half of the
            smallest subnormal of the format. NVFP4 rounds gradients stochastically, with twice the r and d. Under
            delayed scaling, elements above the range may add the smaller of overflows% / 100 * b^2 and (b / cur_amax)^2
            * x^2, where b is cur_amax minus the largest number of the format times scale_inv_min
        """,
        silent="elements that round to 0, elements above the range, tensors with inf or nan",
        severity="error",
        source="""
            the formats: OCP Microscaling Formats (MX) 1.0, table 1, and arXiv 2209.05433 for E4M3 and E5M2.
            TransformerEngine pull request 3281: stochastic rounding of NVFP4 that gave zeros
        """,
        why="the GEMM multiplies wrong values, even if its kernel is correct",
        disproof="te_precision_callbacks.base.numerics gives the same values for the tensor",
        remedy="""
            Look for code that changes scales after quantizing, or that keeps codes of an earlier step with a new scale.
            Report a quantizer of Transformer Engine, and run these layers in high precision or with another recipe.
            With NVFP4, first try NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)
        """,
        check=partial(
            InARow,
            statistic="mse",
            also=("sqnr_db", "scale_inv_min", "scale_inv_max", "cur_amax"),
            find=_wrong_codes,
            applies_to=runs_low_precision,
            is_strict=True,
        ),
        consequence_of=("stale-weights",),
    ),
    Rule(
        id="wrong-gemm",
        title="a GEMM whose result is not the product of its operands",
        subject="tensor",
        needs="gemm_kernel_ratio, gemm_kernel_error, gemm_gain and gemm_wrong_rank of GEMMs",
        collect="LogGemmError with gemms: [fprop, dgrad, wgrad]",
        condition="gemm_kernel_ratio is above 1: a row is off by more than 3 times the bound of its rounding",
        silent="rounding of the result and of the sums on this device: docs/gemm-error.md; rows with inf or nan",
        severity="error",
        source="""
            the bound is derived in docs/gemm-error.md. Such kernels: cudnn-frontend issue 981, Primus-Turbo issue 397,
            TransformerEngine issue 3342 (scaled by up to 2^-7). Silent data corruption on a single device: arXiv
            2102.11245
        """,
        why="the wrong values are finite and plausible, so no statistic of a tensor shows the error",
        disproof="the same operands, multiplied in float64, give the same result",
        remedy="""
            Report the kernel, and for a factor the layout of its scales. Run these layers in high precision until it is
            fixed. Another version of cuBLAS, Transformer Engine or the driver may be correct
        """,
        cost="the layer runs at the speed of BF16",
        check=partial(
            InARow,
            statistic="gemm_kernel_ratio",
            find=_wrong_gemms,
            applies_to=lambda facts: bool(_unmeasured(facts)),
            lacks_in=_unmeasured,
        ),
    ),
)
