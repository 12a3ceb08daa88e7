"""Curves of one line, for terminals: ``▁▁▂▂▃▅▇█``."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_BARS = "▁▂▃▄▅▆▇█"
_NONE, _NO_NUMBER = " ", "!"
_MANY_POWERS = 100.0
"""The factor between the largest and the smallest number from which on a curve is that of the logarithms."""

Floats = npt.NDArray[np.float64]


def sparkline(iterations: npt.NDArray[np.int64], values: Floats, width: int, *, low_is_worse: bool = False) -> str:
    """A curve over time, of at most ``width`` characters.

    Each character stands for equally many iterations, and shows the worst number among them, so that no peak is lost.
    Where there is none, it is a blank; where one is inf or nan, an exclamation mark.
    """
    if not len(values):
        return ""
    span = int(iterations[-1] - iterations[0]) + 1
    width = max(1, min(width, len(np.unique(iterations))))
    bucket = (iterations - iterations[0]) * width // span
    finite = np.isfinite(values)
    shown = np.full(width, np.inf if low_is_worse else -np.inf)
    (np.minimum if low_is_worse else np.maximum).at(shown, bucket[finite], values[finite])
    known = np.isfinite(shown)
    levels = np.zeros(width, np.int64)
    levels[known] = _levels(shown[known])
    text = [_BARS[level] if there else _NONE for level, there in zip(levels.tolist(), known.tolist(), strict=True)]
    for place in np.unique(bucket[~finite]).tolist():
        text[place] = _NO_NUMBER
    return "".join(text)


def _levels(values: Floats) -> npt.NDArray[np.int64]:
    if not len(values):
        return np.empty(0, np.int64)
    if values.min() > 0 and values.max() / values.min() > _MANY_POWERS:
        values = np.log(values)
    values = values / max(np.abs(values).max(), 1.0)  # so that no difference is beyond float64
    low, high = values.min(), values.max()
    shares = (values - low) / (high - low) if high > low else np.zeros(len(values))
    return np.rint(shares * (len(_BARS) - 1)).astype(np.int64)
