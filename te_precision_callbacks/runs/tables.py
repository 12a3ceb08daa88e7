"""The tables of recorded runs, as Arrow schemas; Parquet files, and Arrow streams that may be truncated.

Facts (:data:`LAYERS`, :data:`GEMMS`, :data:`OPERANDS`, :data:`STATES`, :data:`PLAN`) have a span: ``since`` and
``until`` are debug iterations, both included; ``until`` is null while the fact holds. Nothing of them is overwritten.

Rows of values name their subject, so that other programs read a file without this package.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from te_precision_callbacks.runs.run_files import CLOSED, OPEN, replace_whole
from te_precision_callbacks.statistics.series import FIRST_STEP

SCHEMA_VERSION = 3
"""The version of the files. A reader refuses files of any other version."""

_NAME = pa.dictionary(pa.int32(), pa.string())
_NAMES = pa.list_(pa.string())
_ITERATION = pa.int64()
_SPAN = [("since", _ITERATION), ("until", _ITERATION)]

SUBJECT = [("scope", _NAME), ("layer", _NAME), ("tensor", _NAME), ("gemm", _NAME), ("statistic", _NAME)]
"""What a number says something about: a statistic of a tensor of a layer. ``layer`` and ``tensor`` are empty for a
number that a user's feature logged under a free name; ``gemm`` is empty unless the number belongs to one GEMM."""

VALUES = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("series", pa.int32()),  # of this rank and segment; in a run that is read, of the run
        ("value", pa.float64()),
        ("flags", pa.uint8()),  # LOCAL, STEP0, EXTREME
        *SUBJECT,
        ("rank", pa.int32()),  # null: reduced over ranks
    ]
)
"""A number of a step. In a closed file rows are sorted by series and iteration."""

LOCAL, STEP0, EXTREME = 1, FIRST_STEP, 8
"""Flags of a value: it belongs to one rank although statistics are reduced; its layer ran the first step of delayed
scaling, with the scale 1; its step was thinned out, and it remains as an extreme of its series."""

VECTORS = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("series", pa.int32()),
        ("bin", pa.list_(pa.uint16())),  # sparse: the bins that are not empty
        ("count", pa.list_(pa.float32())),
        *SUBJECT,
        ("rank", pa.int32()),
    ]
)
"""A histogram of a step."""

STEPS = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("logging_step", pa.int64()),
        ("wall_time", pa.timestamp("us", tz="UTC")),
        ("step_seconds", pa.float64()),  # since the records before; null in the first ones
        ("observe_seconds", pa.float64()),  # spent by the session in session.step
        ("local", pa.bool_()),
        ("ranks", pa.int32()),
    ]
)
"""A debug iteration that had records."""

SCALARS = pa.schema(
    [
        ("segment", pa.int16()),
        ("iteration", _ITERATION),
        ("logging_step", pa.int64()),
        ("name", pa.string()),  # loss, grad_norm, lr, loss_scale, or the trainer's own name
        ("value", pa.float64()),
    ]
)
"""A number that the trainer logs."""

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
"""Something that happened."""

LAYERS = pa.schema(
    [
        ("scope", pa.string()),
        ("layer", pa.string()),
        ("given", pa.string()),  # the name that the script has given to it
        ("class", pa.string()),
        ("family", pa.string()),
        ("exec_fwd", pa.int64()),  # the place of its first forward among those of all layers; null: not seen
        ("exec_bwd", pa.int64()),
        ("params", pa.int64()),
        ("weight_dtype", pa.string()),
        ("primary_weights", pa.string()),  # high, quantized
        ("refused", pa.string()),
        ("sections", _NAMES),
        *_SPAN,
    ]
)
"""A layer, and what the config does with it."""

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
        ("calls", pa.int64()),  # a step
        ("macs", pa.int64()),  # a step
        ("mask_share", pa.float64()),  # as Product.mask_share
        ("order", pa.int64()),
        ("runs", pa.string()),  # seen, planned, never, uncounted
        ("not_run", pa.string()),
        ("precision", pa.string()),  # as Product.precision
        ("reason", pa.string()),  # the name of a Reason; null: low precision
        ("reason_ref", pa.string()),
        ("recipe", pa.string()),
        *_SPAN,
    ]
)
"""A matrix product of a layer."""

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
"""An operand of a matrix product."""

STATES = pa.schema([("subject", pa.string()), ("dtype", pa.string()), ("bytes", pa.int64()), ("count", pa.int64())])
"""What is kept in which type outside of GEMMs, as records.state has it."""

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
"""What a feature of the config does with a layer."""

FACTS: Mapping[str, pa.Schema] = {
    "layers": LAYERS,
    "gemms": GEMMS,
    "operands": OPERANDS,
    "states": STATES,
    "plan": PLAN,
}
"""The files of facts, ``<name>.parquet``, of a segment. They are replaced whole."""

SERIES = pa.schema(
    [
        ("series", pa.int32()),
        *SUBJECT,
        ("rank", pa.int32()),
        ("count", pa.int64()),  # values
        ("first", _ITERATION),
        ("last", _ITERATION),
        ("worst", pa.float64()),  # in the direction that is worse, or by size; without delayed scaling's first step
        ("worst_at", _ITERATION),
    ]
)
"""A statistic of one subject in a run that is read, with what its values span."""


def at_the_end(facts: pa.Table) -> pa.Table:
    """The rows of a table of facts that hold at the end of the run."""
    return facts.filter(pc.is_null(facts["until"]))


UNREADABLE = (OSError, pa.ArrowException, ValueError, KeyError, OverflowError)
"""Exceptions of pyarrow for damaged or foreign files."""

_ROW_GROUP = 1 << 17
"""Rows per row group: the least that a reader of one series has to read."""


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
