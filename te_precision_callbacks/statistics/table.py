"""Defines every statistic: name, formula, unit, and computation from the measured columns.

The tables of docs/statistics.md are generated from :data:`STATISTICS` (tools/statistics_page.py). Upstream's names and
formulas: Transformer Engine 2.20.2, ``debug/features/utils/stats_computation.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import numpy as np

from te_precision_callbacks.statistics.arrays import Floats, Mask

Values = Floats
Columns = Mapping[str, Values]
"""Column name (see :mod:`te_precision_callbacks.engine.kernels.columns`) -> values, float64, [rows]."""

BLOCKWISE = "max_blockwise_dynamic_range"
"""The only statistic with parameters."""


SYMBOLS = (
    "x is an element of the high-precision tensor, y its quantized value: a code times its factor (`scale_inv`). n is"
    " the number of finite x."
)
"""Explanation of the symbols in the formulas."""


class StatisticSource(Enum):
    """Source of a statistic; statistics with the same source are measured and stored together."""

    TENSOR = "the high-precision tensor"
    QUANTIZED = "the tensor and its quantized form"
    SCALES = "the scales of the quantized form"
    SCALE_LIMITS = "the scales of the quantized form, by block"
    LOSSES = "the tensor and its quantized form, by block"
    RANGES = "the tensor, by block of the quantized form"
    BLOCKS = "blocks of the tensor"
    EXPONENTS = "the exponents of the tensor"
    GEMM = "the GEMM that makes the tensor"
    GEMM_FORMAT = "the GEMM that makes the tensor, and its operands in high precision"

    __hash__ = object.__hash__  # Enum's is a Python function, and members are hashed for each watched tensor


class Worse(Enum):
    """Direction of worse values, shown in docs/statistics.md.

    Magnitudes have no worse direction: a layer with the largest amax, std or scale may be as healthy as the others.
    """

    HIGH = "high"
    LOW = "low"
    NEITHER = ""


BLOCK_SOURCES = frozenset({StatisticSource.SCALE_LIMITS, StatisticSource.LOSSES, StatisticSource.RANGES})
"""Sources that exist only for recipes with a scale per block."""

SCALE_SOURCES = frozenset({StatisticSource.SCALES, StatisticSource.SCALE_LIMITS})
"""Sources that are available even if a tensor exists only in quantized form."""


GEMM_SOURCES = (StatisticSource.GEMM, StatisticSource.GEMM_FORMAT)
"""Sources that LogGemmError measures."""


EXPONENT_COLUMNS = tuple(f"bin_{exponent}" for exponent in range(256))
EXPONENT_EDGES = tuple(map(float, range(-127, 130)))
"""log2 of the edges of the histogram's 256 bins. The first bin also has subnormal numbers, the last one larger numbers:
:mod:`te_precision_callbacks.engine.kernels.columns`."""


@dataclass(frozen=True)
class Statistic:
    """A row of the table.

    Attributes:
        name: as in a config, without recipe and direction.
        formula: in words and symbols; sums are over the finite elements of all micro-batches and ranks.
        unit: the unit of the value.
        value: computes the value from merged columns, within ``np.errstate(all="ignore")``: squares of float64 elements
            may overflow. None for the histogram, which consists of its columns.
        source: the data that it is computed from.
        upstream: whether Transformer Engine 2.20 has the statistic.
        worse: the direction of worse values. Lists of the worst layers include only statistics with a direction.
        signed: whether values of both signs are normal.
    """

    name: str
    formula: str
    unit: str
    value: Callable[[Columns], Values] | None
    source: StatisticSource
    upstream: bool = False
    worse: Worse = Worse.HIGH
    signed: bool = False

    @property
    def is_histogram(self) -> bool:
        return self.value is None

    @property
    def is_count(self) -> bool:
        return self.unit in (_COUNT, _BLOCKS)

    def __reduce__(self) -> tuple[Callable[[str], Statistic], tuple[str]]:
        """Pickle by name, since other processes have the same table."""
        return _row, (self.name,)


def _row(name: str) -> Statistic:
    return STATISTICS[name]


def _or_zero(condition: Mask, values: Values) -> Values:
    return np.where(condition, values, 0.0)


def _ratio(numerator: Values, denominator: Values) -> Values:
    return np.divide(numerator, denominator, out=np.zeros(numerator.shape), where=denominator > 0)


def _amax(columns: Columns) -> Values:
    return np.maximum(columns["max"], columns["negated_min"])


def _spread(total: Values, squares: Values, count: Values, largest: Values, negated_least: Values) -> Values:
    """Sample standard deviation from raw moments and extremes; 0 for fewer than two elements.

    Cancellation in the moments leaves an error of some 100 * 2^-53 * mean^2 in the variance. The result is therefore
    clamped to the bounds for n numbers with these extremes: range / sqrt(2 (n - 1)) if all others lie in the middle,
    and range / 2 * sqrt(n / (n - 1)) if all are extremes (Popoviciu's inequality). It is 0 for equal elements.
    """
    has_spread = count > 1
    fewer = np.where(has_spread, count - 1, 1.0)
    width = np.where(has_spread, largest + negated_least, 0.0)
    spread = np.sqrt(np.maximum(squares - _ratio(total * total, count), 0.0) / fewer)
    at_least = np.maximum(spread, width / np.sqrt(2 * fewer))
    bounded = np.minimum(at_least, width / 2 * np.sqrt((fewer + 1) / fewer))
    return np.where(width == 0, 0.0, np.where(np.isfinite(squares), bounded, np.inf))


def _dynamic_range(columns: Columns) -> Values:
    nonzero = np.isfinite(columns["negated_min_nonzero"])
    smallest = np.where(nonzero, -columns["negated_min_nonzero"], 1.0)
    return np.log2(np.where(nonzero, _amax(columns), 1.0)) - np.log2(smallest)


def _sqnr(columns: Columns) -> Values:
    signal = columns["signal_square_sum"]
    error = columns["error_square_sum"]
    return np.where(error == 0, np.inf, 10 * np.log10(signal / error))


def _underflow_norm(columns: Columns) -> Values:
    return 100 * np.sqrt(_ratio(columns["underflow_square_sum"], columns["signal_square_sum"]))


def _if_any(largest: str, negated_least: str = "") -> Callable[[Columns], Values]:
    """Return a function for the largest or the smallest value of a column; 0 without a value."""
    if negated_least:
        return lambda c: _or_zero(np.isfinite(c[largest]), -c[negated_least])
    return lambda c: _or_zero(np.isfinite(c[largest]), c[largest])


_ELEMENT = "of the tensor"
_COUNT = "elements"
_BLOCKS = "blocks"
_POWERS = "powers of two"
_PERCENT = "%"
_RELATIVE = "relative"

_LIMITED = "; none in a block with the factor 0"


def _share(column: str, total: str) -> Callable[[Columns], Values]:
    return lambda c: 100 * _ratio(c[column], c[total])


def _statistics() -> Iterable[Statistic]:
    upstream = functools.partial(Statistic, source=StatisticSource.TENSOR, upstream=True)
    magnitude = functools.partial(upstream, worse=Worse.NEITHER)
    new = functools.partial(Statistic, source=StatisticSource.TENSOR)
    yield magnitude("min", "min(x)", _ELEMENT, _if_any("max", "negated_min"))
    yield magnitude("max", "max(x)", _ELEMENT, _if_any("max"))
    yield magnitude("mean", "sum(x) / n", _ELEMENT, lambda c: _ratio(c["sum"], c["finite"]), signed=True)
    std = "sqrt((sum(x^2) - sum(x)^2 / n) / (n - 1)); 0 where max(x) = min(x), and for one element"
    yield magnitude(
        "std", std, _ELEMENT, lambda c: _spread(c["sum"], c["square_sum"], c["finite"], c["max"], c["negated_min"])
    )
    yield magnitude("l1_norm", "sum(|x|)", _ELEMENT, lambda c: c["abs_sum"])
    yield magnitude("l2_norm", "sqrt(sum(x^2))", _ELEMENT, lambda c: np.sqrt(c["square_sum"]))
    yield magnitude("cur_amax", "max(|x|)", _ELEMENT, lambda c: _or_zero(c["finite"] > 0, _amax(c)))
    ratio = "log2(max(|x|)) - log2(min(|x|) over x != 0)"
    yield upstream("dynamic_range", ratio, _POWERS, _dynamic_range)
    numel = "number of elements, finite or not"
    yield new("numel", numel, _COUNT, lambda c: c["finite"] + c["nonfinite"], worse=Worse.NEITHER)
    yield new("zeros%", "100 * (number of x = 0) / n", _PERCENT, _share("zeros", total="finite"))
    yield new("nonfinite_num", "number of inf and nan", _COUNT, lambda c: c["nonfinite"])
    yield Statistic(
        BLOCKWISE,
        f"max over blocks of {ratio}; a block has `block_size` elements of a row"
        " (`dims: 1`) or `block_size` x `block_size` (`dims: 2`); activations and weights: the larger of it and of the"
        " transposed tensor's",
        _POWERS,
        lambda c: np.maximum(c["block_range"], 0.0),
        source=StatisticSource.BLOCKS,
        upstream=True,
    )
    yield Statistic(
        "exponent_histogram",
        "for each e from 0 to 255 the number of x with 2^(e - 127) <= |x| < 2^(e - 126); e = 0 also counts smaller"
        " x != 0, e = 255 larger x (float64 only)",
        _COUNT,
        None,
        source=StatisticSource.EXPONENTS,
        worse=Worse.NEITHER,
    )
    yield from _of_quantized_tensors()
    yield from _of_blocks()
    yield from _of_gemms()


def _of_quantized_tensors() -> Iterable[Statistic]:
    quantized = functools.partial(Statistic, source=StatisticSource.QUANTIZED)
    underflows = "number of x != 0 with y = 0"
    overflows = "number of |x| > largest code * its factor * (1 + 2^-21)"
    yield quantized(
        "underflows%", f"100 * ({underflows}) / n", _PERCENT, _share("underflows", total="compared"), upstream=True
    )
    yield quantized(
        "overflows%",
        f"100 * ({overflows}) / n{_LIMITED}",
        _PERCENT,
        _share("overflows", total="compared"),
        upstream=True,
    )
    yield quantized(
        "underflow_norm%",
        "100 * sqrt((sum of x^2 over x with y = 0) / sum(x^2))",
        _PERCENT,
        _underflow_norm,
    )
    yield quantized(
        "mse",
        "sum((x - y)^2) / n",
        "square of the tensor's",
        lambda c: _ratio(c["error_square_sum"], c["compared"]),
        upstream=True,
    )
    sqnr = "10 * log10(sum(x^2) / sum((x - y)^2)); inf where y equals x, -inf where `mse` is inf"
    yield quantized("sqnr_db", sqnr, "dB", _sqnr, worse=Worse.LOW)
    scales = functools.partial(Statistic, unit=_ELEMENT, source=StatisticSource.SCALES, worse=Worse.NEITHER)
    yield scales("scale_inv_min", "smallest factor", value=_if_any("scale_max", "negated_scale_min"), upstream=True)
    yield scales("scale_inv_max", "largest factor", value=_if_any("scale_max"), upstream=True)
    yield scales(
        "scale_inv_std",
        "sample standard deviation of the factors",
        value=lambda c: _spread(
            c["scale_sum"], c["scale_square_sum"], c["scales"], c["scale_max"], c["negated_scale_min"]
        ),
    )


def _of_gemms() -> Iterable[Statistic]:
    """Yield the statistics of LogGemmError. x are the probes of docs/gemm-error.md."""
    gemm = functools.partial(Statistic, source=StatisticSource.GEMM, unit=_RELATIVE)
    over_all = "; the largest over micro-batches and ranks"
    yield gemm(
        "gemm_kernel_error",
        f"|C x - P x| / |P x|: the result C against the product P of the operands as stored{over_all}",
        value=lambda c: np.maximum(c["kernel_error"], 0.0),
    )
    yield gemm(
        "gemm_kernel_ratio",
        "max over rows of |C x - P x| relative to the most that rounding explains; above 1, the"
        f" kernel is wrong{over_all}",
        value=lambda c: np.maximum(c["kernel_ratio"], 0.0),
    )
    yield gemm("gemm_gain", "<C x, P x> / |P x|^2", value=_gain, worse=Worse.NEITHER)
    yield gemm(
        "gemm_wrong_rank",
        "the rank whose kernel is wrong; -1 if no rank, or more than one",
        unit="rank",
        value=lambda c: np.where(c["wrong_rank"] == -c["negated_wrong_rank"], c["wrong_rank"], -1.0),
        worse=Worse.NEITHER,
    )
    yield Statistic(
        "gemm_format_error",
        "|P x - H x| / |H x|: P against the product H of the operands before quantization",
        _RELATIVE,
        lambda c: np.sqrt(_ratio(c["format_error_square"], c["high_square"])),
        source=StatisticSource.GEMM_FORMAT,
    )


def _gain(columns: Columns) -> Values:
    expected = columns["stored_square"]
    return np.where(expected > 0, _ratio(columns["gain_dot"], expected), 1.0)


def _of_blocks() -> Iterable[Statistic]:
    for name, column, what in (
        ("saturated_scales%", "saturated", "with an x != 0 whose scale is at a limit of its format"),
        (
            "flushed_scales%",
            "flushed",
            "with an x != 0 whose scale is at the lower limit of its format",
        ),
        ("zero_blocks%", "zero_blocks", "without an x != 0"),
    ):
        left_out = "; such a block is left out of `scale_inv_*`" if column == "zero_blocks" else ""
        formula = f"100 * (number of blocks {what}) / blocks{left_out}"
        yield Statistic(name, formula, _PERCENT, _share(column, total="blocks"), source=StatisticSource.SCALE_LIMITS)
    for name, what, more in (("underflow", "an underflow", ""), ("overflow", "an overflow", _LIMITED)):
        column = f"{name}_blocks"
        formula = f"100 * (number of blocks with {what}) / blocks{more}"
        yield Statistic(f"{column}%", formula, _PERCENT, _share(column, total="blocks"), source=StatisticSource.LOSSES)
    yield Statistic(
        "block_underflows%_max",
        "the largest `underflows%` of a block",
        _PERCENT,
        lambda c: 100 * np.maximum(c["underflow_share"], 0.0),
        source=StatisticSource.LOSSES,
    )
    ranges = functools.partial(Statistic, unit=_POWERS, source=StatisticSource.RANGES)
    block_range = "log2(max(|x|)) - log2(min(|x|) over x != 0) of a block"
    yield ranges("block_dynamic_range_min", f"smallest {block_range}", value=_if_any("range_max", "negated_range_min"))
    yield ranges("block_dynamic_range_max", f"largest {block_range}", value=_if_any("range_max"))
    yield ranges(
        "block_dynamic_range_mean",
        f"mean {block_range}",
        value=lambda c: _ratio(c["range_sum"], c["ranges"]),
    )


STATISTICS: Mapping[str, Statistic] = {statistic.name: statistic for statistic in _statistics()}


def _names_from(*sources: StatisticSource) -> tuple[str, ...]:
    return tuple(name for name, statistic in STATISTICS.items() if statistic.source in sources)


TENSOR_STATISTICS = _names_from(StatisticSource.TENSOR, StatisticSource.EXPONENTS)
"""Names that LogTensorStats accepts without parameters."""

QUANTIZED_STATISTICS = _names_from(StatisticSource.QUANTIZED, StatisticSource.SCALES, *BLOCK_SOURCES)
"""Names that LogFp8TensorStats and LogNvfp4TensorStats accept, optionally with a recipe before and ``_columnwise``
after the name."""

GEMM_STATISTICS = _names_from(*GEMM_SOURCES)
"""Statistics of LogGemmError, recorded for the tensor that a GEMM computes."""
