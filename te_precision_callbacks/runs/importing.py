"""Reads what plain nvidia-dlfw-inspect has written, as a recorded run.

    <log_dir>/nvdlfw_inspect_statistics_logs/nvdlfw_inspect_globalrank-0.log
        2026-11-22 13:01:44,718 - INFO - fc1_activation_max   iteration=000002   value=4.3188
    <log_dir>/nvdlfw_inspect_logs/nvdlfw_inspect_globalrank-0.log
        2026-11-22 13:01:40,102 - INFO - Assigned layer name: fc1

Layer, tensor and statistic are joined without a mark between them. The layer is known by the names in the
event logs, by the names of tensors, and by the statistics that are known; any other name stays as it is.

A log that has reached its limit is two files: the older half, ``<name>.old``, is read first.

A log of several ranks has a number once if all ranks that have it agree, and otherwise once for each rank.
"""

from __future__ import annotations

import functools
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from te_precision_callbacks.base.counts import many
from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.runs.errors import NotARunError
from te_precision_callbacks.runs.event_lines import events_table
from te_precision_callbacks.runs.index import NO_VECTORS, SeriesIndex, Subject, in_order
from te_precision_callbacks.runs.input_files import MOST_ITERATION, open_regular, pieces_of
from te_precision_callbacks.runs.recorded import Notes, RecordedRun, Segment
from te_precision_callbacks.runs.run_files import gaps
from te_precision_callbacks.runs.tables import FACTS, LAYERS, SCALARS, STEP0, STEPS, VALUES
from te_precision_callbacks.sinks.log_file import older_half
from te_precision_callbacks.statistics.names import logged_request
from te_precision_callbacks.statistics.series import badness, family_of, parsed_log_name, sign_of
from te_precision_callbacks.statistics.table import Of

STATISTICS_FOLDER, EVENTS_FOLDER = "nvdlfw_inspect_statistics_logs", "nvdlfw_inspect_logs"
"""As in nvidia-dlfw-inspect 0.2.2, ``logging.py``."""

_NAME = re.compile(r"nvdlfw_inspect_globalrank-(\d{1,9})\.log")

_SHOWN = 1 << 26
"""The bytes above which a progress bar is shown."""

_COLUMNS = ("head", "a", "b", "c", "iteration", "d", "e", "f", "value")
"""The parts of a line between tabs."""

_LINE = re.compile(
    r"(.{23}) - INFO - (.*) \t\t\t\t iteration=(\d+) \t\t\t\t value=(\S+)(?: \t\t\t\t rank=(\d+))?\s*", re.DOTALL
)
_MARK = b" - INFO - Here another run begins, of process "
_GOES_ON = re.compile(r".{23} - INFO - The log goes on from .*\.old\.")
_ANOTHER_RUN = re.compile(rb"^.{23} - INFO - Here another run begins, of process \d+\.$", re.MULTILINE)
_ASSIGNED = re.compile(r"^.{23} - INFO - Assigned layer name: (.*)$")
_MESSAGE = re.compile(r"^(.{23}) - (WARNING|ERROR|CRITICAL) - (.*)$")
_TIME = "%Y-%m-%d %H:%M:%S,%f"


class _Logs(NamedTuple):
    """The logs of a run: rank -> file."""

    statistics: dict[int, Path]
    events: dict[int, Path]


def find_logs(path: Path) -> _Logs | None:
    """The logs of nvidia-dlfw-inspect that a path is, or that lie in it; None if there are no statistics."""
    if path.is_file():
        match = _NAME.fullmatch(path.name)
        return None if match is None else _Logs({int(match[1]): path}, {})
    found = _Logs({}, {})
    for folder in (path, *sorted(path.glob("rank_*"))):  # BioNeMo's recipes have a folder for each rank
        for logs, name in ((found.statistics, STATISTICS_FOLDER), (found.events, EVENTS_FOLDER)):
            of_folder = folder / name if (folder / name).is_dir() else None
            if of_folder is None and folder.name == name:
                of_folder = folder
            for file in sorted(of_folder.iterdir()) if of_folder is not None else ():
                match = _NAME.fullmatch(file.name)
                if match is not None:
                    logs.setdefault(int(match[1]), file)
    return found if found.statistics else None


