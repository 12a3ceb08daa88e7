"""Packs arrays for a page, as base64 that the browser unpacks; a scale quantizes values to bytes.

The bytes of a number are stored in separate planes (all first bytes, then all second bytes), which compresses smooth
curves better.
"""

from __future__ import annotations

import base64
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask

Bytes = npt.NDArray[np.uint8]

LEVELS = 250
"""The bytes 1 to LEVELS are finite numbers."""

ZERO = 251
MINUS_INF = 252
INF = 253
NAN = 254
"""The bytes of what has no place on a scale; 0 is no number. ZERO is used by logarithmic scales only."""

_NARROW = 1e-3
"""Below this ratio of smallest to largest a scale is logarithmic."""

_FAR = 1e-2
"""Below this ratio of median to largest magnitude a scale for both signs is not linear."""


ScaleKind = Literal["linear", "log", "asinh"]


@dataclass(frozen=True)
class PackedScale:
    """A scale that maps finite values to bytes between two limits.

    Attributes:
        kind: ``linear``; ``log`` for nonnegative values; ``asinh``, asinh(value / bend), for both signs.
        bend: an ``asinh`` scale is about linear below it.
        centred: whether the limits are the same on both sides of 0.
    """

    kind: ScaleKind
    low: float
    high: float
    bend: float = 1.0
    centred: bool = False

    @classmethod
    def of(cls, values: Floats, *, centred: bool = False) -> PackedScale:
        """Choose a scale for some values: linear, unless they span several orders of magnitude."""
        finite = values[np.isfinite(values)]
        if not finite.size:
            return cls("linear", 0.0, 1.0)
        low = float(finite.min())
        high = float(finite.max())
        if low >= 0 and not centred:
            least = float(finite[finite > 0].min(initial=high))
            if least < _NARROW * high:
                return cls("log", least, high)
            return cls("linear", low, high)
        sizes = np.abs(finite[finite != 0]) if finite.any() else np.ones(1)
        most = float(sizes.max())
        middle = float(np.median(sizes))
        kind: ScaleKind = "asinh" if middle < _FAR * most else "linear"
        if centred:
            return cls(kind, -most, most, middle, centred)
        return cls(kind, low, high, middle)

    def bytes(self, values: Floats, present: Mask) -> Bytes:
        on_scale = values > 0 if self.kind == "log" else np.isfinite(values)
        low, high = self._transform(np.array([self.low, self.high]))
        shares = (self._transform(np.where(on_scale, values, self.low)) - low) / ((high - low) or 1.0)
        levels = 1 + np.rint(shares.clip(0, 1) * (LEVELS - 1))
        cases = (~present, np.isnan(values), np.isposinf(values), np.isneginf(values), ~on_scale)
        return np.select(cases, (0, NAN, INF, MINUS_INF, ZERO), levels).astype(np.uint8)

    def _transform(self, values: Floats) -> Floats:
        if self.kind == "log":
            return np.asarray(np.log(values))
        if self.kind == "linear":
            return values
        return np.asarray(np.arcsinh(values / self.bend))


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
