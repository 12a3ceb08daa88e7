"""Reads the logs of plain nvidia-dlfw-inspect as a recorded run.

    <log_dir>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-0.log
        2026-11-22 13:01:44,718 - INFO - fc1_activation_max   iteration=000002   value=4.3188
    <log_dir>/nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-0.log
        2026-11-22 13:01:40,102 - INFO - Assigned layer name: fc1

The log joins layer, tensor and statistic with underscores, which they also contain. Names are split by the layers in
the event logs, the tensors and the known statistics; other names stay whole.

Values that are equal on all ranks become one series; otherwise, each rank has its own. The log does not name recipes,
so all statistics of quantized tensors in iteration 0 are flagged as the first step of delayed scaling.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.runs.recorded import NotARunError, RecordedRun, RunError, Segment
from te_precision_callbacks.runs.run_files import gaps
from te_precision_callbacks.runs.tables import (
    EVENTS,
    FACTS,
    LAYERS,
    SCALARS,
    STEP0,
    STEPS,
    VALUE_ROWS,
    VECTOR_ROWS,
    SeriesIndex,
    Subject,
)
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.statistics.series import parse_log_name

# Folders of nvidia-dlfw-inspect 0.2.2 (logging.py).
STATISTICS_FOLDER = "nvdlfw_inspect_statistics_logs"
EVENTS_FOLDER = "nvdlfw_inspect_logs"

_NAME = re.compile(r"nvdlfw_inspect_globalrank-(\d{1,9})\.log")

_PIECE = 1 << 23  # bytes read at once

# A value; ``rank=`` is in logs of a session.
_LINE = re.compile(
    rb"^(.{23}) - INFO - (.*) \t\t\t\t iteration=(\d{1,15})"
    rb" \t\t\t\t value=([+-]?(?:nan|inf|\d+\.?\d*(?:e[+-]?\d+)?))(?: \t\t\t\t rank=\d+)?\s*$",
    re.MULTILINE | re.IGNORECASE,
)
_TEXT_LINE = re.compile(rb"^(?!.{23} - INFO - Here another run begins).*\S", re.MULTILINE)
_LAYER = re.compile(r"^.{23} - INFO - Assigned layer name: (.+)$", re.MULTILINE)

_ROW = np.dtype([("name", "i4"), ("rank", "i4"), ("iteration", "i8"), ("value", "f8")])
_Rows = npt.NDArray[np.void]


class Logs(NamedTuple):
    statistics: dict[int, Path]
    events: dict[int, Path]


def find_logs(path: Path) -> Logs | None:
    """Find the logs of nvidia-dlfw-inspect at a path; None without statistics."""
    logs = Logs({}, {})
    if path.is_file():
        _add_logs(logs.statistics, [path])
    else:
        for folder in (path, *sorted(path.glob("rank_*"))):  # BioNeMo's recipes have a folder for each rank
            for files, name in zip(logs, (STATISTICS_FOLDER, EVENTS_FOLDER), strict=True):
                _add_logs(files, sorted((folder if folder.name == name else folder / name).glob("*.log")))
    return logs if logs.statistics else None


def _add_logs(logs: dict[int, Path], files: Iterable[Path]) -> None:
    for file in files:
        if match := _NAME.fullmatch(file.name):
            logs.setdefault(int(match[1]), file)


def import_logs(path: Path, logs: Logs) -> RecordedRun:
    """Read logs as a run; raises NotARunError if they have no statistics."""
    unread: list[str] = []
    names: dict[bytes, int] = {}
    times: dict[int, bytes] = {}
    rows = [np.empty(0, _ROW)]
    layers: dict[str, None] = {}
    try:
        for file in logs.events.values():
            for lines in _lines_of(file):
                layers.update(dict.fromkeys(_LAYER.findall(lines.decode(errors="replace"))))
        for rank, file in logs.statistics.items():
            rows += _read_statistics(file, rank, names, times, unread)
    except OSError as error:
        raise RunError(f"{file} cannot be read: {error}.") from error
    if not names:
        raise NotARunError(f"{path}: the statistics logs of nvidia-dlfw-inspect in it hold no statistic.")
    world = max(logs.statistics) + 1
    if len(logs.statistics) > 1 and (missing := gaps(logs.statistics)):
        unread.append(f"The logs of {world - len(logs.statistics)} ranks are missing: {missing}.")
    index, values = _assemble(np.concatenate(rows), [name.decode(errors="replace") for name in names], layers)
    layer_rows = [{"scope": "", "layer": name, "since": 0} for name in layers]
    steps = [
        {"segment": 0, "iteration": iteration, "logging_step": iteration, "wall_time": _time(times[iteration])}
        for iteration in sorted(times)
    ]
    return RecordedRun(
        path=path,
        source="nvidia-dlfw-inspect",
        run_id=path.resolve().name,
        segments=(Segment(0, "unknown", "", "", min(times), world, {}),),
        **{name: schema.empty_table() for name, schema in FACTS.items() if name != "layers"},
        layers=pa.Table.from_pylist(layer_rows, LAYERS),
        series=index.table(),
        steps=pa.Table.from_pylist(steps, STEPS),
        scalars=SCALARS.empty_table(),
        events=EVENTS.empty_table(),
        read_values=lambda series: values if series is None else values.filter(pc.field("series").isin(series)),
        read_vectors=lambda _: VECTOR_ROWS.empty_table(),
        said=dict.fromkeys(unread, "unread"),
    )


# ---------------------------------------------------------------------- files


def _lines_of(file: Path) -> Iterator[bytes]:
    with regular_file(file).open("rb") as log:
        while lines := log.readlines(_PIECE):
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            yield b"".join(lines)


def _read_statistics(
    file: Path, rank: int, names: dict[bytes, int], times: dict[int, bytes], unread: list[str]
) -> Iterator[_Rows]:
    """Yield the rows of a log piece by piece; extends ``names``, ``times`` and the notes in ``unread``."""
    bad = 0
    for lines in _lines_of(file):
        rows = []
        for time, name, iteration, value in _LINE.findall(lines):
            step = int(iteration)
            times.setdefault(step, time)
            rows.append((names.setdefault(name.rstrip(b" "), len(names)), rank, step, float(value)))
        bad += len(_TEXT_LINE.findall(lines)) - len(rows)
        yield np.array(rows, _ROW)
    if bad:
        text = f"{bad:,} lines are no statistics, and were left out."
        if bad == 1:
            text = "1 line is no statistics, and was left out."
        unread.append(f"{file}: {text}")


def _time(text: bytes) -> datetime | None:
    try:
        return datetime.strptime(text.decode(), "%Y-%m-%d %H:%M:%S,%f").astimezone(timezone.utc)
    except ValueError:
        return None


# ---------------------------------------------------------------------- series


def parse_names(names: Iterable[str], layers: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Split a log's names into layer, tensor and statistic; ``("", "", name)`` if this is not possible."""
    names = list(names)
    known = {*layers, *filter(None, map(_layer_by_statistic, names))}
    return {name: parse_log_name(name, known) for name in names}