class _Part(NamedTuple):
    """A stretch of numbers of a log.

    Attributes:
        names: the names in the log, each once.
        name: [numbers], int32: the place of each number's name.
        iteration: [numbers], int64.
        value: [numbers], float64.
        local: [numbers], bool: whether the log says that the number belongs to the rank alone.
        segment: how many runs in the same file came before.
        times: iteration -> the time of its first number, as it is written.
    """

    names: list[str]
    name: npt.NDArray[np.int32]
    iteration: npt.NDArray[np.int64]
    value: npt.NDArray[np.float64]
    local: npt.NDArray[np.bool_]
    segment: int
    times: dict[int, str]


def _halves(file: Path) -> list[Path]:
    """The files of a log, in order: the older half, if there is one, comes first."""
    return [each for each in (older_half(file), file) if each.is_file()]


def import_logs(path: Path, logs: _Logs) -> RecordedRun:
    """Read logs.

    Raises:
        NotARunError: they hold no number.
    """
    notes: list[str] = []
    unread: list[str] = []
    layers, events = _read_events(logs, notes)
    parts: list[tuple[int, _Part]] = []
    sizes = sum(half.stat().st_size for file in logs.statistics.values() for half in _halves(file))
    with _progress(f"Reading {path}", sizes) as advance:
        for rank, file in logs.statistics.items():
            parts += [(rank, part) for part in _read_statistics(file, unread, advance)]
    if not any(len(part.value) for _, part in parts):
        raise NotARunError(f"{path}: the statistics logs of nvidia-dlfw-inspect in it hold no statistic.")
    _note_missing(logs, unread)
    segments = sorted({part.segment for _, part in parts if len(part.value)})
    times = {iteration: time for _, part in reversed(parts) for iteration, time in part.times.items()}
    index, table = _assemble(parts, layers)
    _note_unknown_first_steps(table, index, notes)
    iterations = np.unique(table["iteration"].to_numpy())
    own: list[str] = [name for name in layers if name]
    rows = [{"layer_id": number, "scope": "", "layer": name, "since": 0} for number, name in enumerate(own)]
    series = index.table()
    return RecordedRun(
        path=path,
        source="nvidia-dlfw-inspect",
        run_id=path.resolve().name,
        segments=tuple(
            Segment(number, "unknown", "", "", int(iterations[0]), max(logs.statistics) + 1, {}) for number in segments
        ),
        **{name: schema.empty_table() for name, schema in FACTS.items() if name != "layers"},
        layers=pa.Table.from_pylist(rows, LAYERS),
        series=series,
        steps=pa.Table.from_pylist(
            [
                {"segment": segments[-1], "iteration": each, "logging_step": each, "wall_time": _time(times.get(each))}
                for each in iterations.tolist()
            ],
            STEPS,
        ),
        scalars=SCALARS.empty_table(),
        events=events,
        read_values=functools.partial(_select, table),
        read_vectors=lambda _: NO_VECTORS,
        said=Notes([*unread, *notes], [*unread]),
    )


def _select(table: pa.Table, wanted: list[int] | None) -> pa.Table:
    """The rows of some series, of a table that is sorted by series."""
    if wanted is None:
        return table
    series = table["series"].to_numpy()
    first, last = np.searchsorted(series, wanted), np.searchsorted(series, wanted, side="right")
    slices = [table.slice(begin, end - begin) for begin, end in zip(first.tolist(), last.tolist(), strict=True)]
    return pa.concat_tables([table.slice(0, 0), *slices]).combine_chunks()


def _note_missing(logs: _Logs, unread: list[str]) -> None:
    ranks = sorted(logs.statistics)
    gone = gaps(((rank, rank) for rank in ranks), 0) if len(ranks) > 1 else ""
    if gone:
        unread.append(f"The logs of {ranks[-1] + 1 - len(ranks)} ranks are missing: {gone}.")


# ---------------------------------------------------------------------- files


