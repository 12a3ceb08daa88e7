"""Runs that are written without a session, and a process that writes one until it is killed."""

from __future__ import annotations

import json
import sys
import time
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.runs import writing
from te_precision_callbacks.runs.run_files import FOLDER, make_segment, new_run_id
from te_precision_callbacks.runs.tables import Subject
from te_precision_callbacks.sinks.step_records import RunInfo, StepRecords
from te_precision_callbacks.statistics.series import SeriesTable

LAYERS = ("net.0", "net.1")


class RunWriter(writing.RunWriter):
    """Writes a segment of a new run, or of the run ``run_id``; ``facts`` are for run.json."""

    @classmethod
    def begin(cls, log_dir: str | Path, *, run_id: str | None = None, rank: int = 0, **facts: Any) -> RunWriter:
        run_folder = Path(log_dir) / FOLDER / (run_id or new_run_id())
        writer = cls(run_folder, make_segment(run_folder), rank)
        writer.put_run(**{"first_iteration": 0, "world": 1, **facts})
        return writer

    def series(
        self,
        layer: str,
        tensor: str,
        statistic: str,
        *,
        gemm: str = "",
        scope: str = "",
        rank: int | None = None,
    ) -> int:
        """The number of a series, which may be new."""
        subject = Subject(scope, layer, tensor, gemm, statistic, rank)
        if subject not in self.subjects:
            self.subjects.append(subject)
        return self.subjects.index(subject)

    def add_step(self, iteration: int) -> None:
        self.add("steps", [{"iteration": iteration, "logging_step": iteration, "wall_time": round(time.time() * 1e6),
                            "local": False, "ranks": 1}])  # fmt: skip

    def add_values(
        self,
        iteration: int,
        series: npt.NDArray[np.int32],
        values: npt.NDArray[np.floating[Any]],
        flags: npt.NDArray[np.uint8] | None = None,
    ) -> None:
        flags = np.zeros(len(series), np.uint8) if flags is None else flags
        super().add_values(iteration, series, np.asarray(values, np.float64), flags)

    def add_vector(self, iteration: int, series: int, counts: Sequence[float]) -> None:
        self.add_vectors(iteration, {series: counts})

    def add_scalars(self, iteration: int, scalars: Mapping[str, float]) -> None:
        self.add("scalars", [{"iteration": iteration, "logging_step": iteration, "name": name, "value": value}
                             for name, value in scalars.items()])  # fmt: skip

    def add_event(
        self,
        kind: str,
        text: str,
        *,
        iteration: int,
        severity: str = "info",
        wall_time: float | None = None,
        data: Mapping[str, Any] | None = None,
        **subject: str,
    ) -> None:
        microseconds = round((time.time() if wall_time is None else wall_time) * 1e6)
        self.add("events", [{"iteration": iteration, "rank": self.rank, "kind": kind, "severity": severity,
                             "wall_time": microseconds, "text": text,
                             "data": None if data is None else json.dumps(data, default=str), **subject}])  # fmt: skip

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.close("ended" if error is None else "failed")


def write_run(
    folder: Path,
    iterations: range,
    *,
    run_id: str | None = None,
    scale: float = 1.0,
    statistic: str = "amax",
    **facts: Any,
) -> str:
    """A segment with two layers: the value of layer n in iteration i is ``scale * (10 * i + n)``."""
    with RunWriter.begin(folder, run_id=run_id, **{"first_iteration": iterations.start, **facts}) as run:
        run.put_facts(
            "layers",
            [{"scope": "", "layer": name, "exec_fwd": 1 - n, "since": iterations.start}
             for n, name in enumerate(LAYERS)],
        )  # fmt: skip
        series = np.array([run.series(name, "activation", statistic) for name in LAYERS], np.int32)
        for iteration in iterations:
            run.add_step(iteration)
            run.add_values(iteration, series, scale * (10.0 * iteration + np.arange(2)))
            run.add_scalars(iteration, {"loss": scale / (1 + iteration)})
            run.flush()
        return run.run_id


def info(folder: Path, *, rank: int = 0, world: int = 1, start: int = 0) -> RunInfo:
    return RunInfo(folder, rank, world, start, (), {"torch": "2"}, "a mapping")


def records(iteration: int, table: SeriesTable, values: list[float], **keywords: Any) -> StepRecords:
    """Numbers of ``layer0``, ``layer1``, ..., reduced over ranks unless ``own`` is given."""
    series = np.array([table.intern(f"layer{n}", "weight", "amax") for n in range(len(values))], np.int32)
    own = keywords.pop("own", [False] * len(values))
    return StepRecords(iteration, iteration, table, series, array("d", values), own=own, **keywords)


def write_until_killed(folder: Path) -> None:
    """Write steps through the sink as fast as a training would, and print the iteration of each after it was handed
    over, with the time."""
    from te_precision_callbacks.runs.sink import RecordSink
    from te_precision_callbacks.sinks import writer_thread

    writer_thread.FLUSH_SECONDS = 0.05
    writing.CLOSE_BYTES = 20_000  # a file every few steps, so that the kill also comes while one is closed
    table, sink = SeriesTable(), RecordSink(folder)
    sink.start(info(folder))
    for iteration in range(10**9):
        sink.write(records(iteration, table, [float(iteration)] * 50))
        print(iteration, time.time(), flush=True)
        time.sleep(0.002)


if __name__ == "__main__":
    write_until_killed(Path(sys.argv[1]))
