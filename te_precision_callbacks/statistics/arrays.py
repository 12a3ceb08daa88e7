"""Types of NumPy arrays, and reductions of small ones."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

holds_any = np.logical_or.reduce
largest = np.maximum.reduce
smallest = np.minimum.reduce
total = np.add.reduce
"""These do what ``any()``, ``max()`` and ``sum()`` do, without a call of a Python function."""