def _read_events(logs: _Logs, notes: list[str]) -> tuple[dict[str, None], pa.Table]:
    """The names of layers, in the order of the model, and warnings and errors."""
    layers: dict[str, None] = {}
    assigned_names: dict[int, list[str]] = {}

    def events() -> Iterator[dict[str, Any]]:
        for rank, file in logs.events.items():
            for lines in _lines_of(_halves(file), lambda read: None):
                for line in lines.decode("utf-8", errors="replace").split("\n"):
                    assigned = _ASSIGNED.match(line)
                    message = None if assigned else _MESSAGE.match(line)
                    if assigned:
                        layers.setdefault(assigned[1])
                        assigned_names.setdefault(rank, []).append(assigned[1])
                    elif message:
                        yield {
                            "segment": 0,
                            "iteration": 0,
                            "rank": rank,
                            "kind": "logged",
                            "severity": "warning" if message[2] == "WARNING" else "error",
                            "wall_time": _time(message[1]),
                            "text": message[3],
                        }

    table = events_table(events())
    shared = dict.fromkeys(name for names in assigned_names.values() for name in _shared_names(names))
    if shared:
        shown = ", ".join(list(shared)[:5]) + (", ..." if len(shared) > 5 else "")
        notes.append(
            f"Several layers have one name in the log of events: {shown}. nvidia-dlfw-inspect logs them under this name"
            " alone, so a number may be of any of them, or of all. Give each layer another name."
        )
    return layers, table


