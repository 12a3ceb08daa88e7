"""Writes the parts of a run, and reads them: sealed ones, thinned ones, and tails that end anywhere."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from te_precision_callbacks.runs.bounds import (
    MOST_FACTS,
    MOST_ITERATION,
    MOST_PART,
    MOST_TAIL,
    MOST_THINNED,
    open_regular,
    parse_json,
    require_regular,
)
from te_precision_callbacks.runs.run_files import PART_NAME, SEALED, TAIL, PartFile, replace_whole

UNREADABLE = (OSError, pa.ArrowException, ValueError, KeyError)
"""What pyarrow raises for a damaged or foreign file: of Arrow's exceptions some derive from the built-in ones."""

DROPPED = 0
"""The ``every`` of a stretch of which no step is left."""

EVERY = (1, 10, 100, DROPPED)
"""Level, as in ``runs/thinning.py`` -> every how many-th step its parts have."""

ROW_GROUP = 1 << 17
"""The rows of a row group: what a reader that looks for one series has to read at least."""

_STREAM = b"\xff\xff\xff\xff"
"""How a stream of Arrow begins."""

_KEY = b"te_precision_thinned"

_AT_ONCE = 64 << 20
"""The bytes of texts that are made of a file of facts at once."""


class Stretch(NamedTuple):
    """What a thinned part says of itself, in the metadata of its file.

    Attributes:
        every: every how many-th step is left; :data:`DROPPED` if none is.
        first, last: the iterations that its steps had before.
    """

    every: int
    first: int
    last: int


class SealedPart(NamedTuple):
    """A part that is complete.

    Attributes:
        file: its file.
        nbytes: the size of the file.
        level: how thin it is, see ``runs/thinning.py``.
    """

    file: PartFile
    nbytes: int
    level: int = 0


def write_sealed(table: pa.Table, path: Path) -> int:
    """Write a sealed part, whole or not at all, and return its size.

    Raises:
        OSError: it cannot be written.
    """
    names = [field.name for field in table.schema if pa.types.is_dictionary(field.type)]
    replace_whole(
        path,
        lambda file: pq.write_table(
            table, file, compression="zstd", use_dictionary=names, row_group_size=ROW_GROUP, version="2.6"
        ),
    )
    return path.stat().st_size


def with_stretch(table: pa.Table, stretch: Stretch) -> pa.Table:
    """A table whose file says that it was thinned."""
    return table.replace_schema_metadata({_KEY: json.dumps(stretch._asdict())})


def stretch_of(path: Path) -> Stretch | None:
    """What a thinned part says of itself; None of another part.

    Raises:
        OSError, pyarrow.ArrowException, ValueError, KeyError: it is damaged.
    """
    if path.suffix != SEALED:
        return None
    require_regular(path)
    found = (pq.read_schema(path).metadata or {}).get(_KEY)
    if found is None:
        return None
    told = parse_json(found)
    every, first, last = (told.get(name) for name in Stretch._fields)
    if not (every in EVERY and isinstance(first, int) and isinstance(last, int) and 0 <= first <= last):
        raise ValueError(f"what it says of its thinning is damaged: {told}")
    return Stretch(int(every), first, min(last, MOST_ITERATION - 1))


def read_part(path: Path, columns: Sequence[str], schema: pa.Schema, series: list[int] | None = None) -> pa.Table:
    """Columns of a sealed part, or of a tail to its last whole batch.

    Args:
        path: the part. A tail that was sealed meanwhile is read from there.
        columns: the columns.
        schema: has their types.
        series: the rows of these series alone; None for all.

    Raises:
        OSError, pyarrow.ArrowException, ValueError, KeyError: it is damaged, or has more rows than any part.
    """
    if path.suffix == TAIL:
        try:
            table = _read_tail(path, columns, schema)
        except FileNotFoundError:
            path = path.with_suffix(SEALED)
    if path.suffix == SEALED:
        names = [name for name in columns if pa.types.is_dictionary(schema.field(name).type)]
        with _opened(path, columns, schema, MOST_THINNED if _is_thinned(path) else MOST_PART, names) as file:
            is_small = _is_small(file)
            if is_small or series is None:
                table = file.read(list(columns), use_threads=not is_small)
        if series is not None and not is_small:
            chosen = pc.field("series").isin(series)
            table = pq.read_table(
                path, columns=list(columns), filters=chosen, partitioning=None, memory_map=True, read_dictionary=names
            )
            series = None
    table = _as(table, columns, schema)
    if series is not None:
        table = table.filter(pc.is_in(table["series"], pa.array(series, pa.int32())))
    return table.unify_dictionaries()


def _is_small(file: pq.ParquetFile) -> bool:
    """Whether a file is read whole in one thread: handing it to others, or scanning it, takes longer."""
    return bool(file.metadata.num_rows <= ROW_GROUP)


