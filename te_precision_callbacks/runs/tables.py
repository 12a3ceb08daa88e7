"""Arrow schemas of recorded runs, and reading and writing of Parquet files and possibly truncated Arrow streams.

Facts (:data:`LAYERS`, :data:`GEMMS`, :data:`OPERANDS`, :data:`STATES`, :data:`PLAN`) have a span of debug iterations,
``since`` to ``until`` inclusive; ``until`` is null while the fact holds. Rows are added, never overwritten.

Rows of values name their subject, so that other programs can read a file without this package.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.runs.run_files import CLOSED, OPEN, replace_whole
from te_precision_callbacks.statistics.series import FIRST_STEP, MOST_ITERATION, Summaries, family_of

SCHEMA_VERSION = 4
"""Version of the schema; readers refuse other versions."""

_SHORT = pa.int16()
_INT = pa.int32()
_LONG = pa.int64()
_FLOAT = pa.float64()
_TEXT = pa.string()
_TIME = pa.timestamp("us", tz="UTC")
_NAME = pa.dictionary(_INT, _TEXT)
_NAMES = pa.list_(_TEXT)
_STEP = {"segment": _SHORT, "iteration": _LONG}
_SPAN = {"since": _LONG, "until": _LONG}

SUBJECT = {
    "scope": _NAME,
    "layer": _NAME,
    "tensor": _NAME,
    "gemm": _NAME,
    "statistic": _NAME,
    "rank": _INT,  # null: reduced over ranks
}
"""Columns that identify a series. ``layer`` and ``tensor`` are empty for a value that a user's feature logged under its
own name; ``gemm`` is empty unless the value belongs to one GEMM."""

VALUE_ROWS = pa.schema(
    {
        **_STEP,
        "series": _INT,  # number within rank and segment; after reading, within the run
        "value": _FLOAT,
        "flags": pa.uint8(),  # LOCAL, STEP0
    }
)
"""Rows of some series: the columns of :data:`VALUES` without the subject."""

VALUES = pa.schema([*VALUE_ROWS, *pa.schema(SUBJECT)])
"""Values of statistics. Rows of a closed file are sorted by series and iteration."""

LOCAL = 1
STEP0 = FIRST_STEP
"""Flags of a value: LOCAL, it belongs to one rank although statistics are reduced; STEP0, it is from the layer's first
step of delayed scaling, with a scale of 1."""

VECTOR_ROWS = pa.schema(
    {
        **_STEP,
        "series": _INT,
        "bin": pa.list_(pa.uint16()),  # indices of non-empty bins
        "count": pa.list_(pa.float32()),
    }
)
"""Rows of some series: the columns of :data:`VECTORS` without the subject."""

VECTORS = pa.schema([*VECTOR_ROWS, *pa.schema(SUBJECT)])
"""Histograms."""

STEPS = pa.schema(
    {
        **_STEP,
        "logging_step": _LONG,
        "wall_time": _TIME,
        "step_seconds": _FLOAT,  # of all steps since the previous row; null in the first row
        "observe_seconds": _FLOAT,  # spent by the session in session.step
        "local": pa.bool_(),
        "ranks": _INT,
    }
)
"""Debug iterations with records."""

SCALARS = pa.schema(
    {
        **_STEP,
        "logging_step": _LONG,
        "name": _TEXT,  # loss, grad_norm, lr, loss_scale, or another name of the trainer
        "value": _FLOAT,
    }
)
"""Scalars that the trainer logs."""

EVENTS = pa.schema(
    {
        **_STEP,
        "rank": _INT,
        "phase": _TEXT,  # forward, backward, step, checkpoint
        "kind": _TEXT,
        "severity": _TEXT,  # info, warning, error
        "wall_time": _TIME,
        "scope": _TEXT,
        "layer": _TEXT,
        "tensor": _TEXT,
        "gemm": _TEXT,
        "text": _TEXT,
        "data": _TEXT,  # JSON
    }
)
"""Events of the run, such as findings."""

TABLES: Mapping[str, pa.Schema] = {
    "steps": STEPS,
    "scalars": SCALARS,
    "events": EVENTS,
    "values": VALUES,
    "vectors": VECTORS,
}
"""Name of a table of rows -> schema. A rank has its own files of each."""

LAYERS = pa.schema(
    {
        "scope": _TEXT,
        "layer": _TEXT,
        "given": _TEXT,  # the script's name for the layer
        "class": _TEXT,
        "family": _TEXT,
        "exec_fwd": _LONG,  # position of its first forward among all layers; null if not seen
        "exec_bwd": _LONG,
        "params": _LONG,
        "weight_dtype": _TEXT,
        "primary_weights": _TEXT,  # high, quantized
        "refused": _TEXT,
        "sections": _NAMES,
        **_SPAN,
    }
)
"""Layers, with the sections of the config that select them."""

GEMMS = pa.schema(
    {
        "gemm_id": _INT,
        "scope": _TEXT,
        "layer": _TEXT,
        "gemm": _TEXT,  # as Product.gemm
        "family": _TEXT,
        "backward": pa.bool_(),
        "n": _LONG,
        "m": _LONG,
        "k": _LONG,
        "batch": _LONG,
        "calls": _LONG,  # per step
        "macs": _LONG,  # per step
        "order": _LONG,
        "runs": _TEXT,  # seen, planned, never, uncounted
        "not_run": _TEXT,
        "precision": _TEXT,  # as Product.precision
        "reason": _TEXT,  # name of a Reason; null in low precision
        "reason_ref": _TEXT,
        "recipe": _TEXT,
        **_SPAN,
    }
)
"""Matrix products."""

OPERANDS = pa.schema(
    {
        "gemm_id": _INT,
        "layer": _TEXT,
        "gemm": _TEXT,
        "tensor": _TEXT,
        "format": _TEXT,  # as Product.operands: "FP8 E4M3"
        "source": _TEXT,  # seen, planned
        **_SPAN,
    }
)
"""Operands of matrix products."""

STATES = pa.schema({"subject": _TEXT, "dtype": _TEXT, "bytes": _LONG, "count": _LONG})
"""Training state outside of GEMMs, by dtype (``base/vocabulary.py: SUBJECTS``)."""

PLAN = pa.schema(
    {
        "section": _TEXT,
        "file": _TEXT,
        "line": _INT,
        "feature": _TEXT,
        "layer": _TEXT,
        "gemm": _TEXT,
        "tensor": _TEXT,
        "options": _TEXT,  # JSON
        **_SPAN,
    }
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
    {
        "series": _INT,
        **SUBJECT,
        "count": _LONG,  # values
        "first": _LONG,
        "last": _LONG,
        "worst": _FLOAT,  # by the worse direction, or by magnitude; excludes the first step of delayed scaling
        "worst_at": _LONG,
    }
)
"""The series of a run that was read, with a summary of their values."""


def column(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Return ``pa.array(values, kind)`` for the types of these schemas, except dictionaries.

    ``pa.array`` imports pandas if it is installed, which takes half a second of a training's first steps.
    """
    if isinstance(values, np.ndarray):
        buffers = [None, pa.py_buffer(np.ascontiguousarray(values))]
        return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), buffers).cast(kind)
    if kind == _NAMES:
        ends = column(np.cumsum([0, *(len(names or ()) for names in values)]), _INT)
        missing = column([names is None for names in values], pa.bool_())
        names = [name for names in values for name in names or ()]
        return pa.ListArray.from_arrays(ends, column(names, _TEXT), mask=missing)
    # Through text, since it is the only builder; it has all digits.
    builder = pa.lib.StringBuilder()
    builder.append_values([None if value is None else str(value) for value in values])
    texts = builder.finish()
    if kind == _TIME:
        texts = texts.cast(_LONG)
    return texts.cast(kind)


