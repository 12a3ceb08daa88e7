"""Rules on the error at the output of GEMMs, and on its cause: a kernel, a quantizer, a device or cancellation."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from te_precision_callbacks.base.vocabulary import RESULT
from te_precision_callbacks.diagnosis.facts import Facts
from te_precision_callbacks.diagnosis.numbers import Column, StepNumbers
from te_precision_callbacks.diagnosis.rule import Rule, RuleCheck, Sighting
from te_precision_callbacks.statistics.arrays import Floats
from te_precision_callbacks.statistics.table import GEMM_STATISTICS

GAIN = 0.05
"""How far the gain may be from 1. A wrong scale is off by a factor of 2 or more."""

CODES = 0.1
SCALES = 1.0
BIAS = 0.15
ZEROS = 10.0
"""Percent of the codes and of the scales that are wrong; the bias of stochastic rounding, in distances of two numbers;
and the percent of zeros beyond those that are expected. Over 1,024 elements the bias of an unbiased quantizer has a
standard deviation of 0.016 at most."""

EXCESS = 10.0
EXCESS_STEPS = 2
"""The excess, and collection steps in a row."""

_GEMM: Mapping[str, str] = {tensor: gemm for gemm, tensor in RESULT.items()}


class _GemmCheck(RuleCheck):
    """A rule for runs that measure GEMMs, or tried to."""

    reads = GEMM_STATISTICS
    applies = False
    _unmeasured = ""

    @property
    def why_not(self) -> str:
        return super().why_not or (self._unmeasured and f"LogGemmError has measured nothing: {self._unmeasured}")

    def facts(self, facts: Facts) -> Iterable[Sighting]:
        self._unmeasured = "" if facts.settings is None else facts.settings.unmeasured
        self.applies = bool(self.steps or self._unmeasured)
        return ()

    def _columns(self, numbers: StepNumbers, statistic: str) -> Iterator[Column]:
        for column in numbers.columns(statistic):
            self.applies = True
            self.note_data(numbers.iteration)
            yield column


class Kernel(_GemmCheck):
    """Results that differ from the product of their operands by more than rounding.

    Args:
        kind: ``gain``: off by a factor; ``rank``: on one rank only; ``kernel``: all others.
    """

    def __init__(self, kind: str) -> None:
        super().__init__()
        self._kind = kind

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        settings = facts.settings
        ranks = settings is not None and settings.ranks > 1 and settings.alike
        for ratio in self._columns(numbers, "gemm_kernel_ratio"):
            related = _gemm_values(numbers, ratio)
            bad = ratio.values > 1
            scaled = np.abs(related["gemm_gain"] - 1) > GAIN
            alone = (related["gemm_kernel_rank_first"] == related["gemm_kernel_rank_last"]) & ranks
            holds = {"gain": bad & scaled & ~alone, "rank": bad & alone, "kernel": bad & ~scaled & ~alone}[self._kind]
            seen = [""] * len(ratio.rows)
            for at in np.flatnonzero(holds).tolist():
                seen[at] = _describe(related, at, ratio, self._kind)
            yield from self.streaks.sightings(
                numbers, facts, ratio, holds, "the GEMM {} {}", _gemms(numbers, ratio), seen
            )


def _gemms(numbers: StepNumbers, column: Column) -> list[str]:
    return [_GEMM[tensor] for tensor in numbers.tensors_of(column)]


_RELATED = (
    "gemm_gain",
    "gemm_kernel_error",
    "gemm_kernel_rows",
    "gemm_kernel_columns",
    "gemm_kernel_row_first",
    "gemm_kernel_row_last",
    "gemm_kernel_column_first",
    "gemm_kernel_column_last",
    "gemm_kernel_rank_first",
    "gemm_kernel_rank_last",
)


def _gemm_values(numbers: StepNumbers, column: Column) -> Mapping[str, Floats]:
    columns = {}
    for name in _RELATED:
        other = numbers.column(name)
        columns[name] = np.full(len(column.rows), np.nan) if other is None else other.at(column.rows, np.nan)
    return columns


def _describe(related: Mapping[str, Floats], at: int, ratio: Column, kind: str) -> str:
    times = f"{ratio.values[at]:.3g} times its tolerance"
    if kind == "gain":
        what = f"gives {related['gemm_gain'][at]:.4g} times the product of its operands"
    else:
        what = f"is {100 * related['gemm_kernel_error'][at]:.3g} % off the product of its operands, {times}"
    where = []
    for name in ("row", "column"):
        number = related[f"gemm_kernel_{name}s"][at]
        if number > 0:
            first = related[f"gemm_kernel_{name}_first"][at]
            last = related[f"gemm_kernel_{name}_last"][at]
            span = f"{name} {first:.0f}" if first == last else f"{number:.0f} {name}s from {first:.0f} to {last:.0f}"
            where.append(span)
    if where:
        what += f"; wrong: {', '.join(where)}"
    if kind == "rank":
        what += f"; only on rank {related['gemm_kernel_rank_first'][at]:.0f}"
    return what


class Quantizer(_GemmCheck):
    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        for operand in "ab":
            for statistic, most, text in (
                (
                    f"gemm_wrong_codes_{operand}%",
                    CODES,
                    "{:.3g} % of the codes are not the nearest value of the format",
                ),
                (f"gemm_wrong_scales_{operand}%", SCALES, "{:.3g} % of the scales do not match their amax"),
                (
                    f"gemm_rounding_bias_{operand}",
                    BIAS,
                    "stochastic rounding has a bias of {:.2g} of the distance between neighboring values",
                ),
                (f"gemm_zeros_excess_{operand}%", ZEROS, "{:.3g} % more codes than expected are 0"),
            ):
                for column in self._columns(numbers, statistic):
                    yield from self.streaks.sightings(
                        numbers,
                        facts,
                        column,
                        np.abs(column.values) > most,
                        f"operand {operand.upper()} of the GEMM {{}}: {text}",
                        _gemms(numbers, column),
                        column.values,
                        key=statistic,
                    )


class Excess(_GemmCheck):
    needed = EXCESS_STEPS

    def step(self, numbers: StepNumbers, facts: Facts) -> Iterator[Sighting]:
        for column in self._columns(numbers, "gemm_excess"):
            yield from self.streaks.sightings(
                numbers,
                facts,
                column,
                column.values > EXCESS,
                "the error of the GEMM {} is {:.3g} times the error of its operands",
                _gemms(numbers, column),
                column.values,
            )


_COLLECT = "LogGemmError with gemms: [fprop, dgrad, wgrad]"

RULES = (
    Rule(
        id="gemm-kernel",
        title="a GEMM whose result is not the product of its operands",
        subject="tensor",
        needs="gemm_kernel_ratio of GEMMs",
        collect=_COLLECT,
        condition="gemm_kernel_ratio is above 1: of the whole product, of a row or of a column",
        silent="rounding of the result and of the sums on this device: docs/gemm-error.md",
        severity="error",
        source="the tolerances are derived in docs/gemm-error.md; cudnn-frontend issue 981 and Primus-Turbo issue 397"
        " were such kernels",
        why="the wrong values are finite and plausible, so no statistic of a tensor shows the error",
        disproof="the same operands, multiplied in float64, give the same result",
        remedy=(
            "Report the kernel, and run these layers in high precision until it is fixed. Another version of cuBLAS,"
            " Transformer Engine or the driver may be correct"
        ),
        cost="the layer runs at the speed of BF16",
        check=functools.partial(Kernel, "kernel"),
    ),
    Rule(
        id="gemm-gain",
        title="a GEMM whose result is off by a factor",
        subject="tensor",
        needs="gemm_kernel_ratio and gemm_gain of GEMMs",
        collect=_COLLECT,
        condition=f"gemm_kernel_ratio is above 1, and gemm_gain is more than {GAIN:g} away from 1",
        silent="rounding; loss scaling, because it scales the operands too",
        severity="error",
        source="TransformerEngine issue 3342: gradients of a fused grouped MLP scaled by up to 2^-7",
        why="a scale is applied twice or not at all, or it is another block's scale; cosine similarity does not show"
        " it",
        disproof="the same operands, multiplied in float64, give the same result",
        remedy="Run these layers in high precision, and report the kernel and the layout of its scales",
        cost="the layer runs at the speed of BF16",
        check=functools.partial(Kernel, "gain"),
    ),
    Rule(
        id="gemm-one-rank",
        title="a GEMM that is wrong on one rank only",
        subject="tensor",
        needs="gemm_kernel_ratio of GEMMs, on several ranks with the same layers",
        collect=_COLLECT,
        condition="gemm_kernel_ratio is above 1 on exactly one rank",
        silent="layers that exist on some ranks only",
        severity="error",
        source="silent data corruption belongs to a device: arXiv 2102.11245; the condition is this project's",
        why="the other ranks run the same kernel and format without the error, so the device is faulty",
        disproof="the finding follows the rank's data to another GPU",
        remedy="Remove this rank's GPU from the job, and test it (dcgmi diag -r 3)",
        check=functools.partial(Kernel, "rank"),
    ),
    Rule(
        id="gemm-quantizer",
        title="wrong codes or scales from the quantizer",
        subject="tensor",
        needs="gemm_wrong_codes, gemm_wrong_scales, gemm_rounding_bias and gemm_zeros_excess of GEMMs",
        collect=_COLLECT,
        condition=(
            f"more than {CODES:g} % of the sampled codes or {SCALES:g} % of the scales are wrong; or, with stochastic"
            f" rounding, the bias is above {BIAS:g} of the distance between neighboring values, or {ZEROS:g} % more"
            " codes than expected are 0"
        ),
        silent=(
            "rounding to either neighbor with stochastic rounding or halfway between two values; inf and nan"
            " elements, the scales of their blocks, and NVFP4 tensors with inf"
        ),
        severity="error",
        source="TransformerEngine pull request 3281: stochastic rounding of NVFP4 that gave zeros; the thresholds are"
        " this project's",
        why="the GEMM multiplies wrong values, even if its kernel is correct",
        disproof="te_precision_callbacks.base.numerics gives the same codes for the tensor",
        remedy=(
            "Report it, and run these layers in high precision or with another recipe. With NVFP4, first try"
            " NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True)"
        ),
        check=Quantizer,
    ),
    Rule(
        id="gemm-excess",
        title="cancellation in a product amplifies the error of its operands",
        subject="tensor",
        needs="gemm_excess of GEMMs",
        collect=_COLLECT,
        condition=f"gemm_excess is above {EXCESS:g} in {EXCESS_STEPS} collection steps in a row",
        silent="products with little cancellation: independent operands have an excess of 1",
        severity="note",
        source="|dA B|^2 is the sum of the squared terms times the squared error of A, and |A B|^2 is less where terms"
        " cancel; the threshold is this project's",
        why="each operand looks healthy in its statistics, but the result is mostly error",
        disproof="the run with this GEMM in high precision has the same loss",
        remedy=("Keep the GEMM in high precision (DisableQuantizationGEMM), or subtract the common part of its rows"),
        cost="the GEMM runs at the speed of BF16",
        check=Excess,
    ),
)
