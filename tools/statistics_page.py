"""The tables of docs/statistics.md: one row per statistic.

python -m tools.statistics_page    # prints the tables
"""

from __future__ import annotations

from collections.abc import Iterable

from te_precision_callbacks.statistics.table import (
    BLOCK_SOURCES,
    GEMM_SOURCES,
    STATISTICS,
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


def table() -> str:
    return "\n\n".join(f"**{title}**\n\n{_rows(sources)}" for title, sources in _GROUPS)


def _rows(sources: Iterable[StatisticSource]) -> str:
    lines = ["| statistic | formula | unit | worse | in TE 2.20 |", "|---|---|---|---|---|"]
    for s in STATISTICS.values():
        if s.source in sources:
            formula = s.formula.replace("|", "\\|")
            upstream = "yes" if s.upstream else ""
            lines.append(f"| `{s.name}` | {formula} | {s.unit} | {s.worse.value} | {upstream} |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