def batch(schema: pa.Schema, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
    """Return rows as a batch; columns that a row lacks are null."""
    columns = [column([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.record_batch(columns, schema=schema)


def facts_at_end(facts: pa.Table) -> pa.Table:
    """Return the rows of a table of facts that hold at the end of the run."""
    return facts.filter(pc.is_null(facts["until"]))


UNREADABLE = (OSError, pa.ArrowException, ValueError, KeyError, OverflowError, MemoryError)
"""Exceptions of pyarrow for damaged or foreign files."""

_LIMITS = {
    "iteration": MOST_ITERATION,
    "since": MOST_ITERATION,
    "until": MOST_ITERATION,
    "series": 1 << 31,
    "gemm_id": 1 << 24,
}
"""Upper bounds of integers from 0 on that index the steps, series and GEMMs of a run."""

_NEVER_NULL = ("segment", "iteration", "series", "gemm_id")

_ROW_GROUP = 1 << 17
"""Rows per row group, the minimum that a reader of one series must read."""


def write_table(table: pa.Table, path: Path) -> None:
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


def read_table(path: Path, schema: pa.Schema, series: list[int] | None = None) -> pa.Table:
    """Read columns of a Parquet file, or of an Arrow stream up to its last complete batch.

    If the stream was closed since, its Parquet file is read.

    Raises:
        OSError, pyarrow.ArrowException, ValueError, KeyError: the file is damaged.
    """
    if path.suffix == OPEN:
        try:
            table = _read_stream(regular_file(path), schema)
        except FileNotFoundError:
            return read_table(path.with_suffix(CLOSED), schema, series)
    elif series is None:  # without what a filter needs: in less than half of the time
        table = pq.ParquetFile(regular_file(path), page_checksum_verification=True).read(schema.names)
    else:
        rows = pc.field("series").isin(series)
        table = pq.read_table(
            regular_file(path), columns=schema.names, filters=rows, partitioning=None, page_checksum_verification=True
        )
    table = table.select(schema.names).cast(schema)
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


# ---------------------------------------------------------------------- series

REDUCED = -1
"""Rank of values that are reduced over ranks."""


class Subject(NamedTuple):
    scope: str
    layer: str
    tensor: str
    gemm: str
    statistic: str
    rank: int | None


def subjects_of(table: pa.Table) -> Iterator[Subject]:
    columns = table.select(Subject._fields).to_pydict().values()
    for *names, rank in zip(*columns, strict=True):
        yield Subject._make((*(name or "" for name in names), rank))


class SeriesIndex(Summaries):
    """Numbers series from 0, and summarizes their values."""

    def __init__(self) -> None:
        super().__init__()
        self._numbers: dict[Subject, int] = {}

    def number(self, subjects: Iterable[Subject]) -> list[int]:
        numbers = [self._numbers.setdefault(subject, len(self._numbers)) for subject in subjects]
        new = itertools.islice(self._numbers, len(self.rows), None)
        self.grow([family_of(subject.tensor, subject.statistic, subject.gemm or None) for subject in new])
        return numbers

    def table(self) -> pa.Table:
        rows = self.rows
        nothing = rows["count"] == 0
        without_worst = rows["worst_at"] < 0
        columns = [pa.array(np.arange(len(rows), dtype=np.int32)), *subject_columns(self._numbers)]
        columns.append(pa.array(rows["count"]))
        columns += [pa.array(rows[name], mask=nothing) for name in ("first", "last")]
        columns += [pa.array(rows[name], mask=without_worst) for name in ("worst", "worst_at")]
        return pa.Table.from_arrays(columns, schema=SERIES)


def subject_columns(subjects: Collection[tuple[str | int | None, ...]]) -> list[pa.Array]:
    """Return a column for each field of :class:`Subject`. Dictionaries of names are in order of first appearance."""
    columns = []
    for place in range(len(Subject._fields) - 1):
        names = list(map(str, map(itemgetter(place), subjects)))
        columns.append(column(names, pa.string()).dictionary_encode())
    return [*columns, column([rank for *_, rank in subjects], pa.int32())]
