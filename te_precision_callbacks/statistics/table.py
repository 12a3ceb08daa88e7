"""Defines every statistic once: its name, formula and unit, and its computation from the measured columns.

    STATISTICS["std"].value(columns)    # float64, one for each row of the columns

The table of docs/statistics.md is made from :data:`STATISTICS` (``python -m
te_precision_callbacks.statistics.table``). Upstream's names and formulas: Transformer Engine 2.20.2,
``debug/features/utils/stats_computation.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Columns = Mapping[str, Values]
"""Column name (see :mod:`te_precision_callbacks.engine.kernels.columns`) -> values, float64, one a row."""

BLOCKWISE = "max_blockwise_dynamic_range"
"""The one statistic that takes parameters."""


class Of(Enum):
    """What a statistic is computed from; what has the same is measured and kept together."""

    TENSOR = "the high-precision tensor"
    QUANTIZED = "the tensor and its quantized form"
    SCALES = "the scales of the quantized form"
    SCALE_BINS = "the scales of the quantized form, binned"
    SCALE_LIMITS = "the scales of the quantized form, by block"
    LOSSES = "the tensor and its quantized form, by block"
    RANGES = "the tensor, by block of the quantized form"
    RANGE_BINS = "the tensor, by block of the quantized form, binned"
    BLOCKS = "blocks of the tensor"
    EXPONENTS = "the exponents of the tensor"


class Worse(Enum):
    """In which direction a value of a statistic gets worse, as the table of docs/statistics.md says it."""

    HIGH = "high"
    LOW = "low"
    AWAY_FROM_ZERO = "far from 0"
    NEITHER = ""


OF_BLOCKS = frozenset({Of.SCALE_BINS, Of.SCALE_LIMITS, Of.LOSSES, Of.RANGES, Of.RANGE_BINS})
"""What there is of recipes with a scale for each block only."""


@dataclass(frozen=True)
class Bins:
    """The bins of a histogram, over powers of two.

    Bin i counts what lies in [2^(lowest + i / steps), 2^(lowest + (i + 1) / steps)); what is below the first or above
    the last bin counts in it.

    Attributes:
        lowest: the power of two at which the first bin begins.
        steps: how many bins a factor of 2 has.
        number: of bins.
    """

    lowest: int
    steps: int
    number: int

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns that hold the counts."""
        return tuple(f"bin_{index}" for index in range(self.number))

    @property
    def edges(self) -> Values:
        """Where bins begin and end, as powers of two: float64, one more than there are bins."""
        return self.lowest + np.arange(self.number + 1) / self.steps

    def counts(self, columns: Columns) -> Values:
        """[rows, bins]."""
        return np.stack([columns[name] for name in self.columns], axis=-1)

    def percentile(self, percent: int, columns: Columns) -> tuple[npt.NDArray[np.bool_], Values]:
        """The lower edge of the bin in which a percentile (the nearest rank) lies, as a power of two.

        Returns:
            Whether a row has anything, and the edges.
        """
        counts = self.counts(columns)
        total = counts.sum(-1)
        rank = np.maximum(np.ceil(percent * total / 100), 1)
        index = (np.cumsum(counts, -1) >= rank[:, None]).argmax(-1)
        return total > 0, self.edges[index]


EXPONENTS = Bins(-127, 1, 256)
"""Of :mod:`te_precision_callbacks.engine.kernels.columns`, where the first bin has the subnormal numbers."""

SCALES = Bins(-127, 8, 8 * 255)
"""From E8M0's smallest number to float32's largest: powers of two, as E8M0, are at lower edges, hence exact."""

RANGES = Bins(0, 8, 8 * 64 + 1)
"""No format of one byte holds 64 powers of two; a block with more counts in the last bin."""

PERCENTILES = (1, 10, 50, 90, 99)


@dataclass(frozen=True)
class Statistic:
    """One row of the table.

    Attributes:
        name: as in a config, without recipe and direction.
        of: what it is computed from.
        formula: in words and symbols; sums are over the finite elements of all micro-batches and ranks.
        merge: how micro-batches and ranks are merged.
        unit: of the value.
        upstream: whether Transformer Engine 2.20 has it.
        value: the value, from merged columns. None for a histogram, which is the columns of its bins.
        bins: of a histogram.
        worse: the direction in which a value is worse: what lists of the worst layers go by.
        misses: statistics of the same quantized tensor that show losses which this one does not: a list of the worst
            layers goes by them too.
    """

    name: str
    of: Of
    formula: str
    merge: str
    unit: str
    upstream: bool
    value: Callable[[Columns], Values] | None
    bins: Bins | None = None
    worse: Worse = Worse.HIGH
    misses: tuple[str, ...] = ()

    def __reduce__(self) -> tuple[Callable[[str], Statistic], tuple[str]]:
        """Pickled by its name: another process has the same table."""
        return _row, (self.name,)


