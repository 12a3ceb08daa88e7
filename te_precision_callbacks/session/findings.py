"""The results of a run, readable during the run and after it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from te_precision_callbacks.records.model import LayerInfo, Row
from te_precision_callbacks.records.precision import Precision
from te_precision_callbacks.records.worst import RunStatistics, Worst
from te_precision_callbacks.session.precision import PrecisionAudit
from te_precision_callbacks.statistics.series import SeriesTable


@dataclass
class Findings:
    """The results of a run that an ``InspectSession`` shows under the same names.

    Attributes:
        log_dir: the folder of the session's files.
        iteration: the current debug iteration; after the end, the first iteration that was not run.
        started_at: the place in the script that started the session; empty before the start.
        layers: every layer of the model that can be observed, and what the config does with it.
        unconverted: layers that a trainer left without Transformer Engine: name -> why.
        changes_precision: whether a feature in the config can change what a GEMM gets.
        audit: the precision in which each GEMM really ran.
        series: the series of the numbers.
        statistics: the last and the worst numbers.
    """

    log_dir: Path
    iteration: int
    started_at: str = ""
    layers: tuple[LayerInfo, ...] = ()
    unconverted: Mapping[str, str] = field(default_factory=dict)
    changes_precision: bool = False
    audit: PrecisionAudit = field(default_factory=PrecisionAudit)
    series: SeriesTable = field(default_factory=SeriesTable)
    statistics: RunStatistics = field(init=False)

    def __post_init__(self) -> None:
        self.statistics = RunStatistics(self.series)

    @property
    def precision(self) -> Precision:
        """The precision that each GEMM really ran in, so far, and in each iteration."""
        return Precision(self.audit, self.audit.at)

    @property
    def last_statistics(self) -> tuple[Row, ...]:
        """The last value of each statistic."""
        return tuple(self.statistics.last())

    @property
    def worst_statistics(self) -> tuple[Worst, ...]:
        """The worst value of each statistic so far, and the iteration in which it was."""
        return tuple(self.statistics.worst())