def _shared_names(names: list[str]) -> list[str]:
    """The names that several layers of a model have. A run that goes on in the log names all layers once more."""
    sizes = (size for size in range(1, len(names) + 1) if len(names) % size == 0)
    period = next((size for size in sizes if names[:size] * (len(names) // size) == names), 1)
    counts = Counter(names if period == 1 else names[:period])
    return [name for name, count in counts.items() if count > 1]


def _read_statistics(file: Path, unread: list[str], advance: Callable[[int], None]) -> Iterator[_Part]:
    """The numbers of a log, piece by piece."""
    segment, unreadable = 0, 0
    for lines in _lines_of(_halves(file), advance):
        begin = 0
        marks = _ANOTHER_RUN.finditer(lines) if _MARK in lines else ()
        for mark in (*marks, None):
            part, bad = _parse(lines[begin : None if mark is None else mark.start()], segment)
            unreadable += bad
            if part is not None:
                yield part
            if mark is not None:
                segment, begin = segment + 1, mark.end() + 1
    if unreadable:
        is_ = "is" if unreadable == 1 else "are"
        was = "was" if unreadable == 1 else "were"
        unread.append(f"{file}: {many(unreadable, 'line')} {is_} no statistics, and {was} left out.")


def _lines_of(files: Iterable[Path], advance: Callable[[int], None]) -> Iterator[bytes]:
    """Whole lines, many at once; not half a line at the end, which a process was writing when it was killed."""
    for file in files:
        with open_regular(file) as log:
            for lines, nbytes in pieces_of(log):
                advance(nbytes)
                yield lines


def _parse(lines: bytes, segment: int) -> tuple[_Part | None, int]:
    """The numbers of whole lines, and how many lines have none."""
    if not lines.strip():
        return None, 0
    others: list[str] = []

    def keep(row: Any) -> str:
        others.append(row.text)
        return "skip"

    text = pa.string()
    try:
        lines.decode()  # the reader would ask for the text of a line before it finds that it is none
        table = pa.csv.read_csv(
            pa.BufferReader(lines),
            read_options=pa.csv.ReadOptions(column_names=list(_COLUMNS), use_threads=True, block_size=1 << 22),
            parse_options=pa.csv.ParseOptions(
                delimiter="\t", quote_char=False, double_quote=False, invalid_row_handler=keep, ignore_empty_lines=True
            ),
            convert_options=pa.csv.ConvertOptions(
                include_columns=["head", "iteration", "value"],
                column_types={"head": text, "iteration": text, "value": text},
                strings_can_be_null=False,
            ),
        )
        found = _from_columns(table)
    except (pa.ArrowInvalid, UnicodeDecodeError):  # a line that has tabs but is none of these, or is no UTF-8
        found, others = None, lines.decode("utf-8", errors="replace").split("\n")
    others = [line for line in others if line.strip() and not _GOES_ON.fullmatch(line.rstrip("\r"))]
    matches = [_LINE.fullmatch(line) for line in others]
    readable = [match for match in matches if match is not None and _is_number(match[4]) and _is_iteration(match[3])]
    parts = [] if found is None else [found]
    if readable:
        parts.append(_from_matches(readable))
    return _joined(parts, segment), len(others) - len(readable)


def _from_columns(table: pa.Table) -> _Part:
    """The numbers of lines that are as nvidia-dlfw-inspect writes them.

    Raises:
        pa.ArrowInvalid: a line is not.
    """
    heads = table["head"].combine_chunks()
    iterations = pc.utf8_trim(pc.replace_substring(table["iteration"], "iteration=", "", max_replacements=1), " ")
    values = pc.utf8_trim(pc.replace_substring(table["value"], "value=", "", max_replacements=1), " \r")
    iterations = pc.cast(iterations, pa.int64())
    iteration = iterations.to_numpy()
    # "2026-11-22 13:01:44,718 - INFO - fc1_activation_max ": statistics are logged at the level INFO.
    good = pc.and_(pc.greater_equal(iterations, 0), pc.less(iterations, MOST_ITERATION))
    if (
        not pc.all(good).as_py()
        or not pc.all(pc.equal(pc.utf8_slice_codeunits(heads, 23, 33), pa.scalar(" - INFO - "))).as_py()
    ):
        raise pa.ArrowInvalid("a line is not a statistic")
    names = pc.dictionary_encode(pc.utf8_rtrim(pc.utf8_slice_codeunits(heads, 33), " "))
    first, where = np.unique(iteration, return_index=True)
    times = pc.utf8_slice_codeunits(heads.take(pa.array(where)), 0, 23).to_pylist()
    return _Part(
        names=names.dictionary.to_pylist(),
        name=names.indices.to_numpy(),
        iteration=iteration,
        value=pc.cast(values, pa.float64()).to_numpy(),
        local=np.zeros(len(iteration), bool),
        segment=0,
        times=dict(zip(first.tolist(), times, strict=True)),
    )


def _from_matches(matches: list[re.Match[str]]) -> _Part:
    numbers: dict[str, int] = {}
    return _Part(
        name=np.array([numbers.setdefault(match[2], len(numbers)) for match in matches], np.int32),
        names=list(numbers),
        iteration=np.array([int(match[3]) for match in matches], np.int64),
        value=np.array([float(match[4]) for match in matches]),
        local=np.array([match[5] is not None for match in matches]),
        segment=0,
        times={int(match[3]): match[1] for match in reversed(matches)},
    )


def _joined(parts: list[_Part], segment: int) -> _Part | None:
    """Several parts as one of a segment."""
    if not parts:
        return None
    numbers: dict[str, int] = {}
    of_part = [[numbers.setdefault(name, len(numbers)) for name in part.names] for part in parts]
    names = [np.array(of, np.int32)[part.name] for of, part in zip(of_part, parts, strict=True)]
    return _Part(
        names=list(numbers),
        name=np.concatenate(names),
        iteration=np.concatenate([part.iteration for part in parts]),
        value=np.concatenate([part.value for part in parts]),
        local=np.concatenate([part.local for part in parts]),
        segment=segment,
        times={iteration: time for part in reversed(parts) for iteration, time in part.times.items()},
    )


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_iteration(text: str) -> bool:
    return len(text) < 20 and int(text) < MOST_ITERATION


def _time(text: str | None) -> datetime | None:
    """A time as the logging module writes it, in the zone of this machine."""
    if text is None:
        return None
    try:
        return datetime.strptime(text, _TIME).astimezone(timezone.utc)
    except ValueError:
        return None


@contextmanager
def _progress(text: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar for what takes long, on a terminal only; gives a function that takes how much was done."""
    if total < _SHOWN or not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(escape(text), total=total)
        yield lambda done: bar.advance(task, done)


# ---------------------------------------------------------------------- series


def parse_names(names: Iterable[str], layers: Iterable[str]) -> dict[str, tuple[str, str, str]]:
    """Name in a log -> layer, tensor and statistic; of a name that is not such, ``("", "", name)``.

    Args:
        names: the names.
        layers: the names of layers, as far as they are known. Others are found by the statistics that are known.
    """
    known = set(layers)
    parsed: dict[str, tuple[str, str, str]] = {}
    for name in names:
        found = parsed_log_name(name, known)
        parsed[name] = found if found[0] else _by_statistic(name)
    known |= {layer for layer, _, _ in parsed.values() if layer}
    return {name: found if found[0] else parsed_log_name(name, known) for name, found in parsed.items()}


def _by_statistic(name: str) -> tuple[str, str, str]:
    for tensor in TENSORS:
        layer, _, statistic = name.rpartition(f"_{tensor}_")
        if layer and logged_request(statistic) is not None:
            return layer, tensor, statistic
    return "", "", name


def _assemble(parts: list[tuple[int, _Part]], layers: Iterable[str]) -> tuple[SeriesIndex, pa.Table]:
    """The series, and the table of all numbers, sorted."""
    names = parse_names(dict.fromkeys(name for _, part in parts for name in part.names), layers)
    places = {name: place for place, name in enumerate(names)}
    ranks = sorted({rank for rank, _ in parts})
    # Each rank has its own series: name * ranks + rank
    series = np.concatenate(
        [
            np.array([places[name] for name in part.names], np.int32)[part.name] * len(ranks) + ranks.index(rank)
            for rank, part in parts
        ]
    ).astype(np.int32)
    columns = [
        np.repeat([part.segment for _, part in parts], [len(part.value) for _, part in parts]).astype(np.int16),
        np.concatenate([part.iteration for _, part in parts]),
        series,
        np.concatenate([part.value for _, part in parts]),
        np.concatenate([part.local for _, part in parts]).astype(np.uint8),
    ]
    parts.clear()
    fields = [VALUES.field(name) for name in ("segment", "iteration", "series", "value", "flags")]
    table = in_order(pa.Table.from_arrays([pa.array(each) for each in columns], schema=pa.schema(fields)))
    table = _last_of_each(table)
    found = table["series"].to_numpy()
    index = SeriesIndex()
    subjects = [Subject("", layer, tensor, "", statistic, None) for layer, tensor, statistic in names.values()]
    agree = _agreeing(table, len(ranks)) if len(ranks) > 1 else None
    run_series = np.full((len(subjects), len(ranks)), -1, np.int32)
    dropped = np.zeros(run_series.shape, bool)
    seen = np.zeros(run_series.shape, bool)
    seen.flat[np.unique(found)] = True
    for place, subject in enumerate(subjects):
        having = np.flatnonzero(seen[place])
        if agree is None or len(having) == 1 or agree[place]:
            run_series[place, having[:1]] = index.number(subject)
            dropped[place, having[1:]] = True
        else:
            for rank in having.tolist():
                run_series[place, rank] = index.number(subject._replace(rank=ranks[rank]))
    if dropped.any():
        table = table.filter(pa.array(~dropped.ravel()[found]))
        found = table["series"].to_numpy()
    table = table.set_column(2, fields[2], pa.array(run_series.ravel()[found]))
    table = in_order(table)
    table = _with_first_steps(table, index)
    index.note(*(table[name].to_numpy() for name in ("series", "iteration", "value", "flags")))
    return index, table


def _with_first_steps(table: pa.Table, index: SeriesIndex) -> pa.Table:
    """The table with the mark of delayed scaling's first step, which the logs do not have.

    A tensor has such a step where its factor is 1 in the first iteration of a run, and later no power of two; and in
    iteration 0, where the name of a statistic says that it is of delayed scaling.
    """
    series, iterations = table["series"].to_numpy(), table["iteration"].to_numpy()
    segments, values = table["segment"].to_numpy(), table["value"].to_numpy()
    first = np.zeros(len(table), bool)
    subjects = list(index.subjects)
    families = [family_of(subject.tensor, subject.statistic) for subject in subjects]
    for segment in np.unique(segments).tolist():
        begin = int(iterations[segments == segment].min())
        at_begin = (segments == segment) & (iterations == begin)
        unscaled: set[tuple[str, str, int | None]] = set()
        for number, (subject, family) in enumerate(zip(subjects, families, strict=True)):
            request = family.request
            if request is None or not family.is_of_delayed_scaling:
                continue
            rows = slice(*np.searchsorted(series, (number, number + 1)).tolist())
            is_named = begin == 0 and request.recipe == "fp8_delayed_scaling"
            if is_named or (request.statistic.of is Of.SCALES and _begins_unscaled(values[rows], at_begin[rows])):
                unscaled.add((subject.layer, subject.tensor, subject.rank))
        marked = [
            number
            for number, (subject, family) in enumerate(zip(subjects, families, strict=True))
            if family.is_of_delayed_scaling and (subject.layer, subject.tensor, subject.rank) in unscaled
        ]
        first |= at_begin & np.isin(series, marked)
    if not first.any():
        return table
    place = table.column_names.index("flags")
    flags = table["flags"].to_numpy() | np.where(first, STEP0, 0).astype(np.uint8)
    return table.set_column(place, table.schema.field(place), pa.array(flags))


def _note_unknown_first_steps(table: pa.Table, index: SeriesIndex, notes: list[str]) -> None:
    """Say where the worst numbers may be delayed scaling's first step: there is no factor to decide it by."""
    flags, iterations, values = (table[name].to_numpy() for name in ("flags", "iteration", "value"))
    series = table["series"].to_numpy()
    families = [family_of(subject.tensor, subject.statistic) for subject in index.subjects]
    with_factor = {
        (subject.layer, subject.tensor, subject.rank)
        for subject, family in zip(index.subjects, families, strict=True)
        if family.request is not None and family.request.statistic.of is Of.SCALES
    }
    judged, first_is_worst = 0, 0
    for number, (subject, family) in enumerate(zip(index.subjects, families, strict=True)):
        if not (family.has_direction and family.is_of_delayed_scaling):
            continue
        rows = slice(*np.searchsorted(series, (number, number + 1)).tolist())
        own = values[rows]
        if (subject.layer, subject.tensor, subject.rank) in with_factor or len(own) < 2 or iterations[rows][0]:
            continue
        if not flags[rows][0] & STEP0:
            bad = badness(own, sign_of(family.worse))
            judged, first_is_worst = judged + 1, first_is_worst + int(bad[0] > bad[1:].max())
    if 2 * first_is_worst > judged:
        notes.append(
            f"In {first_is_worst} of {judged} series of quantization the number of step 0 is the worst. With delayed"
            " scaling that step has no scale yet and says nothing of others, but this log does not name the recipe. Log"
            " scale_inv_min too: by it such a step is known, and left out."
        )


def _begins_unscaled(factors: npt.NDArray[np.float64], at_begin: npt.NDArray[np.bool_]) -> bool:
    """Whether factors begin with 1, and are other numbers later than the powers of two of blocks."""
    later = factors[~at_begin & np.isfinite(factors)]  # a small one is 0, rounded to four decimals
    return bool(at_begin.any() and (factors[at_begin] == 1).all() and (np.frexp(later)[0] != 0.5).any())


def _last_of_each(table: pa.Table) -> pa.Table:
    """The last row of each series and iteration: one that was run again counts as it ran last."""
    series, iterations = table["series"].to_numpy(), table["iteration"].to_numpy()
    ends = np.r_[(series[1:] != series[:-1]) | (iterations[1:] != iterations[:-1]), True]
    return table if ends.all() else table.filter(pa.array(ends))


def _agreeing(table: pa.Table, ranks: int) -> npt.NDArray[np.bool_]:
    """[names]: whether all ranks that have a number have the same, in the same iterations, by a sum of hashes."""
    series = table["series"].to_numpy()
    bits = table["value"].to_numpy().view(np.uint64)
    mixed = (bits ^ (table["iteration"].to_numpy().astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))) * np.uint64(
        0xBF58476D1CE4E5B9
    )
    mixed ^= mixed >> np.uint64(31)
    starts = np.flatnonzero(np.r_[True, series[1:] != series[:-1]])
    sums = np.add.reduceat(mixed, starts)
    names = series[starts] // ranks
    firsts = np.flatnonzero(np.r_[True, names[1:] != names[:-1]])
    same = np.logical_and.reduceat(sums == np.repeat(sums[firsts], np.diff(np.r_[firsts, len(names)])), firsts)
    agree = np.ones(int(names.max()) + 1, bool)
    agree[names[firsts]] = same
    return agree
