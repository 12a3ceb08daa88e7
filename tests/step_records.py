"""Records of a step, made from rows."""

from array import array
from collections.abc import Iterable, Mapping

import numpy as np

from te_precision_callbacks.sinks import Row, StepRecords
from te_precision_callbacks.statistics.series import SeriesTable


def records_from_rows(
    iteration: int,
    logging_step: int,
    rows: Iterable[Row],
    *,
    vectors: Mapping[tuple[str, str, str], tuple[float, ...]] | None = None,
    local: bool = False,
    own: Iterable[bool] | None = None,
    table: SeriesTable | None = None,
) -> StepRecords:
    """Rows in their order, and histograms by layer, tensor and statistic; by default all belong to this rank alone."""
    table = SeriesTable() if table is None else table
    rows = list(rows)
    series = [table.intern(row.layer, row.tensor, row.statistic) for row in rows]
    return StepRecords(
        iteration=iteration,
        logging_step=logging_step,
        table=table,
        series=np.array(series, dtype=np.int32),
        values=array("d", (row.value for row in rows)),
        histograms={table.intern(*name): counts for name, counts in (vectors or {}).items()},
        local=local,
        own=(True,) * len(rows) if own is None else tuple(own),
    )
