"""Imports the logs of plain nvidia-dlfw-inspect as a recorded run.

    <log_dir>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-0.log
        2026-11-22 13:01:44,718 - INFO - fc1_activation_max   iteration=000002   value=4.3188
    <log_dir>/nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-0.log
        2026-11-22 13:01:40,102 - INFO - Assigned layer name: fc1

The log joins layer, tensor and statistic with underscores, which they also contain. Names are split by the layers in
the event logs, the tensors and the known statistics; other names stay whole.

Values that are equal on all ranks become one series; otherwise, each rank has its own.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.runs.index import NO_VECTORS, VALUE_COLUMNS, SeriesIndex, Subject, sort_by_series
from te_precision_callbacks.runs.recorded import NotARunError, RecordedRun, RunError, Segment
from te_precision_callbacks.runs.run_files import gaps_of_numbers
from te_precision_callbacks.runs.tables import EVENTS, FACTS, LAYERS, SCALARS, STEP0, STEPS, VALUES, part_of
from te_precision_callbacks.statistics.arrays import Floats, Mask
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.statistics.series import family_of, parse_log_name
from te_precision_callbacks.statistics.table import StatisticSource

# Folders of nvidia-dlfw-inspect 0.2.2 (logging.py).
STATISTICS_FOLDER = "nvdlfw_inspect_statistics_logs"
EVENTS_FOLDER = "nvdlfw_inspect_logs"

_NAME = re.compile(r"nvdlfw_inspect_globalrank-(\d{1,9})\.log")

_PIECE = 1 << 23  # bytes read at once
_PROGRESS_BYTES = 1 << 26  # smaller logs show no progress bar

# A value, or the line by which a session marks the start of another run.
_LINE = re.compile(
    rb"^(?:(.{23}) - INFO - (.*) \t\t\t\t iteration=(\d{1,15})"
    rb" \t\t\t\t value=([+-]?(?:nan|inf|\d+\.?\d*(?:e[+-]?\d+)?))(?: \t\t\t\t rank=(\d+))?"
    rb"|.{23} - INFO - (Here another run begins), of process \d+\.)\s*$",
    re.MULTILINE | re.IGNORECASE,
)
_TEXT_LINE = re.compile(rb"^.*\S", re.MULTILINE)
_EVENT = re.compile(r"^(.{23}) - (?:INFO - Assigned layer name: (.*)|(WARNING|ERROR|CRITICAL) - (.*))$")

_ROW = np.dtype([("segment", "i2"), ("iteration", "i8"), ("name", "i4"), ("value", "f8"), ("local", "u1")])
_Rows = npt.NDArray[np.void]


class Logs(NamedTuple):
    statistics: dict[int, Path]
    events: dict[int, Path]


def find_logs(path: Path) -> Logs | None:
    """Find the logs of nvidia-dlfw-inspect at a path; None without statistics."""
    if path.is_file():
        match = _NAME.fullmatch(path.name)
        if match is None:
            return None
        return Logs({int(match[1]): path}, {})
    logs_of_run = Logs({}, {})
    for folder in (path, *sorted(path.glob("rank_*"))):  # BioNeMo's recipes have a folder for each rank
        for logs, name in ((logs_of_run.statistics, STATISTICS_FOLDER), (logs_of_run.events, EVENTS_FOLDER)):
            logs_folder = folder / name
            if folder.name == name:
                logs_folder = folder
            for file in sorted(logs_folder.glob("*.log*")):
                match = _NAME.fullmatch(file.name)
                if match is not None:
                    logs.setdefault(int(match[1]), file.with_name(match[0]))
    if logs_of_run.statistics:
        return logs_of_run
    return None


def import_logs(path: Path, logs: Logs) -> RecordedRun:
    """Read logs as a run; raises NotARunError if they have no statistics."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    unread: list[str] = []
    names: dict[bytes, int] = {}
    times: dict[int, bytes] = {}
    rows: dict[int, list[_Rows]] = {}
    try:
        layers, events = _read_events(logs)
    except OSError as error:
        raise RunError(f"The event logs of {path} cannot be read: {error}.") from error
    size = sum(file.stat().st_size for file in logs.statistics.values())
    is_hidden = size < _PROGRESS_BYTES or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=is_hidden) as bar:
        advance = functools.partial(bar.advance, bar.add_task(escape(f"Reading {path}"), total=size))
        for rank, file in logs.statistics.items():
            try:
                rows[rank] = list(_read_statistics(file, names, times, unread, advance))
            except OSError as error:
                raise RunError(f"{file} cannot be read: {error}.") from error
    if not names:
        raise NotARunError(f"{path}: the statistics logs of nvidia-dlfw-inspect in it hold no statistic.")
    world = max(logs.statistics) + 1
    if missing := gaps_of_numbers(logs.statistics):
        unread.append(f"The logs of {world - len(logs.statistics)} ranks are missing: {missing}.")
    index, table = _assemble(rows, [name.decode(errors="replace") for name in names], layers)
    iterations = np.unique(table["iteration"].to_numpy()).tolist()
    segments = np.unique(np.concatenate([part["segment"] for part in chain(*rows.values())])).tolist()
    layer_rows = [{"scope": "", "layer": name, "since": 0} for name in layers]
    steps = []
    for iteration in iterations:
        time = _time(times[iteration].decode())
        row = {"segment": segments[-1], "iteration": iteration, "logging_step": iteration, "wall_time": time}
        steps.append(row)
    return RecordedRun(
        path=path,
        source="nvidia-dlfw-inspect",
        run_id=path.resolve().name,
        segments=tuple(Segment(number, "unknown", "", "", iterations[0], world, {}) for number in segments),
        **{name: schema.empty_table() for name, schema in FACTS.items() if name != "layers"},
        layers=pa.Table.from_pylist(layer_rows, LAYERS),
        series=index.table(),
        steps=pa.Table.from_pylist(steps, STEPS),
        scalars=SCALARS.empty_table(),
        events=events,
        read_values=functools.partial(_select, table),
        read_vectors=lambda _: NO_VECTORS,
        said=dict.fromkeys(unread, "unread"),
    )


