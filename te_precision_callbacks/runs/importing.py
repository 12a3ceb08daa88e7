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

import functools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from te_precision_callbacks.base.files import regular_file
from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.runs.index import NO_VECTORS, VALUE_COLUMNS, SeriesIndex, Subject, sort_by_series
from te_precision_callbacks.runs.recorded import NotARunError, RecordedRun, RunError, Segment
from te_precision_callbacks.runs.run_files import gaps_of_numbers
from te_precision_callbacks.runs.tables import EVENTS, FACTS, LAYERS, SCALARS, STEP0, STEPS, VALUES, part_of
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.statistics.series import family_of, parse_log_name

# Folders of nvidia-dlfw-inspect 0.2.2 (logging.py).
STATISTICS_FOLDER = "nvdlfw_inspect_statistics_logs"
EVENTS_FOLDER = "nvdlfw_inspect_logs"

_NAME = re.compile(r"nvdlfw_inspect_globalrank-(\d{1,9})\.log")

_PIECE = 1 << 23  # bytes read at once
_PROGRESS_BYTES = 1 << 26  # smaller logs show no progress bar

# A value; ``rank=`` is in logs of a session.
_LINE = re.compile(
    rb"^(.{23}) - INFO - (.*) \t\t\t\t iteration=(\d{1,15})"
    rb" \t\t\t\t value=([+-]?(?:nan|inf|\d+\.?\d*(?:e[+-]?\d+)?))(?: \t\t\t\t rank=\d+)?\s*$",
    re.MULTILINE | re.IGNORECASE,
)
_TEXT_LINE = re.compile(rb"^(?!.{23} - INFO - Here another run begins).*\S", re.MULTILINE)
_LAYER = re.compile(r"^.{23} - INFO - Assigned layer name: (.+)$", re.MULTILINE)

_ROW = np.dtype([("iteration", "i8"), ("name", "i4"), ("value", "f8")])
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
    rows: dict[int, _Rows] = {}
    layers: dict[str, None] = {}
    size = sum(file.stat().st_size for file in logs.statistics.values())
    is_hidden = size < _PROGRESS_BYTES or not sys.stderr.isatty()
    with Progress(console=Console(stderr=True), transient=True, disable=is_hidden) as bar:
        advance = functools.partial(bar.advance, bar.add_task(escape(f"Reading {path}"), total=size))
        try:
            for file in logs.events.values():
                for lines in _lines_of(file):
                    layers.update(dict.fromkeys(_LAYER.findall(lines.decode(errors="replace"))))
            for rank, file in logs.statistics.items():
                parts = _read_statistics(file, names, times, unread, advance)
                rows[rank] = np.concatenate([np.empty(0, _ROW), *parts])
        except OSError as error:
            raise RunError(f"{file} cannot be read: {error}.") from error
    if not names:
        raise NotARunError(f"{path}: the statistics logs of nvidia-dlfw-inspect in it hold no statistic.")
    world = max(logs.statistics) + 1
    if missing := gaps_of_numbers(logs.statistics):
        unread.append(f"The logs of {world - len(logs.statistics)} ranks are missing: {missing}.")
    index, table = _assemble(rows, [name.decode(errors="replace") for name in names], layers)
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


def _read_statistics(
    file: Path,
    names: dict[bytes, int],
    times: dict[int, bytes],
    unread: list[str],
    advance: Callable[[int], None],
) -> Iterator[_Rows]:
    """Yield the rows of a log piece by piece; extends ``names``, ``times`` and the notes in ``unread``."""
    bad = 0
    for lines in _lines_of(file, advance):
        rows = []
        for time, name, iteration, value in _LINE.findall(lines):
            step = int(iteration)
            times.setdefault(step, time)
            rows.append((step, names.setdefault(name.rstrip(b" "), len(names)), float(value)))
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


def _assemble(rows: dict[int, _Rows], names: list[str], layers: Iterable[str]) -> tuple[SeriesIndex, pa.Table]:
    by_name: dict[int, list[tuple[int | None, _Rows]]] = defaultdict(list)  # name -> rank and rows
    for rank, of_rank in rows.items():
        ordered = of_rank[np.lexsort((of_rank["iteration"], of_rank["name"]))]
        ends = np.flatnonzero(np.diff(ordered["name"])) + 1
        for part in np.split(ordered, ends):
            if len(part):
                is_last = np.append(np.diff(part["iteration"]) > 0, True)  # of an iteration that ran again
                by_name[int(part["name"][0])].append((rank, part[is_last]))
    index = SeriesIndex()
    schema = part_of(VALUES, VALUE_COLUMNS)
    tables = []
    for number, (layer, tensor, statistic) in enumerate(parse_names(names, layers).values()):
        rank_parts = by_name[number]
        first = rank_parts[0][1]
        if all(_have_equal_values(first, part) for _, part in rank_parts):
            rank_parts = [(None, first)]
        is_quantized = family_of(tensor, statistic).is_of_delayed_scaling
        for part_rank, part in rank_parts:
            columns = {
                "segment": np.zeros(len(part), "i2"),
                "iteration": part["iteration"],
                "series": np.full(len(part), index.number(Subject("", layer, tensor, "", statistic, part_rank)), "i4"),
                "value": part["value"],
                "flags": np.where(is_quantized & (part["iteration"] == 0), STEP0, 0).astype("u1"),
            }
            tables.append(pa.Table.from_pydict(columns, schema))
    table = sort_by_series(pa.concat_tables(tables).combine_chunks())
    index.note(*(table[name].to_numpy() for name in ("series", "iteration", "value", "flags")))
    return index, table


def _have_equal_values(a: _Rows, b: _Rows) -> bool:
    return np.array_equal(a["iteration"], b["iteration"]) and np.array_equal(a["value"], b["value"], equal_nan=True)