def _layer_by_statistic(name: str) -> str:
    """Return the layer of a name with a known statistic, else an empty text."""
    for tensor in TENSORS:
        layer, _, statistic = name.rpartition(f"_{tensor}_")
        if layer and logged_request(statistic) is not None:
            return layer
    return ""


def _assemble(rows: _Rows, names: list[str], layers: Iterable[str]) -> tuple[SeriesIndex, pa.Table]:
    """Number the series, and return their values, sorted by series and iteration."""
    rows = rows[np.lexsort((rows["iteration"], rows["rank"], rows["name"]))]
    keys = rows[["name", "rank", "iteration"]]
    rows = rows[np.append(keys[1:] != keys[:-1], True)]  # without those of iterations that ran again
    by_name = np.split(rows, np.flatnonzero(np.diff(rows["name"])) + 1)
    index = SeriesIndex()
    parts: list[_Rows] = []
    numbers: list[int] = []
    for part, (layer, tensor, statistic) in zip(by_name, parse_names(names, layers).values(), strict=True):
        of_ranks = np.split(part, np.flatnonzero(np.diff(part["rank"])) + 1)
        ranks: list[int | None] = [int(own["rank"][0]) for own in of_ranks]
        if len({(own["iteration"].tobytes(), own["value"].tobytes()) for own in of_ranks}) == 1:
            of_ranks = of_ranks[:1]
            ranks = [None]
        parts += of_ranks
        numbers += index.number(Subject("", layer, tensor, "", statistic, rank) for rank in ranks)
    rows = np.concatenate(parts)
    series = np.repeat(np.array(numbers, np.int32), [len(part) for part in parts])
    first_step = index.rows["delayed"][series] & (rows["iteration"] == 0)
    index.note(series, rows["iteration"])
    index.note_values(series, rows["iteration"], rows["value"], first_step)
    flags = (STEP0 * first_step).astype(np.uint8)
    columns = [np.zeros(len(rows), np.int16), rows["iteration"], series, rows["value"], flags]
    return index, pa.table(columns, schema=VALUE_ROWS)
