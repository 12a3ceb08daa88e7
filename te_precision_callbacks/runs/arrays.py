"""Arrow arrays from Python and numpy values, without pandas.

``pyarrow.array`` imports pandas where it is installed (pyarrow 26, ``array.pxi: _is_array_like``), which blocks the
training thread for a second through the interpreter's lock.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

_NUMBERS = {
    **{pa.from_numpy_dtype(name): np.dtype(name) for name in ("int16", "int32", "int64", "uint8", "uint16")},
    **{pa.from_numpy_dtype(name): np.dtype(name) for name in ("float32", "float64")},
    pa.timestamp("us", tz="UTC"): np.dtype("int64"),
}


def arrow_array(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """Convert like ``pyarrow.array(values, kind)``, for types of run tables; times are microseconds since 1970."""
    valid = None
    if not isinstance(values, np.ndarray):
        present = [value is not None for value in values]
        valid = None if all(present) else _bits(present)
    if pa.types.is_list(kind):
        lists = [value or () for value in values]
        children = [arrow_array([*itertools.chain(*lists)], kind.value_type)]
        return pa.Array.from_buffers(kind, len(values), [valid, _offsets(lists)], children=children)
    if pa.types.is_string(kind):
        texts = [b"" if text is None else text.encode() for text in values]
        return pa.Array.from_buffers(kind, len(values), [valid, _offsets(texts), pa.py_buffer(b"".join(texts))])
    if pa.types.is_boolean(kind):
        return pa.Array.from_buffers(kind, len(values), [valid, _bits(values)])
    numbers = values if valid is None else [0 if value is None else value for value in values]
    data = np.ascontiguousarray(numbers, _NUMBERS[kind])
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(data)])


def _bits(values: Sequence[Any] | npt.NDArray[Any]) -> pa.Buffer:
    return pa.py_buffer(np.packbits(np.array(values, np.bool_), bitorder="little"))


def _offsets(parts: Sequence[Sequence[Any]]) -> pa.Buffer:
    return pa.py_buffer(np.array([0, *itertools.accumulate(map(len, parts))], np.int32))
