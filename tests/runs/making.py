"""Runs that are written without a session, and a process that writes one until it is killed."""

from __future__ import annotations

import sys
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np

from te_precision_callbacks.runs import writing
from te_precision_callbacks.runs.run_files import FOLDER, make_segment, new_run_id
from te_precision_callbacks.sinks.step_records import RunInfo, StepRecords
from te_precision_callbacks.statistics.series import SeriesTable

LAYERS = ("net.0", "net.1")


class RunWriter(writing.RunWriter):
    """Writes a segment of a new run, or of the run ``run_id``; ``facts`` are for run.json."""

    @classmethod
    def begin(cls, log_dir: str | Path, *, run_id: str | None = None, rank: int = 0, **facts: Any) -> RunWriter:
        run_folder = Path(log_dir) / FOLDER / (run_id or new_run_id())
        writer = cls(run_folder, make_segment(run_folder), rank)
        writer.put_run(**facts)
        return writer

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
