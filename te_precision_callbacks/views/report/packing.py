"""Packs arrays for a page, as base64 that the browser unpacks.

The bytes of a number are stored in separate planes (all first bytes, then all second bytes), which compresses smooth
curves better.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from itertools import starmap
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
        return self._store(*_pack(values))

    def try_put(self, *arrays: npt.NDArray[Any]) -> list[dict[str, Any]] | None:
        """Store arrays if all of them are within the budget."""
        packed = list(map(_pack, arrays))
        if self.size + sum(len(text) for text, _ in packed if text not in self._numbers) > self.most:
            return None
        return list(starmap(self._store, packed))

    def try_put_curve(self, iterations: Ints, *columns: Floats) -> list[dict[str, Any]] | None:
        """Store columns over iterations, which are stored as the first one and the steps between them."""
        return self.try_put(np.diff(iterations, prepend=0).astype(np.int32), *columns)

    def _store(self, text: str, layout: dict[str, Any]) -> dict[str, Any]:
        if text not in self._numbers:
            self._numbers[text] = len(self._numbers)
            self.size += len(text) + 1
        return {"id": self._numbers[text], **layout}


def _pack(values: npt.NDArray[Any]) -> tuple[str, dict[str, Any]]:
    """Return the text of an array, and its layout. Float64 values become float32 if that changes none of them."""
    if values.dtype == np.float64:
        with np.errstate(over="ignore"):
            narrow = values.astype(np.float32)
        if np.array_equal(narrow, values, equal_nan=True):
            values = narrow
    flat = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    text = compress(flat.reshape(-1).view(np.uint8).reshape(-1, flat.itemsize).T.tobytes())
    return text, {"dtype": values.dtype.name, "shape": values.shape}
