"""Which rows of a table of a run can be used: those that have what they must have, within bounds."""

from __future__ import annotations

from collections.abc import Mapping

import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.runs.bounds import MOST_ITERATION

_NEEDED: Mapping[str, tuple[str, ...]] = {
    "values": ("iteration", "series", "value"),
    "vectors": ("iteration", "series", "bin", "count"),
    "steps": ("iteration",),
    "scalars": ("iteration", "name", "value"),
    "layers": ("layer",),
    "gemms": ("gemm_id", "layer", "gemm"),
    "operands": ("gemm_id", "tensor"),
    "states": (),
    "plan": (),
}
"""Table -> the columns that no row lacks."""

_ITERATIONS = ("iteration", "logging_step", "since", "until")
_COUNTS = (*("series", "layer_id", "gemm_id", "macs", "bytes", "params", "n", "m", "k", "batch", "calls", "count"),)
_LATEST = 1 << 52
"""The microseconds since 1970 at which times end, in the year 2112."""


def sound(table: pa.Table, name: str) -> pa.Table:
    """The rows of a table that can be used; a time that is none is null.

    Args:
        table: columns of it.
        name: its name.
    """
    wanted = []
    for column in table.schema:
        values = table[column.name]
        if column.name in _NEEDED[name]:
            wanted.append(pc.is_valid(values))
        if pa.types.is_timestamp(column.type):
            table = table.set_column(table.schema.get_field_index(column.name), column, _times(values))
        elif pa.types.is_integer(column.type) and column.name in (*_ITERATIONS, *_COUNTS):
            most = MOST_ITERATION if column.name in _ITERATIONS else None
            wanted.append(pc.fill_null(_within(values, most), True))
    if name == "vectors" and {"bin", "count"} <= set(table.column_names):
        lengths = (pc.list_value_length(table[column]) for column in ("bin", "count"))
        wanted.append(pc.fill_null(pc.equal(*lengths), False))
    every = None
    for mask in wanted:
        every = mask if every is None else pc.and_(every, mask)
    return table if every is None or pc.all(every, min_count=0).as_py() else table.filter(every)


def _within(values: pa.ChunkedArray, most: int | None) -> pa.ChunkedArray:
    found = pc.greater_equal(values, pa.scalar(0, values.type))
    if most is None or pa.types.is_int32(values.type):
        return found
    return pc.and_(found, pc.less(values, pa.scalar(most, values.type)))


def _times(values: pa.ChunkedArray) -> pa.ChunkedArray:
    numbers = pc.cast(values, pa.int64())
    good = pc.and_(pc.greater_equal(numbers, 0), pc.less(numbers, _LATEST))
    return pc.if_else(good, values, pa.scalar(None, values.type))
