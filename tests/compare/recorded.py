"""Recorded runs from arrays."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs import RecordedRun, open_run
from tests.runs.making import RunWriter

Subject = tuple[str, str, str]
"""Layer, tensor, statistic."""
Values = Mapping[Subject, npt.NDArray[np.float64]]


def record(
    folder: Path,
    values: Values,
    *,
    order: Sequence[str] = (),
    scalars: Mapping[str, npt.NDArray[np.float64]] | None = None,
    gemms: Sequence[Mapping[str, Any]] = (),
    rank: int | None = None,
    first: int = 0,
    freq: int = 1,
    **facts: Any,
) -> RecordedRun:
    """Record a run.

    Args:
        folder: the log folder.
        values: the numbers of each series, one a step; a nan is no number.
        order: the layers in the order of their forwards.
        scalars: the trainer's numbers.
        gemms: rows of the table.
        rank: the rank with these local values.
        first, freq: the first step with numbers, and the steps from one to the next.
        **facts: of run.json.
    """
    with RunWriter.begin(folder, **facts) as run:
        append(run, values, rank=rank, first=first, freq=freq)
        for name, curve in (scalars or {}).items():
            for iteration, value in enumerate(curve.tolist()):
                run.add_scalars(first + iteration * freq, {name: value})
        places = [
            {"layer": name, "exec_fwd": n, "exec_bwd": len(order) - 1 - n, "since": 0} for n, name in enumerate(order)
        ]
        run.put_facts("layers", places)
        run.put_facts("gemms", [{"since": 0, **gemm} for gemm in gemms])
    return open_run(folder)


def append(run: RunWriter, values: Values, *, rank: int | None = None, first: int = 0, freq: int = 1) -> None:
    """Add numbers to a run. Takes the arguments of :func:`record`."""
    numbers = np.array([run.series(*subject, rank=rank) for subject in values], np.int32)
    table = np.stack(list(values.values())) if values else np.empty((0, 0))
    for step, column in enumerate(table.T):
        run.add_step(first + step * freq)
        there = ~np.isnan(column)
        run.add_values(first + step * freq, numbers[there], column[there])


def layers(count: int) -> list[str]:
    return [f"layers.{number}.fc" for number in range(count)]
