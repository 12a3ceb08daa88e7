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


@dataclass(frozen=True)
class PackedScale:
    """A scale that maps finite values to bytes between two limits.

    Attributes:
        kind: ``linear``; ``log`` for nonnegative values; ``asinh``, asinh(value / bend), for both signs.
        bend: an ``asinh`` scale is about linear below it.
        centred: whether the limits are the same on both sides of 0.
    """

    kind: Literal["linear", "log", "asinh"]
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
            positive = finite[finite > 0]
            least = float(positive.min()) if positive.size else high
            if least < _NARROW * high:
                return cls("log", least, high)
            return cls("linear", low, high)
        sizes = np.abs(finite[finite != 0])
        most, middle = (float(sizes.max()), float(np.median(sizes))) if sizes.size else (1.0, 1.0)
        if centred:
            low = -most
            high = most
        return cls("asinh" if middle < _FAR * most else "linear", low, high, middle, centred)

    def bytes(self, values: Floats, present: Mask) -> Bytes:
        finite = present & np.isfinite(values)
        inner = finite & (values > 0) if self.kind == "log" else finite
        low, high = self._transform(np.array([self.low, self.high]))
        width = high - low
        place = self._transform(np.where(inner, values, self.low))
        level = np.rint((place - low) / width * (LEVELS - 1)) if width > 0 else np.zeros(values.shape)
        codes = np.where(inner, np.clip(level, 0, LEVELS - 1) + 1, 0)
        codes = np.where(finite & ~inner, ZERO, codes)
        codes = np.where(present & np.isnan(values), NAN, codes)
        codes = np.where(present & np.isposinf(values), INF, codes)
        return np.where(present & np.isneginf(values), MINUS_INF, codes).astype(np.uint8)

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
    """The packed arrays of a page, within a budget of ``most`` characters."""

    most: int
    texts: list[str] = field(default_factory=list)
    size: int = 0
    _known: dict[str, int] = field(default_factory=dict)

    def put(self, values: npt.NDArray[Any]) -> dict[str, Any]:
        """Store an array, ignoring the budget; equal arrays are stored once. Returns the reference for the page."""
        return self._store(_pack(values), values)

    def try_put(self, *arrays: npt.NDArray[Any]) -> list[dict[str, Any]] | None:
        texts = [_pack(values) for values in arrays]
        if self.size + sum(len(text) for text in texts if text not in self._known) > self.most:
            return None
        return list(map(self._store, texts, arrays))

    def _store(self, text: str, values: npt.NDArray[Any]) -> dict[str, Any]:
        if text not in self._known:
            self._known[text] = len(self.texts)
            self.texts.append(text)
            self.size += len(text) + 1
        return {"id": self._known[text], "dtype": values.dtype.name, "shape": list(values.shape)}


def _pack(values: npt.NDArray[Any]) -> str:
    flat = np.ascontiguousarray(values).astype(values.dtype.newbyteorder("<"), copy=False)
    return compress(flat.reshape(-1).view(np.uint8).reshape(-1, flat.itemsize).T.tobytes())


def steps_between(iterations: Ints) -> npt.NDArray[np.int32]:
    return np.diff(iterations, prepend=0).astype(np.int32)


def narrow(values: Floats) -> npt.NDArray[Any]:
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    if np.array_equal(narrow.astype(np.float64), values, equal_nan=True):
        return narrow
    return values
