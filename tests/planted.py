"""A recorded run with a planted defect, which one rule finds."""

from pathlib import Path
from typing import Any

import numpy as np

from tests.compare.recorded import record

BAD = "blocks.3.fc"
"""The layer of :func:`defective` whose gradients are too small."""


def defective(path: Path, *, prefix: str = "", steps: int = 40, power: int = -18, **more: Any) -> Path:
    """Record a run of ten blocks; the gradients of one block differ from the others.

    Args:
        path: the log folder.
        prefix: prefix of all layers' names.
        steps: the steps.
        power: the gradients are multiplied by this power of two; 0 makes a healthy run.
        **more: as for :func:`tests.compare.recorded.record`.
    """
    draw = np.random.default_rng(0)
    results: dict[tuple[str, str, str], Any] = {}
    for name in (f"blocks.{number}.fc" for number in range(10)):
        for tensor, factor in (("activation", 1.0), ("gradient", 2.0**power if name == BAD else 1.0)):
            results[prefix + name, tensor, "std"] = factor * draw.uniform(0.9, 1.1, steps)
            results[prefix + name, tensor, "cur_amax"] = 4 * factor * draw.uniform(0.9, 1.1, steps)
            results[prefix + name, tensor, "nonfinite_num"] = np.zeros(steps)
    record(path, results, **more)
    return path
