"""Parsing of events.jsonl."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.runs.input_files import MOST_ITERATION, parse_json
from te_precision_callbacks.runs.tables import EVENTS

_AT_ONCE = 1 << 14

_FIRST, _LAST = datetime(1970, 1, 1, tzinfo=timezone.utc), datetime(2100, 1, 1, tzinfo=timezone.utc)


def event_row(line: bytes) -> dict[str, Any] | None:
    """Parse a line to a row of :data:`~te_precision_callbacks.runs.tables.EVENTS`; None if it is damaged."""
    try:
        read = parse_json(line)
        row = {column.name: _value(column, read.get(column.name)) for column in EVENTS}
    except (ValueError, TypeError, OverflowError):
        return None
    whole = row["iteration"] is not None and row["kind"] is not None and 0 <= row["iteration"] < MOST_ITERATION
    return row if whole else None


def _value(column: pa.Field, value: Any) -> Any:
    if value is None:
        return None
    if column.name == "wall_time":
        time = datetime.fromisoformat(value)
        time = time.replace(tzinfo=timezone.utc) if time.tzinfo is None else time
        if not _FIRST <= time < _LAST:
            raise ValueError("no time of a run")
        return time
    if not pa.types.is_integer(column.type):
        return str(value)
    number = int(value)
    if not -(1 << column.type.bit_width - 1) <= number < 1 << column.type.bit_width - 1:
        raise OverflowError("no number of its column")
    return number


def events_table(rows: Iterable[dict[str, Any]]) -> pa.Table:
    """Build the table of events, sorted by iteration and time."""
    left, tables = iter(rows), [EVENTS.empty_table()]
    while some := list(itertools.islice(left, _AT_ONCE)):
        tables.append(pa.Table.from_pylist(some, EVENTS))
    table = pa.concat_tables(tables).unify_dictionaries().combine_chunks()
    times = pc.fill_null(pc.cast(table["wall_time"], pa.int64()), 0).to_numpy()
    return table.take(pa.array(np.lexsort((times, table["iteration"].to_numpy()))))
