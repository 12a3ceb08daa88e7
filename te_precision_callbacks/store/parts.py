"""Writes the parts of a run, and reads them: sealed ones, thinned ones, and tails that end anywhere."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from te_precision_callbacks.store.files import SEALED, TAIL, PartFile, replace_whole

UNREADABLE = (OSError, pa.ArrowException, ValueError, KeyError)
"""What pyarrow raises for a damaged or foreign file: of Arrow's exceptions some derive from the built-in ones."""

DROPPED = 0
"""The ``every`` of a stretch of which no step is left."""

ROW_GROUP = 1 << 17
"""The rows of a row group: what a reader that looks for one series has to read at least."""

_STREAM = b"\xff\xff\xff\xff"
"""How a stream of Arrow begins."""

_KEY = b"te_precision_thinned"


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
        level: how thin it is, see ``store/thinning.py``.
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
    found = (pq.read_schema(path).metadata or {}).get(_KEY)
    told: dict[str, Any] = {} if found is None else json.loads(found)
    return Stretch(int(told["every"]), int(told["first"]), int(told["last"])) if told else None


def read_part(path: Path, columns: Sequence[str], schema: pa.Schema, series: list[int] | None = None) -> pa.Table:
    """Columns of a sealed part, or of a tail to its last whole batch.

    Args:
        path: the part. A tail that was sealed meanwhile is read from there.
        columns: the columns.
        schema: has their types.
        series: the rows of these series alone; None for all.
    """
    if path.suffix == TAIL:
        try:
            table = _read_tail(path, schema)
        except FileNotFoundError:
            path = path.with_suffix(SEALED)
    if path.suffix == SEALED:
        chosen = None if series is None else pc.field("series").isin(series)
        table = pq.read_table(path, columns=list(columns), filters=chosen, partitioning=None, memory_map=True)
    elif series is not None:
        table = table.filter(pc.is_in(table["series"], pa.array(series, pa.int32())))
    missing = [name for name in columns if name not in table.column_names]
    if missing:
        raise ValueError(f"it is no part of a run: it has no {', '.join(missing)}")
    wanted = pa.schema([schema.field(name) for name in columns])
    table = table.select(columns).replace_schema_metadata(None)
    return (table if table.schema.equals(wanted) else table.cast(wanted)).unify_dictionaries()


def _read_tail(path: Path, schema: pa.Schema) -> pa.Table:
    """The whole batches of a tail, which may end anywhere; none of one that ends in its schema."""
    batches = []
    with path.open("rb") as file:
        begin = file.read(len(_STREAM))
    if begin != _STREAM[: len(begin)]:
        raise ValueError("it is no stream of Arrow")
    if len(begin) == len(_STREAM):
        with pa.memory_map(str(path)) as source:
            try:
                with pa.ipc.open_stream(source) as stream:
                    schema = stream.schema
                    for batch in stream:
                        batch.validate(full=True)
                        batches.append(batch)
            except (pa.ArrowInvalid, OSError):
                pass  # the process was killed, or the disk was full, in the middle of a batch
    return pa.Table.from_batches(batches, schema)
