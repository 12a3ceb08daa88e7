"""The histograms of a run, over few columns of time."""

from __future__ import annotations

from collections.abc import Collection, Iterator

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.statistics.table import EXPONENT_COLUMNS
from te_precision_callbacks.views.report.overview import Columns, pieces
from te_precision_callbacks.views.report.subjects import FamilySeries

Floats = npt.NDArray[np.float64]

_MOST_HISTOGRAMS_AT_ONCE = 20_000


def histograms(
    run: RecordedRun, of: FamilySeries, columns: Columns, wanted: Collection[int] | None = None
) -> Iterator[tuple[int, Columns, int, Floats]]:
    """The histograms of a family, layer by layer, added up over the steps of each column.

    Yields:
        The place of the series in the family, the columns with a histogram, the first bin with a count in any column,
            and the counts from it on: [columns, bins].
    """
    bins = len(EXPONENT_COLUMNS)
    order = [
        place for place in np.argsort(of.layer, kind="stable") if wanted is None or int(of.series[place]) in wanted
    ]
    for piece in pieces(of.count[order], _MOST_HISTOGRAMS_AT_ONCE):
        chosen = order[piece]
        table = run.vectors(of.series[chosen].tolist())
        series = table["series"].to_numpy()
        iterations = table["iteration"].to_numpy()
        bin_lists, count_lists = table["bin"].combine_chunks(), table["count"].combine_chunks()
        offsets = bin_lists.offsets.to_numpy()
        all_bins, all_counts = bin_lists.values.to_numpy(), count_lists.values.to_numpy()
        for place in chosen:
            rows = np.flatnonzero(series == of.series[place])
            if not rows.size:
                continue
            begin, end = offsets[rows[0]], offsets[rows[-1] + 1]
            column = np.repeat(columns.column_of(iterations[rows]), np.diff(offsets[rows[0] : rows[-1] + 2]))
            cell = column * bins + all_bins[begin:end].astype(np.int64)
            counts: Floats = (
                np.bincount(cell, all_counts[begin:end], len(columns) * bins).reshape(-1, bins).astype(np.float64)
            )
            used = np.unique(columns.column_of(iterations[rows]))
            counts = counts[used]
            filled = np.flatnonzero(counts.any(0))
            low, high = (int(filled[0]), int(filled[-1]) + 1) if filled.size else (0, 1)
            yield int(place), columns.take(used), low, counts[:, low:high]
