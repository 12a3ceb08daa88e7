"""The tables of docs/statistics.md: one row per statistic or family of statistics.

python -m tools.statistics_page    # prints the tables
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from te_precision_callbacks.statistics.table import (
    BLOCK_SOURCES,
    GEMM_SOURCES,
    STATISTICS,
    SYMBOLS_OF_GEMMS,
    Statistic,
    StatisticSource,
)

_GROUPS = (
    (
        "The tensor before quantization: `LogTensorStats`",
        (StatisticSource.TENSOR, StatisticSource.BLOCKS, StatisticSource.EXPONENTS),
    ),
    (
        "The quantized tensor: `LogFp8TensorStats` and `LogNvfp4TensorStats`",
        (StatisticSource.QUANTIZED, StatisticSource.SCALES),
    ),
    ("The same, block by block: only for recipes with a scale per block", tuple(BLOCK_SOURCES)),
    ("GEMMs: `LogGemmError`", GEMM_SOURCES),
)
"""The tables of docs/statistics.md: title and sources."""

_FAMILIES = (
    (r"(.*)_p\d+", r"\1_pN", r"percentile \d+", "percentile N (1, 10, 50, 90, 99)"),
    (r"(gemm_\w+)_[ab](%?)", r"\1_X\2", r"operand [AB]", "operand X"),
    (
        r"gemm_kernel_(?:row|column)_(?:first|last)",
        "gemm_kernel_{row,column}_{first,last}",
        r"first|last",
        "first or last",
    ),
    (r"gemm_kernel_rank_(?:first|last)", "gemm_kernel_rank_{first,last}", r"first|last", "first or last"),
    (r"gemm_kernel_(?:rows|columns)", "gemm_kernel_{rows,columns}", r"rows of|columns of", "rows or columns of"),
)
"""Statistics that share a row: pattern and placeholder of their names, and the part of their formulas that differs."""


def table() -> str:
    return "\n\n".join(f"**{title}**\n\n{_rows(sources)}" for title, sources in _GROUPS)


def _rows(sources: Iterable[StatisticSource]) -> str:
    lines = ["| statistic | formula | unit | worse | in TE 2.20 |", "|---|---|---|---|---|"]
    for s in STATISTICS.values():
        if s.source in sources:
            name, formula = _row_of(s)
            upstream = "yes" if s.upstream else ""
            lines.append(f"| `{name}` | {formula} | {s.unit} | {s.worse.value} | {upstream} |")
    return "\n".join(dict.fromkeys(lines))


def _row_of(statistic: Statistic) -> tuple[str, str]:
    """The name and the formula of a statistic in its row, with placeholders if others share the row."""
    name, formula = statistic.name, statistic.formula.removesuffix(SYMBOLS_OF_GEMMS).replace("|", "\\|")
    for pattern, placeholder, part, replaced in _FAMILIES:
        if re.fullmatch(pattern, name):
            formula = re.sub(part, replaced, formula, count=1)
            return re.sub(pattern, placeholder, name), re.sub(r"(?:row|column) of C", "row or column of C", formula)
    return name, formula


if __name__ == "__main__":
    print(table())