def _row(name: str) -> Statistic:
    return STATISTICS[name]


def _or_zero(condition: npt.NDArray[np.bool_], values: Values) -> Values:
    return np.where(condition, values, 0.0)


def _ratio(numerator: Values, denominator: Values) -> Values:
    """numerator / denominator, and 0 where there is nothing to divide by."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def _amax(columns: Columns) -> Values:
    return np.maximum(columns["max"], columns["negated_min"])


def _mean(columns: Columns) -> Values:
    return _ratio(columns["sum"], columns["finite"])


def _spread(total: Values, squares: Values, count: Values, largest: Values, negated_least: Values) -> Values:
    """The sample standard deviation from raw moments and extremes, 0 for fewer than two elements.

    What cancels in the moments leaves an error of the variance of some 100 * 2^-53 * mean^2. So the result is held
    between the bounds that n numbers with these extremes have: range / sqrt(2 (n - 1)), where all others lie in the
    middle, and range / 2 * sqrt(n / (n - 1)), where all are extremes (Popoviciu's inequality). Equal elements have 0.
    """
    several = count > 1
    fewer = np.where(several, count - 1, 1.0)
    with np.errstate(over="ignore", invalid="ignore"):  # squares of float64 elements may be beyond float64
        width = np.where(several, largest + negated_least, 0.0)
        spread = np.sqrt(np.maximum(squares - _ratio(total * total, count), 0.0) / fewer)
    bounded = np.clip(spread, width / np.sqrt(2 * fewer), width / 2 * np.sqrt((fewer + 1) / fewer))
    return np.where(width == 0, 0.0, np.where(np.isfinite(squares), bounded, np.inf))


def _std(columns: Columns) -> Values:
    return _spread(columns["sum"], columns["square_sum"], columns["finite"], columns["max"], columns["negated_min"])


def _dynamic_range(columns: Columns) -> Values:
    nonzero = np.isfinite(columns["negated_min_nonzero"])
    smallest = np.where(nonzero, -columns["negated_min_nonzero"], 1.0)
    return np.log2(np.where(nonzero, _amax(columns), 1.0)) - np.log2(smallest)


def _sqnr(columns: Columns) -> Values:
    signal, error = columns["signal_square_sum"], columns["error_square_sum"]
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(error == 0, np.inf, 10 * np.log10(signal / error))


def _least_scale(columns: Columns) -> Values:
    return _or_zero(np.isfinite(columns["scale_max"]), -columns["negated_scale_min"])


def _largest_scale(columns: Columns) -> Values:
    return _or_zero(np.isfinite(columns["scale_max"]), columns["scale_max"])


def _scale_percentile(percent: int) -> Callable[[Columns], Values]:
    def value(columns: Columns) -> Values:
        # The extremes are known exactly; the lower edge of a bin may be below the least.
        found, edge = SCALES.percentile(percent, columns)
        return _or_zero(found, np.clip(np.exp2(edge), _least_scale(columns), _largest_scale(columns)))

    return value


def _least_range(columns: Columns) -> Values:
    return _or_zero(np.isfinite(columns["range_max"]), -columns["negated_range_min"])


def _largest_range(columns: Columns) -> Values:
    return _or_zero(np.isfinite(columns["range_max"]), columns["range_max"])


def _range_percentile(percent: int) -> Callable[[Columns], Values]:
    def value(columns: Columns) -> Values:
        found, edge = RANGES.percentile(percent, columns)
        return _or_zero(found, np.clip(edge, _least_range(columns), _largest_range(columns)))

    return value


_ADD, _EXTREME = "counts and sums added", "the extreme of all"
_BINNED = "the counts of bins added"


def _statistics() -> Iterable[Statistic]:
    def tensor(
        name: str,
        formula: str,
        merge: str,
        unit: str,
        value: Callable[[Columns], Values],
        upstream: bool = True,
        worse: Worse = Worse.HIGH,
    ) -> Statistic:
        return Statistic(name, Of.TENSOR, formula, merge, unit, upstream, value, worse=worse)

    def quantized(
        name: str,
        formula: str,
        unit: str,
        value: Callable[[Columns], Values],
        upstream: bool = True,
        worse: Worse = Worse.HIGH,
        misses: tuple[str, ...] = (),
    ) -> Statistic:
        return Statistic(name, Of.QUANTIZED, formula, _ADD, unit, upstream, value, worse=worse, misses=misses)

    def scales(
        name: str,
        formula: str,
        merge: str,
        value: Callable[[Columns], Values],
        upstream: bool,
        worse: Worse = Worse.HIGH,
    ) -> Statistic:
        return Statistic(name, Of.SCALES, formula, merge, "of the tensor", upstream, value, worse=worse)

    element, count, low = "of the tensor", "elements", Worse.LOW
    yield tensor("min", "min(x)", _EXTREME, element, lambda c: _or_zero(c["finite"] > 0, -c["negated_min"]), worse=low)
    yield tensor("max", "max(x)", _EXTREME, element, lambda c: _or_zero(c["finite"] > 0, c["max"]))
    yield tensor("mean", "sum(x) / n", _ADD, element, _mean, worse=Worse.AWAY_FROM_ZERO)
    yield tensor(
        "std",
        "sqrt((sum(x^2) - sum(x)^2 / n) / (n - 1)); 0 where max(x) = min(x), and for one element",
        _ADD,
        element,
        _std,
    )
    yield tensor("l1_norm", "sum(|x|)", _ADD, element, lambda c: c["abs_sum"])
    yield tensor("l2_norm", "sqrt(sum(x^2))", _ADD, element, lambda c: np.sqrt(c["square_sum"]))
    yield tensor("cur_amax", "max(|x|)", _EXTREME, element, lambda c: _or_zero(c["finite"] > 0, _amax(c)))
    yield tensor(
        "dynamic_range", "log2(max(|x|)) - log2(min(|x|) over x != 0)", _EXTREME, "powers of two", _dynamic_range
    )
    yield tensor(
        "numel",
        "number of elements, finite or not",
        _ADD,
        count,
        lambda c: c["finite"] + c["nonfinite"],
        False,
        Worse.NEITHER,
    )
    yield tensor(
        "zeros%", "100 * (number of x = 0) / n", _ADD, "%", lambda c: 100 * _ratio(c["zeros"], c["finite"]), False
    )
    yield tensor("nonfinite_num", "number of inf and nan", _ADD, count, lambda c: c["nonfinite"], False)
    yield Statistic(
        BLOCKWISE,
        Of.BLOCKS,
        "max over blocks of log2(max(|x|)) - log2(min(|x|) over x != 0); a block has `block_size` elements of a row"
        " (`dims: 1`) or `block_size` x `block_size` (`dims: 2`); activations and weights: the larger of it and of the"
        " transposed tensor's",
        _EXTREME,
        "powers of two",
        True,
        lambda c: np.maximum(c["block_range"], 0.0),
    )
    yield Statistic(
        "exponent_histogram",
        Of.EXPONENTS,
        "for each e from 0 to 255 the number of x with 2^(e - 127) <= |x| < 2^(e - 126); e = 0 has the x != 0 below"
        " 2^-126, e = 255 those of float64 from 2^128 on",
        _ADD,
        count,
        False,
        None,
        EXPONENTS,
        Worse.NEITHER,
    )

    def share(column: str) -> Callable[[Columns], Values]:
        return lambda c: 100 * _ratio(c[column], c["compared"])

    yield quantized("underflows%", "100 * (number of x != 0 with y = 0) / n", "%", share("underflows"))
    yield quantized("overflows%", "100 * (number of |x| > largest code * its factor) / n", "%", share("overflows"))
    losses = ("underflows%", "overflows%")
    yield quantized(
        "mse",
        "sum((x - y)^2) / n",
        "square of the tensor's",
        lambda c: _ratio(c["error_square_sum"], c["compared"]),
        misses=losses,
    )
    yield quantized(
        "sqnr_db",
        "10 * log10(sum(x^2) / sum((x - y)^2)); inf where y equals x, -inf where `mse` is inf",
        "dB",
        _sqnr,
        upstream=False,
        worse=low,
        misses=losses,
    )
    yield scales("scale_inv_min", "smallest factor", _EXTREME, _least_scale, True, low)
    yield scales("scale_inv_max", "largest factor", _EXTREME, _largest_scale, True)
    yield scales(
        "scale_inv_std",
        "sample standard deviation of the factors",
        _ADD,
        lambda c: _spread(c["scale_sum"], c["scale_square_sum"], c["scales"], c["scale_max"], c["negated_scale_min"]),
        False,
    )
    yield from _of_blocks()


def _of_blocks() -> Iterable[Statistic]:
    """The statistics of recipes with a scale for each block."""
    powers = "powers of two"
    for percent in PERCENTILES:
        yield Statistic(
            f"scale_inv_p{percent}",
            Of.SCALE_BINS,
            f"the factor that {percent} % of them do not exceed, rounded down to 2^(k / 8)",
            _BINNED,
            "of the tensor",
            False,
            _scale_percentile(percent),
            worse=Worse.LOW if percent < 50 else Worse.HIGH,
        )
    yield Statistic(
        "scale_inv_histogram",
        Of.SCALE_BINS,
        "for each i from 0 to 2039 the number of factors from 2^(-127 + i / 8) to below 2^(-127 + (i + 1) / 8); i = 0"
        " has the smaller ones too",
        _BINNED,
        "blocks",
        False,
        None,
        SCALES,
        Worse.NEITHER,
    )
    for name, where, column in (
        ("saturated_scales%", "scale is at a limit of its format", "saturated"),
        ("flushed_scales%", "scale is at the lower limit of its format", "flushed"),
    ):
        formula = f"100 * (number of blocks with an x != 0 whose {where}) / blocks"
        yield Statistic(name, Of.SCALE_LIMITS, formula, _ADD, "%", False, _share_of_blocks(column))
    yield Statistic(
        "zero_blocks%",
        Of.SCALE_LIMITS,
        "100 * (number of blocks without an x != 0) / blocks; such a block is left out of `scale_inv_*`",
        _ADD,
        "%",
        False,
        _share_of_blocks("zero_blocks"),
    )
    for name, what in (("underflow", "an x != 0 with y = 0"), ("overflow", "an |x| > largest code * its factor")):
        yield Statistic(
            f"{name}_blocks%",
            Of.LOSSES,
            f"100 * (number of blocks with {what}) / blocks",
            _ADD,
            "%",
            False,
            _share_of_blocks(f"{name}_blocks"),
        )
    yield Statistic(
        "block_underflows%_max",
        Of.LOSSES,
        "`underflows%` of the block that has most",
        _EXTREME,
        "%",
        False,
        lambda c: 100 * np.maximum(c["underflow_share"], 0.0),
    )
    ranges = "log2(max(|x|)) - log2(min(|x|) over x != 0) of a block"
    yield Statistic("block_dynamic_range_min", Of.RANGES, f"smallest {ranges}", _EXTREME, powers, False, _least_range)
    yield Statistic("block_dynamic_range_max", Of.RANGES, f"largest {ranges}", _EXTREME, powers, False, _largest_range)
    yield Statistic(
        "block_dynamic_range_mean",
        Of.RANGES,
        f"mean {ranges}",
        _ADD,
        powers,
        False,
        lambda c: _ratio(c["range_sum"], c["ranges"]),
    )
    for percent in PERCENTILES:
        yield Statistic(
            f"block_dynamic_range_p{percent}",
            Of.RANGE_BINS,
            f"the range that {percent} % of the blocks do not exceed, rounded down to k / 8, above 64 to 64",
            _BINNED,
            powers,
            False,
            _range_percentile(percent),
        )
    yield Statistic(
        "block_dynamic_range_histogram",
        Of.RANGE_BINS,
        "for each i from 0 to 512 the number of blocks from i / 8 to below (i + 1) / 8; i = 512 has the larger ones",
        _BINNED,
        "blocks",
        False,
        None,
        RANGES,
        Worse.NEITHER,
    )


def _share_of_blocks(column: str) -> Callable[[Columns], Values]:
    return lambda c: 100 * _ratio(c[column], c["blocks"])


STATISTICS: Mapping[str, Statistic] = {statistic.name: statistic for statistic in _statistics()}

TENSOR_STATISTICS = tuple(name for name, s in STATISTICS.items() if s.of in (Of.TENSOR, Of.EXPONENTS))
"""What LogTensorStats takes as a plain name."""

QUANTIZED_STATISTICS = tuple(
    name for name, s in STATISTICS.items() if s.of in (Of.QUANTIZED, Of.SCALES) or s.of in OF_BLOCKS
)
"""What LogFp8TensorStats and LogNvfp4TensorStats take, with a recipe before and ``_columnwise`` after it or not."""


def table() -> str:
    """The table of docs/statistics.md, in Markdown."""
    lines = ["| statistic | of | formula | merged by | unit | worse | in TE 2.20 |", "|---|---|---|---|---|---|---|"]
    lines += [
        "| "
        + " | ".join(
            (
                f"`{s.name}`",
                s.of.value,
                s.formula.replace("|", "\\|"),
                s.merge,
                s.unit,
                s.worse.value,
                "yes" if s.upstream else "",
            )
        )
        + " |"
        for s in STATISTICS.values()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    import sys

    sys.stdout.write(table() + "\n")
