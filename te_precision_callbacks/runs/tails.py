"""The tails of a run's tables: files that grow by batches of rows, and become sealed parts.

A tail becomes a sealed part when it has grown to :data:`SEAL_BYTES`, or after :data:`SEAL_SECONDS`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.runs.arrays import arrow_array
from te_precision_callbacks.runs.bounds import MOST_APPENDED, writable
from te_precision_callbacks.runs.parts import SealedPart, tail_bytes, write_sealed
from te_precision_callbacks.runs.run_files import SEALED, TAIL, AppendedFile, PartFile, part_stem
from te_precision_callbacks.runs.tables import SUBJECT

SEAL_BYTES = 64 << 20
"""The size of a tail at which it becomes a sealed part."""

SEAL_SECONDS = 900.0
"""The age of a tail at which it becomes a sealed part."""

_COLUMNS = tuple(name for name, _ in SUBJECT)


class _Names:
    """The texts of a dictionary-encoded column, by the code that each got when it was first seen."""

    def __init__(self) -> None:
        self._codes: dict[str | None, int | None] = {None: None}
        self._texts: list[str] = []
        self._array = arrow_array([], pa.string())

    def code(self, text: str | None) -> int | None:
        code = self._codes.get(text)
        if code is None and text is not None:
            code = self._codes[text] = len(self._texts)
            self._texts.append(writable(text))
        return code

    def encoded(self, codes: pa.Array) -> pa.DictionaryArray:
        if len(self._array) != len(self._texts):
            self._array = arrow_array(self._texts, pa.string())
        return pa.DictionaryArray.from_arrays(codes, self._array)


class Tail:
    """The newest rows of a table, in the file that becomes its next part.

    Args:
        folder: the folder of the rank.
        table: the name of the table.
        schema: its schema.
        sort_by: the columns by which the rows of a sealed part are sorted.
        sealed: gets the sealed parts.
        seal_bytes: the size of a tail at which it becomes a sealed part.
    """

    def __init__(
        self,
        folder: Path,
        table: str,
        schema: pa.Schema,
        sort_by: Sequence[str],
        sealed: list[SealedPart],
        seal_bytes: float,
    ) -> None:
        self._folder = folder
        self._table = table
        self._schema = schema
        self._sealed = sealed
        self._seal_bytes = seal_bytes
        self._sort_by = [(column, "ascending") for column in sort_by]
        self._number = 0
        self._file: AppendedFile | None = None
        self._stream: Any = None
        self._since = 0.0
        self._names: dict[str, _Names] = {
            column.name: _Names() for column in schema if pa.types.is_dictionary(column.type)
        }
        self._codes = np.empty((len(_COLUMNS), 0), np.int32)

    @property
    def waiting_bytes(self) -> int:
        """The bytes of the tail."""
        return 0 if self._file is None else self._file.nbytes

    @property
    def _stem(self) -> Path:
        return self._folder / part_stem(self._table, self._number)

    def subject_columns(
        self, subjects: Sequence[tuple[str, ...]], series: npt.NDArray[np.int32]
    ) -> list[pa.DictionaryArray]:
        """The columns that name the subjects of rows.

        Args:
            subjects: of each series.
            series: [rows].
        """
        more = len(subjects) - self._codes.shape[1]
        self._codes = np.c_[self._codes, np.full((len(_COLUMNS), more), -1, np.int32)]
        for number in np.unique(series[self._codes[0, series] < 0]).tolist():
            named = zip(_COLUMNS, subjects[number], strict=True)
            self._codes[:, number] = np.array([self._names[name].code(text) for name, text in named], np.int32)
        return [
            self._names[name].encoded(arrow_array(codes[series], pa.int32()))
            for name, codes in zip(_COLUMNS, self._codes, strict=True)
        ]

    def batch_of(self, rows: Sequence[Mapping[str, Any]]) -> pa.RecordBatch:
        """Rows as a batch of the table; a column that a row lacks is null."""
        arrays = []
        for field in self._schema:
            values = [row.get(field.name) for row in rows]
            names = self._names.get(field.name)
            if names is None:
                arrays.append(arrow_array(values, field.type))
            else:
                arrays.append(names.encoded(arrow_array([names.code(value) for value in values], pa.int32())))
        return pa.record_batch(arrays, schema=self._schema)

    def append(self, batch: pa.RecordBatch) -> None:
        """Append a batch, in pieces of the size that readers expect; the tail has them, whole, when this returns.

        Raises:
            OSError: it cannot be written.
        """
        rows = max(1, batch.num_rows * MOST_APPENDED // max(batch.nbytes, 1))
        for begin in range(0, batch.num_rows, rows):
            self._append(batch.slice(begin, rows))

    def _append(self, batch: pa.RecordBatch) -> None:
        if self._file is None or self._stream is None:
            self._number += 1
            self._file = AppendedFile(self._stem.with_suffix(TAIL), new=True)
            options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
            self._stream = pa.ipc.new_stream(self._file, self._schema, options=options)
            self._since = time.monotonic()
        self._stream.write_batch(batch)
        self._file.require_there()
        if self._file.nbytes >= min(SEAL_BYTES, self._seal_bytes):
            self.seal()

    def seal_if_old(self) -> None:
        """Seal the tail if it is older than :data:`SEAL_SECONDS`."""
        if self._file is not None and time.monotonic() - self._since >= SEAL_SECONDS:
            self.seal()

    def seal(self) -> None:
        """Make a sealed part of the tail, if there is one.

        Raises:
            OSError: it cannot be written; the tail remains.
        """
        if self._file is None:
            return
        written = self._file.nbytes
        self.leave()
        tail, sealed = self._stem.with_suffix(TAIL), self._stem.with_suffix(SEALED)
        data = tail_bytes(tail)
        if len(data) != written:
            raise OSError(f"{tail} was changed while it was written: it has {len(data):,} of {written:,} bytes")
        try:
            table = pa.ipc.open_stream(data).read_all().unify_dictionaries()
        except pa.ArrowInvalid as error:
            raise OSError(f"{tail} was changed while it was written: {error}") from error
        if self._sort_by:
            table = table.take(pc.sort_indices(table, sort_keys=self._sort_by))
        nbytes = write_sealed(table, sealed)
        self._sealed.append(SealedPart(PartFile(self._table, self._number, self._number, False, sealed), nbytes))
        tail.unlink()

    def leave(self) -> None:
        """Close the tail as it is."""
        if self._file is not None:
            # Without the stream's end mark, which would need room on a full disk; a reader takes the end of the file.
            self._file.close()
        self._file = self._stream = None
