"""Packs arrays for a page, as base64 that the browser unpacks.

The bytes of a number are stored in separate planes (all first bytes, then all second bytes), which compresses smooth
curves better.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.statistics.arrays import Floats, Ints


def bfloat16(values: Floats) -> npt.NDArray[np.uint16]:
    """The upper halves of float32 numbers: three digits. They are rounded, by adding half of the last bit."""
    with np.errstate(over="ignore"):
        rounded = (values * (1 + 2.0**-9)).astype(np.float32)
    return (rounded.view(np.uint32) >> 16).astype(np.uint16)


def compress(data: bytes) -> str:
    return base64.b64encode(zlib.compress(data, 6)).decode()


@dataclass
class PackedArrays:
    """The packed arrays of a page, within a budget of ``most`` characters. Equal arrays are stored once."""

    most: int
    size: int = 0
    _numbers: dict[str, int] = field(default_factory=dict)

    @property
    def texts(self) -> list[str]:
        return list(self._numbers)

    def put(self, values: npt.NDArray[Any]) -> dict[str, Any]:
        """Store an array, ignoring the budget. Returns the reference for the page."""
        values = _narrow(values)
        return self._store(_pack(values), values)

    def try_put(self, *arrays: npt.NDArray[Any]) -> list[dict[str, Any]] | None:
        """Store arrays if all of them are within the budget."""
        narrow = list(map(_narrow, arrays))
        texts = list(map(_pack, narrow))
        if self.size + sum(len(text) for text in texts if text not in self._numbers) > self.most:
            return None
        return list(map(self._store, texts, narrow))

    def try_put_curve(self, iterations: Ints, *columns: Floats) -> list[dict[str, Any]] | None:
        """Store columns over iterations, which are stored as the first one and the steps between them."""
        return self.try_put(np.diff(iterations, prepend=0).astype(np.int32), *columns)

    def _store(self, text: str, values: npt.NDArray[Any]) -> dict[str, Any]:
        if text not in self._numbers:
            self._numbers[text] = len(self._numbers)
            self.size += len(text) + 1
        return {"id": self._numbers[text], "dtype": values.dtype.name, "shape": values.shape}


def _pack(values: npt.NDArray[Any]) -> str:
    flat = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return compress(flat.reshape(-1).view(np.uint8).reshape(-1, flat.itemsize).T.tobytes())


def _narrow(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return float64 values as float32 if that changes none of them."""
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if values.dtype == np.float64 and np.array_equal(narrow, values, equal_nan=True):
        return narrow
    return values
