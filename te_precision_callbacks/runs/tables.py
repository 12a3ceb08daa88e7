"""Arrow schemas of recorded runs, and reading and writing of Parquet files and possibly truncated Arrow streams.

Facts (:data:`LAYERS`, :data:`GEMMS`, :data:`OPERANDS`, :data:`STATES`, :data:`PLAN`) have a span of debug iterations,
``since`` to ``until`` inclusive; ``until`` is null while the fact holds. Rows are added, never overwritten.

Rows of values name their subject, so that other programs can read a file without this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.runs.run_files import CLOSED, MOST_ITERATION, OPEN, replace_whole
from te_precision_callbacks.statistics.series import FIRST_STEP

SCHEMA_VERSION = 4
"""Version of the schema; readers refuse other versions."""

_NAME = pa.dictionary(pa.int32(), pa.string())
_NAMES = pa.list_(pa.string())
_ITERATION = pa.int64()
_SPAN = [("since", _ITERATION), ("until", _ITERATION)]

SUBJECT = [("scope", _NAME), ("layer", _NAME), ("tensor", _NAME), ("gemm", _NAME), ("statistic", _NAME)]
"""Columns that identify a series. ``layer`` and ``tensor`` are empty for a value that a user's feature logged under its
own name; ``gemm`` is empty unless the value belongs to one GEMM."""

VALUES = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("series", pa.int32()),  # number within rank and segment; after reading, within the run
        ("value", pa.float64()),
        ("flags", pa.uint8()),  # LOCAL, STEP0, EXTREME
        *SUBJECT,
        ("rank", pa.int32()),  # null: reduced over ranks
    ]
)
"""Values of statistics. Rows of a closed file are sorted by series and iteration."""

LOCAL = 1
STEP0 = FIRST_STEP
EXTREME = 8
"""Flags of a value: LOCAL, it belongs to one rank although statistics are reduced; STEP0, it is from the layer's first
step of delayed scaling, with a scale of 1; EXTREME, its step was dropped, but it is an extreme of its series."""

VECTORS = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("series", pa.int32()),
        ("bin", pa.list_(pa.uint16())),  # indices of non-empty bins
        ("count", pa.list_(pa.float32())),
        *SUBJECT,
        ("rank", pa.int32()),
    ]
)
"""Histograms."""

STEPS = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("logging_step", pa.int64()),
        ("wall_time", pa.timestamp("us", tz="UTC")),
        ("step_seconds", pa.float64()),  # of all steps since the previous row; null in the first row
        ("observe_seconds", pa.float64()),  # spent by the session in session.step
        ("local", pa.bool_()),
        ("ranks", pa.int32()),
    ]
)
"""Debug iterations with records."""

SCALARS = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("logging_step", pa.int64()),
        ("name", pa.string()),  # loss, grad_norm, lr, loss_scale, or another name of the trainer
        ("value", pa.float64()),
    ]
)
"""Scalars that the trainer logs."""

EVENTS = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("rank", pa.int32()),
        ("phase", pa.string()),  # forward, backward, step, checkpoint
        ("kind", pa.string()),
        ("severity", pa.string()),  # info, warning, error
        ("wall_time", pa.timestamp("us", tz="UTC")),
        ("scope", pa.string()),
        ("layer", pa.string()),
        ("tensor", pa.string()),
        ("gemm", pa.string()),
        ("text", pa.string()),
        ("data", pa.string()),  # JSON
    ]
)
"""Events of the run, such as findings."""

LAYERS = pa.schema(
    [
        ("scope", pa.string()),
        ("layer", pa.string()),
        ("given", pa.string()),  # the script's name for the layer
        ("class", pa.string()),
        ("family", pa.string()),
        ("exec_fwd", pa.int64()),  # position of its first forward among all layers; null if not seen
        ("exec_bwd", pa.int64()),
        ("params", pa.int64()),
        ("weight_dtype", pa.string()),
        ("primary_weights", pa.string()),  # high, quantized
        ("refused", pa.string()),
        ("sections", _NAMES),
        *_SPAN,
    ]
)
"""Layers, with the sections of the config that select them."""

GEMMS = pa.schema(
    [
        ("gemm_id", pa.int32()),
        ("scope", pa.string()),
        ("layer", pa.string()),
        ("gemm", pa.string()),  # as Product.gemm
        ("family", pa.string()),
        ("backward", pa.bool_()),
        ("n", pa.int64()),
        ("m", pa.int64()),
        ("k", pa.int64()),
        ("batch", pa.int64()),
        ("calls", pa.int64()),  # per step
        ("macs", pa.int64()),  # per step
        ("mask_share", pa.float64()),  # as Product.mask_share
        ("order", pa.int64()),
        ("runs", pa.string()),  # seen, planned, never, uncounted
        ("not_run", pa.string()),
        ("precision", pa.string()),  # as Product.precision
        ("reason", pa.string()),  # name of a Reason; null in low precision
        ("reason_ref", pa.string()),
        ("recipe", pa.string()),
        *_SPAN,
    ]
)
"""Matrix products."""

OPERANDS = pa.schema(
    [
        ("gemm_id", pa.int32()),
        ("layer", pa.string()),
        ("gemm", pa.string()),
        ("tensor", pa.string()),
        ("format", pa.string()),  # as Product.operands: "FP8 E4M3"
        ("source", pa.string()),  # seen, planned
        *_SPAN,
    ]
)
"""Operands of matrix products."""

STATES = pa.schema([("subject", pa.string()), ("dtype", pa.string()), ("bytes", pa.int64()), ("count", pa.int64())])
"""Training state outside of GEMMs, by dtype (``base/vocabulary.py: SUBJECTS``)."""

PLAN = pa.schema(
    [
        ("section", pa.string()),
        ("file", pa.string()),
        ("line", pa.int32()),
        ("feature", pa.string()),
        ("layer", pa.string()),
        ("gemm", pa.string()),
        ("tensor", pa.string()),
        ("options", pa.string()),  # JSON
        *_SPAN,
    ]
)
"""Features of the config, by layer."""

FACTS: Mapping[str, pa.Schema] = {
    "layers": LAYERS,
    "gemms": GEMMS,
    "operands": OPERANDS,
    "states": STATES,
    "plan": PLAN,
}
"""Name of a table of facts -> schema. A segment has ``<name>.parquet``, which is replaced as a whole."""

SERIES = pa.schema(
    [
        ("series", pa.int32()),
        *SUBJECT,
        ("rank", pa.int32()),
        ("count", pa.int64()),  # values
        ("first", _ITERATION),
        ("last", _ITERATION),
        ("worst", pa.float64()),  # by the worse direction, or by magnitude; excludes the first step of delayed scaling
        ("worst_at", _ITERATION),
    ]
)
"""The series of a run that was read, with a summary of their values."""


def facts_at_end(facts: pa.Table) -> pa.Table:
    """Return the rows of a table of facts that hold at the end of the run."""
    return facts.filter(pc.is_null(facts["until"]))


UNREADABLE = (OSError, pa.ArrowException, ValueError, KeyError, OverflowError, MemoryError)
"""Exceptions of pyarrow for damaged or foreign files."""

_LIMITS = {"iteration": MOST_ITERATION, "since": MOST_ITERATION, "until": MOST_ITERATION, "series": 1 << 31}
"""Upper bounds of integers from 0 on that index the steps and series of a run."""

_NEVER_NULL = ("segment", "iteration", "series", "gemm_id")

_ROW_GROUP = 1 << 17
"""Rows per row group, the minimum that a reader of one series must read."""


def write_table(table: pa.Table, path: Path) -> int:
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


def part_of(schema: pa.Schema, columns: Sequence[str]) -> pa.Schema:
    return pa.schema(list(map(schema.field, columns)))


def read_table(path: Path, columns: Sequence[str], schema: pa.Schema, series: list[int] | None = None) -> pa.Table:
    """Read columns of a Parquet file, or of an Arrow stream up to its last complete batch.

    If the stream was closed since, its Parquet file is read.

    Raises:
        OSError, pyarrow.ArrowException, ValueError, KeyError: the file is damaged.
    """
    table = None
    if path.suffix == OPEN:
        try:
            table = _read_stream(regular_file(path), schema)
        except FileNotFoundError:
            path = path.with_suffix(CLOSED)
    if table is None and series is None:  # without what a filter needs: in less than half of the time
        table = pq.ParquetFile(regular_file(path), page_checksum_verification=True).read(list(columns))
    elif table is None:
        rows = pc.field("series").isin(series)
        table = pq.read_table(
            regular_file(path), columns=list(columns), filters=rows, partitioning=None, page_checksum_verification=True
        )
    wanted = part_of(schema, columns)
    table = table.select(columns).replace_schema_metadata(None)
    if not table.schema.equals(wanted):
        table = table.cast(wanted)
    _check_integers(table)
    if series is not None and path.suffix == OPEN:
        table = table.filter(pc.field("series").isin(series))
    return table.unify_dictionaries()


def _check_integers(table: pa.Table) -> None:
    for name in table.column_names:
        column = table[name]
        if name in _NEVER_NULL and column.null_count:
            raise ValueError(f"rows without {name}")
        limit = _LIMITS.get(name)
        if limit is None or not len(column):
            continue
        least, largest = pc.min_max(column).as_py().values()
        if least is not None and not 0 <= least <= largest < limit:
            raise ValueError(f"{name} from {least} to {largest}")


def _read_stream(path: Path, schema: pa.Schema) -> pa.Table:
    # Not memory-mapped: if another process truncated the file, this process would get SIGBUS.
    data = path.read_bytes()
    batches: list[pa.RecordBatch] = []
    try:
        with pa.ipc.open_stream(data) as stream:
            schema = stream.schema
            for batch in stream:
                batch.validate(full=True)
                batches.append(batch)
    except (pa.ArrowInvalid, OSError):
        pass  # the last batch is incomplete: the process was killed, or the disk was full
    return pa.Table.from_batches(batches, schema)