def _select(table: pa.Table, wanted: list[int] | None) -> pa.Table:
    if wanted is None:
        return table
    return table.filter(pa.array(np.isin(table["series"].to_numpy(), wanted)))


# ---------------------------------------------------------------------- files


def _lines_of(file: Path, advance: Callable[[int], None] = lambda read: None) -> Iterator[bytes]:
    with regular_file(file).open("rb") as log:
        while lines := log.readlines(_PIECE):
            advance(sum(map(len, lines)))
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            yield b"".join(lines)


def _read_events(logs: Logs) -> tuple[list[str], pa.Table]:
    layers: dict[str, None] = {}
    rows: list[dict[str, Any]] = []
    for rank, file in logs.events.items():
        for lines in _lines_of(file):
            for match in filter(None, map(_EVENT.match, lines.decode(errors="replace").split("\n"))):
                time, layer, level, text = match.groups()
                if layer:
                    layers.setdefault(layer)
                elif level:
                    rows.append(
                        {
                            "segment": 0,
                            "iteration": 0,
                            "rank": rank,
                            "kind": "logged",
                            "severity": {"WARNING": "warning"}.get(level, "error"),
                            "wall_time": _time(time),
                            "text": text,
                        }
                    )
    return list(layers), pa.Table.from_pylist(rows, EVENTS).sort_by("wall_time")


def _read_statistics(
    file: Path,
    names: dict[bytes, int],
    times: dict[int, bytes],
    unread: list[str],
    advance: Callable[[int], None],
) -> Iterator[_Rows]:
    """Yield the rows of a log piece by piece; extends ``names``, ``times`` and the notes in ``unread``."""
    segment = 0
    bad = 0
    for lines in _lines_of(file, advance):
        rows = []
        matches = _LINE.findall(lines)
        for time, name, iteration, value, local, mark in matches:
            if mark:
                segment += 1
                continue
            step = int(iteration)
            times.setdefault(step, time)
            rows.append((segment, step, names.setdefault(name.rstrip(b" "), len(names)), float(value), bool(local)))
        bad += len(_TEXT_LINE.findall(lines)) - len(matches)
        yield np.array(rows, _ROW)
    if bad:
        text = f"{bad:,} lines are no statistics, and were left out."
        if bad == 1:
            text = "1 line is no statistics, and was left out."
        unread.append(f"{file}: {text}")


def _time(text: str) -> datetime | None:
    try:
        return datetime.strptime(text, "%Y-%m-%d %H:%M:%S,%f").astimezone(timezone.utc)
    except ValueError:
        return None


# ---------------------------------------------------------------------- series