def read_facts(path: Path, schema: pa.Schema) -> pa.Table:
    """A table of facts.

    Raises:
        OSError, pyarrow.ArrowException, ValueError, KeyError: it is damaged, or larger than any.
    """
    with _opened(path, schema.names, schema, MOST_PART) as file:
        found: pq.FileMetaData = file.metadata
        if found.num_rows > MOST_FACTS:
            raise ValueError(f"it has {found.num_rows:,} rows; at most {MOST_FACTS:,} can be")
        groups = [found.row_group(number) for number in range(found.num_row_groups)]
        chunks = [group.column(place) for group in groups for place in range(group.num_columns)]
        # A text is no longer than the chunk that it is from, however many rows have it.
        longest = max((chunk.total_uncompressed_size for chunk in chunks), default=0)
        most, batches = MOST_PART, []
        rows = max(1, min(1 << 16, _AT_ONCE // max(longest, 1)))
        for batch in file.iter_batches(rows, columns=schema.names, use_threads=not _is_small(file)):
            most -= batch.nbytes
            if most < 0:
                raise ValueError(f"its rows take more than {MOST_PART:,} bytes")
            batches.append(batch)
        return _as(pa.Table.from_batches(batches, file.schema_arrow if not batches else None), schema.names, schema)


def _is_thinned(path: Path) -> bool:
    match = PART_NAME.fullmatch(path.name)
    return match is not None and match[3] is not None


def _as(table: pa.Table, columns: Sequence[str], schema: pa.Schema) -> pa.Table:
    """Columns of a table, of the types that a schema has for them."""
    wanted = pa.schema([schema.field(name) for name in columns])
    table = table.select(columns).replace_schema_metadata(None)
    return table if table.schema.equals(wanted) else table.cast(wanted)


@contextlib.contextmanager
def _opened(
    path: Path, columns: Sequence[str], schema: pa.Schema, most: int, names: Sequence[str] = ()
) -> Iterator[pq.ParquetFile]:
    """A file of Parquet whose columns fit, and whose rows take no more bytes in memory."""
    require_regular(path)
    with pq.ParquetFile(path, memory_map=True, read_dictionary=list(names)) as file:
        _require_types(file.schema_arrow, columns, schema)
        _require_rows(file.metadata.num_rows, columns, schema, most)
        nbytes = 0
        for number in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(number)
            for place in range(group.num_columns):
                chunk = group.column(place)
                if chunk.path_in_schema.partition(".")[0] in columns:
                    nbytes += chunk.num_values * _WIDTHS.get(chunk.physical_type, 8)
        if nbytes > most:
            raise ValueError(f"it promises {nbytes:,} bytes; no part has more than {most:,}")
        yield file


_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "FLOAT": 4, "BYTE_ARRAY": 4}
"""The bytes of a value of a type of Parquet; a text is the number of one in a dictionary."""


def _require_rows(rows: int, columns: Sequence[str], schema: pa.Schema, most: int) -> None:
    nbytes = rows * sum(_width(schema.field(name).type) for name in columns)
    if nbytes > most:
        raise ValueError(f"it has {rows:,} rows, which would take {nbytes:,} bytes; no part has more than {most:,}")


def _width(kind: pa.DataType) -> int:
    """The bytes that a value of a type has at least."""
    if pa.types.is_dictionary(kind):
        kind = kind.index_type
    return max(1, kind.bit_width // 8) if pa.types.is_primitive(kind) else 4


def _require_types(found: pa.Schema, columns: Sequence[str], schema: pa.Schema) -> None:
    """Raise ValueError if a column is missing, or not of a kind that can become its own."""
    missing = [name for name in columns if name not in found.names]
    if missing:
        raise ValueError(f"it is no part of a run: it has no {', '.join(missing)}")
    for name in columns:
        kind = found.field(name).type
        if not _fits(kind, schema.field(name).type):
            raise ValueError(f"it is no part of a run: its column {name} is of the type {kind}")


def _fits(kind: pa.DataType, wanted: pa.DataType) -> bool:
    if pa.types.is_null(kind):
        return True
    if pa.types.is_list(wanted):
        return bool(pa.types.is_list(kind)) and _fits(kind.value_type, wanted.value_type)
    if pa.types.is_dictionary(wanted) or pa.types.is_string(wanted):
        text = kind.value_type if pa.types.is_dictionary(kind) else kind
        return bool(pa.types.is_string(text) or pa.types.is_large_string(text))
    return bool(pa.types.is_primitive(kind))


def _read_tail(path: Path, columns: Sequence[str], schema: pa.Schema) -> pa.Table:
    """The whole batches of a tail, which may end anywhere; none of one that ends in its schema."""
    batches: list[pa.RecordBatch] = []
    data = tail_bytes(path)
    begin = data[: len(_STREAM)]
    if begin != _STREAM[: len(begin)]:
        raise ValueError("it is no stream of Arrow")
    found = schema
    if len(begin) == len(_STREAM):
        try:
            with pa.ipc.open_stream(data) as stream:
                found, rows = stream.schema, 0
                _require_types(found, columns, schema)
                for batch in stream:
                    rows += batch.num_rows
                    _require_rows(rows, columns, schema, MOST_PART)
                    batch.validate(full=True)
                    batches.append(batch)
        except (pa.ArrowInvalid, OSError):
            pass  # the process was killed, or the disk was full, in the middle of a batch
    return pa.Table.from_batches(batches, found)


def tail_bytes(path: Path) -> bytes:
    """What a tail has, in memory: a process that maps a file ends with SIGBUS where another one cuts it meanwhile.

    Raises:
        OSError: it cannot be read.
        ValueError: it is larger than any.
    """
    with open_regular(path) as file:
        nbytes = os.fstat(file.fileno()).st_size
        if nbytes > MOST_TAIL:
            raise ValueError(f"it has {nbytes:,} bytes; no tail has more than {MOST_TAIL:,}")
        return file.read(nbytes)
