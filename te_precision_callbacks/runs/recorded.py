"""A recorded run, as tables, and the exceptions of reading runs.

run = open_run("logs")
run.layers, run.gemms, run.series, run.steps, run.scalars, run.events     # Arrow tables
run.values([3, 4])                                                        # values of two series, by iteration
grid = run.grid("underflows%", "activation")                              # layers x iterations, nan without a value
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import OptionError, PrecisionDebugError
from te_precision_callbacks.runs.tables import Subject, subjects_of
from te_precision_callbacks.statistics.arrays import Floats, Ints, Mask


class RunError(PrecisionDebugError, ValueError):
    """A recorded run cannot be read."""


class NotARunError(RunError): ...


class UnknownSubjectError(RunError):
    """A run has no values for the requested layer, tensor, statistic, GEMM, scope or rank."""


class SeveralRunsError(RunError):
    """A folder has several runs, and the caller did not choose one.

    Attributes:
        runs: the names of the runs.
    """

    def __init__(self, message: str, runs: Sequence[str]) -> None:
        super().__init__(message)
        self.runs = tuple(runs)


_MOST_NAMES = 8


def format_known_names(name: str, known: Iterable[str]) -> str:
    """Return a sentence with the known names, for an error about an unknown one: all of them, or similar ones."""
    names = list(known)
    if not names:
        return ""
    if len(names) <= _MOST_NAMES:
        return f" It has {', '.join(map(repr, names))}."
    near = get_close_matches(name, names, 3, 0.4) or names[:3]
    return f" It has {', '.join(map(repr, near))} and {len(names) - len(near)} more."


_SELECTED = ("layer", "tensor", "statistic", "gemm", "scope", "rank")

Said = Literal["", "unread", "damaged"]
Source = Literal["te-precision-callbacks", "nvidia-dlfw-inspect"]
Status = Literal["running", "ended", "failed", "stopped without an end", "unknown"]


@dataclass(frozen=True)
class Segment:
    """A part of a run, recorded from one start; a resumed run has several.

    Attributes:
        status: ``running``, ``ended``, ``failed`` after an error, or ``stopped without an end``; ``unknown`` for logs.
        started_at, ended_at: ISO 8601, UTC; empty if unknown.
        world: number of ranks.
        facts: content of run.json: versions, environment, config_text, config_hash, recipes, integration, gpu,
            capability, te_backend, ...
        without_end: ranks without a recorded end, where rank 0 has recorded one.
    """

    number: int
    status: Status
    started_at: str
    ended_at: str
    first_iteration: int
    world: int
    facts: Mapping[str, Any]
    without_end: tuple[int, ...] = ()

    @property
    def lost(self) -> str:
        """Return why the records could not be written to their end, as by a full disk; empty if they were."""
        return str(self.facts.get("not_written") or "")

    @property
    def who_stopped(self) -> str:
        """Return the subject of a sentence on a segment that stopped without an end."""
        if self.without_end:
            return f"rank {', '.join(map(str, self.without_end))}"
        return "the run"


_SPEED_METRIC = re.compile(
    r"(?:^|[/_])(?:runtime|(?:samples|steps|tokens)_per_second(?:_per_gpu)?|total_flos|epoch|num_input_tokens_seen"
    r"|(?:model_preparation|jit_compilation)_time)$"
)


class Grid(NamedTuple):
    """A statistic of a tensor, by layer and iteration.

    Attributes:
        layers: in execution order.
        iterations: [iterations], int64, ascending.
        values: [layers, iterations], float64; nan without a value.
        present: [layers, iterations], bool: whether there is a value, which may be nan.
    """

    layers: list[str]
    iterations: Ints
    values: Floats
    present: Mask


LayerT = TypeVar("LayerT", bound=Hashable)


def sort_by_position(rows: Iterable[tuple[LayerT, float | None]]) -> list[LayerT]:
    """Sort layers by their first place; those without a place follow, as they come."""
    places: dict[LayerT, float] = {}
    for layer, place in rows:
        places.setdefault(layer, math.inf)
        if place is not None:
            places[layer] = min(places[layer], place)
    return sorted(filter(None, places), key=places.__getitem__)


class Curve(NamedTuple):
    """Values over time."""

    iterations: Ints
    values: Floats

    def equals(self, other: Curve) -> bool:
        same = np.array_equal(self.iterations, other.iterations)
        return same and np.array_equal(self.values, other.values, equal_nan=True)


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A recorded run, in the current state of its files. From its first step on, a segment replaces earlier ones.

    Attributes:
        source: the program that recorded it.
        segments: the starts of the run, in order.
        layers, gemms, operands, states, plan: facts of all ranks and segments, possibly empty.
        series: :data:`~te_precision_callbacks.runs.tables.SERIES`; ``series`` is the index of the row.
        steps, scalars, events: as in :mod:`te_precision_callbacks.runs.tables`, by iteration.
        said: text of a note -> whether it is about an unreadable part, and this a damaged file. Complete only after
            the data were read.
        read_values: reads ``segment, iteration, series, value, flags`` of some or all series, sorted by series and
            iteration.
        read_vectors: reads ``segment, iteration, series, bin, count`` in the same order.
    """

    path: Path
    source: Source
    run_id: str
    segments: tuple[Segment, ...]
    layers: pa.Table
    gemms: pa.Table
    operands: pa.Table
    states: pa.Table
    plan: pa.Table
    series: pa.Table
    steps: pa.Table
    scalars: pa.Table
    events: pa.Table
    read_values: Callable[[list[int] | None], pa.Table] = field(repr=False)
    read_vectors: Callable[[list[int] | None], pa.Table] = field(repr=False)
    said: Mapping[str, Said] = field(default_factory=dict, repr=False)

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes on missing or damaged parts; complete only after the data were read."""
        return tuple(self.said)

    @property
    def unread(self) -> tuple[str, ...]:
        return tuple(text for text, kind in self.said.items() if kind)

    def require_undamaged(self) -> None:
        """Raise a RunError, after the rest of the run was used, if a file is damaged."""
        damaged = [text for text, kind in self.said.items() if kind == "damaged"]
        if damaged:
            text = f"{self.path} is damaged, and only the rest was read. {damaged[0]}"
            if len(damaged) > 1:
                text += f" {len(damaged) - 1} more of its files are damaged."
            raise RunError(text)

    @property
    def missing_contents(self) -> str:
        """A sentence about contents that a plain log does not have; empty for recorded runs."""
        if self.source == "te-precision-callbacks":
            return ""
        return f"A log of {self.source}, without layers, coverage and trainer metrics."

    def values(self, series: Iterable[int] | None = None) -> pa.Table:
        """Read values of some or all series, sorted by series and iteration."""
        return self.read_values(None if series is None else sorted(set(series)))

    def vectors(self, series: Iterable[int] | None = None) -> pa.Table:
        """Read histograms of some or all series, sorted by series and iteration."""
        return self.read_vectors(None if series is None else sorted(set(series)))

    @cached_property
    def subjects(self) -> list[Subject]:
        return list(subjects_of(self.series))

    @cached_property
    def curves(self) -> dict[str, Curve]:
        rows_of = group_by_key(zip(self.scalars["name"].to_pylist(), itertools.count()))
        iterations = self.scalars["iteration"].to_numpy()
        values = self.scalars["value"].to_numpy()
        return {name: Curve(iterations[rows], values[rows]) for name, rows in rows_of.items() if name}

    @cached_property
    def metrics(self) -> dict[str, Curve]:
        """The curves that are no speeds; of several values in an iteration the last one."""
        metrics = {}
        for name, (iterations, values) in self.curves.items():
            if not _SPEED_METRIC.search(name):
                unique, from_end = np.unique(iterations[::-1], return_index=True)
                metrics[name] = Curve(unique, values[::-1][from_end])
        return metrics

    def select(self, **wanted: str | int | None) -> list[int]:
        """Return the series with the given ``layer``, ``tensor``, ``statistic``, ``gemm``, ``scope`` and ``rank``.

        ``rank=None`` selects reduced values. If each value exists, but not their combination, the result is empty.

        Raises:
            OptionError: there is no such column.
            UnknownSubjectError: no series has a given value.
        """
        table = self.series
        for column, value in wanted.items():
            if column not in _SELECTED:
                raise OptionError(f"select() takes no {column}=. It takes {', '.join(_SELECTED)}.")
            if value is None:
                table = table.filter(pc.is_null(table[column]))
            else:
                self._check_known(column, value)
                table = table.filter(pc.equal(table[column], pa.scalar(value)))
        numbers: list[int] = table["series"].to_pylist()
        return numbers

    def events_of_ranks(self) -> list[dict[str, Any]]:
        """Return events as mappings with ``ranks``; equal events of several ranks in an iteration are merged."""
        merged: dict[tuple[Any, ...], dict[str, Any]] = {}
        for row in self.events.to_pylist():
            rank = row.pop("rank")
            key = tuple(value for name, value in row.items() if name != "wall_time")
            merged.setdefault(key, {**row, "ranks": set()})["ranks"].add(rank)
        return [{**row, "ranks": sorted(row["ranks"] - {None})} for row in merged.values()]

    def _check_known(self, column: str, value: str | int) -> None:
        known = sorted(set(pc.unique(self.series[column]).to_pylist()) - {None, ""})
        if len(self.series) and value != "" and value not in known:
            names = format_known_names(str(value), map(str, known))
            if not names:
                names = f" It names no {column}."
                if column == "rank":
                    names = " All its values are reduced over ranks."
            raise UnknownSubjectError(f"{self.path}: the run has no {column} {value!r}.{names}{self.notes_sentence}")

    @property
    def notes_sentence(self) -> str:
        """The notes as the end of an error message, which unreadable parts may explain."""
        if self.notes:
            return f" Notes on {self.path}: {' '.join(self.notes)}"
        return ""

    @cached_property
    def ordered_layers(self) -> list[str]:
        columns = self.layers["layer"].to_pylist(), self.layers["exec_fwd"].to_pylist()
        return sort_by_position((*zip(*columns, strict=True), *((subject.layer, None) for subject in self.subjects)))

    def grid(self, statistic: str, tensor: str, *, rank: int | None = None) -> Grid:
        """Return a statistic of a tensor in all layers and iterations; raises UnknownSubjectError if there is none."""
        numbers = self.select(statistic=statistic, tensor=tensor, rank=rank)
        if not numbers and len(self.series):
            known: dict[str, None] = {}
            for subject in self.subjects:
                if subject.statistic == statistic:
                    known[f"{subject.tensor!r} with rank={subject.rank}"] = None
            raise UnknownSubjectError(
                f"{self.path}: the run has no {statistic!r} of {tensor!r} with rank={rank}, only of {', '.join(known)}."
                " Values with rank=None are reduced over ranks."
            )
        layer_of = {number: layer for number in numbers if (layer := self.subjects[number].layer)}
        with_values = set(layer_of.values())
        layers = [layer for layer in self.ordered_layers if layer in with_values]
        table = self.values(layer_of)
        iterations, column = np.unique(table["iteration"].to_numpy(), return_inverse=True)
        row_of = {number: layers.index(layer) for number, layer in layer_of.items()}
        rows = [row_of[number] for number in table["series"].to_pylist()]
        values = np.full((len(layers), len(iterations)), np.nan)
        values[rows, column] = table["value"].to_numpy()
        present = np.zeros(values.shape, bool)
        present[rows, column] = True
        return Grid(layers, iterations, values, present)