def parse_names(names: Iterable[str], layers: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Split a log's names into layer, tensor and statistic; ``("", "", name)`` if this is not possible."""
    known = set(layers)
    parsed: dict[str, tuple[str, str, str]] = {}
    for name in names:
        parsed[name] = parse_log_name(name, known)
        if not parsed[name][0]:
            parsed[name] = _by_statistic(name)
    known |= {layer for layer, _, _ in parsed.values() if layer}
    for name, (layer, _, _) in parsed.items():
        if not layer:
            parsed[name] = parse_log_name(name, known)
    return parsed


def _by_statistic(name: str) -> tuple[str, str, str]:
    for tensor in TENSORS:
        layer, _, statistic = name.rpartition(f"_{tensor}_")
        if layer and logged_request(statistic) is not None:
            return layer, tensor, statistic
    return "", "", name


def _assemble(rows: dict[int, list[_Rows]], names: list[str], layers: Iterable[str]) -> tuple[SeriesIndex, pa.Table]:
    by_name: dict[int, list[tuple[int, _Rows]]] = defaultdict(list)  # name -> rank and rows
    for rank, parts in rows.items():
        rank_rows = np.concatenate([np.empty(0, _ROW), *parts])
        rank_rows = rank_rows[np.lexsort((rank_rows["iteration"], rank_rows["name"]))]
        same = (rank_rows["name"][1:] == rank_rows["name"][:-1]) & (
            rank_rows["iteration"][1:] == rank_rows["iteration"][:-1]
        )
        rank_rows = rank_rows[np.r_[~same, True][: len(rank_rows)]]  # the last value of an iteration that ran again
        starts = np.flatnonzero(np.r_[True, rank_rows["name"][1:] != rank_rows["name"][:-1]][: len(rank_rows)])
        for part in np.split(rank_rows, starts[1:]):
            if len(part):
                by_name[int(part["name"][0])].append((rank, part))
    index = SeriesIndex()
    kept = list[_Rows]()
    series = list[npt.NDArray[np.int32]]()
    for number, subject in enumerate(parse_names(names, layers).values()):
        rank_parts: list[tuple[int | None, _Rows]] = [*by_name[number]]
        first = rank_parts[0][1]
        if all(_have_equal_values(first, part) for _, part in rank_parts[1:]):
            rank_parts = [(None, first)]
        layer, tensor, statistic = subject
        for part_rank, part in rank_parts:
            kept.append(part)
            series_number = index.number(Subject("", layer, tensor, "", statistic, part_rank))
            series.append(np.full(len(part), series_number, np.int32))
    values = np.concatenate(kept)
    columns = [values["segment"], values["iteration"], np.concatenate(series), values["value"], values["local"]]
    arrays = map(pa.array, map(np.ascontiguousarray, columns))
    table = sort_by_series(pa.Table.from_arrays(list(arrays), schema=part_of(VALUES, VALUE_COLUMNS)))
    table = _with_first_steps(table, index)
    index.note(*(table[name].to_numpy() for name in ("series", "iteration", "value", "flags")))
    return index, table


def _have_equal_values(a: _Rows, b: _Rows) -> bool:
    return np.array_equal(a["iteration"], b["iteration"]) and np.array_equal(a["value"], b["value"], equal_nan=True)


def _with_first_steps(table: pa.Table, index: SeriesIndex) -> pa.Table:
    """Flag the first steps of delayed scaling, with a scale of 1, which logs do not mark.

    The first iteration of a run is such a step for a tensor if its scale is 1 there and later not a power of two, or if
    it is iteration 0 and the tensor has a statistic that names delayed scaling.
    """
    segments, iterations, series, values = (
        table[name].to_numpy() for name in ("segment", "iteration", "series", "value")
    )
    flags = table["flags"].to_numpy().copy()
    delayed = []
    for number, subject in enumerate(index.subjects):
        family = family_of(subject.tensor, subject.statistic)
        if family.is_of_delayed_scaling:
            delayed.append((number, (subject.layer, subject.tensor, subject.rank), family.request))
    for segment in np.unique(segments).tolist():
        begin = int(iterations[segments == segment].min())
        at_begin = (segments == segment) & (iterations == begin)
        unscaled = set()
        for number, tensor, request in delayed:
            if request is None:
                continue
            rows = slice(*np.searchsorted(series, (number, number + 1)).tolist())
            is_named = begin == 0 and request.recipe == "fp8_delayed_scaling"
            if is_named or (
                request.statistic.source is StatisticSource.SCALES and _begins_unscaled(values[rows], at_begin[rows])
            ):
                unscaled.add(tensor)
        flagged = [number for number, tensor, _ in delayed if tensor in unscaled]
        flags[at_begin & np.isin(series, flagged)] |= STEP0
    place = table.column_names.index("flags")
    return table.set_column(place, table.schema.field(place), pa.array(flags))


def _begins_unscaled(scales: Floats, at_begin: Mask) -> bool:
    later = scales[~at_begin & np.isfinite(scales)]  # small scales are logged as 0, with four decimals
    return bool(at_begin.any() and (scales[at_begin] == 1).all() and (np.frexp(later)[0] != 0.5).any())
