"""Reading and writing of tables: Parquet files, and Arrow streams that may be truncated."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from te_precision_callbacks.runs.run_files import CLOSED, OPEN, replace_whole

UNREADABLE = (OSError, pa.ArrowException, ValueError, KeyError, OverflowError)
"""Exceptions of pyarrow for damaged or foreign files."""

_ROW_GROUP = 1 << 17
"""Rows per row group: the least that a reader of one series has to read."""


def write_table(table: pa.Table, path: Path) -> int:
    """Write a Parquet file atomically, and return its size."""
    names = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
    replace_whole(
        path,
        lambda file: pq.write_table(
            table,
            file,
            compression="zstd",
            use_dictionary=names,
            row_group_size=_ROW_GROUP,
            version="2.6",
            write_page_checksum=True,
        ),
    )
    return path.stat().st_size


def read_table(path: Path, columns: Sequence[str], schema: pa.Schema, series: list[int] | None = None) -> pa.Table:
    """Read columns of a Parquet file, or of an Arrow stream up to its last whole batch; or the Parquet file of a stream
    that was closed since.

    Raises:
        OSError, pyarrow.ArrowException, ValueError, KeyError: it is damaged.
    """
    table = None
    if path.suffix == OPEN:
        try:
            table = _read_stream(path, schema)
        except FileNotFoundError:
            path = path.with_suffix(CLOSED)
    if table is None:
        rows = None if series is None else pc.field("series").isin(series)
        table = pq.read_table(
            path, columns=list(columns), filters=rows, partitioning=None, page_checksum_verification=True
        )
    wanted = pa.schema([schema.field(name) for name in columns])
    table = table.select(columns).replace_schema_metadata(None)
    if not table.schema.equals(wanted):
        table = table.cast(wanted)
    if series is not None and path.suffix == OPEN:
        table = table.filter(pc.field("series").isin(series))
    return table.unify_dictionaries()


def _read_stream(path: Path, schema: pa.Schema) -> pa.Table:
    # Not mapped: a process that maps a file gets SIGBUS where another one cuts it meanwhile.
    data = path.read_bytes()
    batches: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(data) as stream:
            schema = stream.schema
            for batch in stream:
                batch.validate(full=True)
                batches.append(batch)
    except (pa.ArrowInvalid, OSError):
        pass  # the process was killed, or the disk was full, in the middle of a batch
    return pa.Table.from_batches(batches, schema)
