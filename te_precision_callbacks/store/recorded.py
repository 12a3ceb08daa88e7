"""A recorded run, as tables.

run = open_run("logs")
run.layers, run.gemms, run.series, run.steps, run.scalars, run.events     # Arrow tables
run.values([3, 4])                                                        # their numbers, by series and iteration
grid = run.grid("underflows%", "activation")                              # layers x iterations, nan where there is none
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Source = Literal["te-precision-callbacks", "nvidia-dlfw-inspect"]
Status = Literal["running", "ended", "failed", "killed", "unknown"]


@dataclass(frozen=True)
class Segment:
    """A process start of a run; a resumed run has several.

    Attributes:
        number: from 0.
        status: ``running`` while its process lives, ``killed`` if it has gone without an end.
        started_at, ended_at: times in ISO 8601, UTC; empty if unknown.
        first_iteration: the first debug iteration.
        world: the number of ranks.
        facts: everything that run.json says: versions, environment, config_text, config_hash, recipes, front_door, gpu,
            capability, te_backend, mesh, ...
    """

    number: int
    status: Status
    started_at: str
    ended_at: str
    first_iteration: int
    world: int
    facts: Mapping[str, Any]


class Grid(NamedTuple):
    """A statistic of a tensor in all layers and steps.

    Attributes:
        layers: in the order of execution.
        iterations: [iterations], int64, ascending.
        values: [layers, iterations], float64; nan where there is no number.
        present: [layers, iterations], bool: whether there is a number, which may be nan itself.
    """

    layers: list[str]
    iterations: npt.NDArray[np.int64]
    values: npt.NDArray[np.float64]
    present: npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class RecordedRun:
    """A run that was recorded, or is being recorded, as its files have it now.

    An iteration that stands in several segments counts in the last one.

    Attributes:
        path: the folder or file that it was read from.
        source: who has written it.
        run_id: the run.
        segments: its process starts, in order.
        layers, gemms, operands, states, plan: facts, of all ranks and segments: tables of
            :mod:`te_precision_callbacks.store.tables`, empty where the source does not tell them.
        series: :data:`~te_precision_callbacks.store.tables.SERIES`; ``series`` counts from 0 and is the row's number.
        steps, scalars, events: as in :mod:`te_precision_callbacks.store.tables`, by iteration.
        notes: what is missing or damaged, in words, for whoever looks at the run.
        read_values: gives the columns ``segment, iteration, series, value, flags`` of some series, or of all, sorted by
            series and iteration.
        read_vectors: gives ``segment, iteration, series, bin, count`` likewise.
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
    notes: tuple[str, ...] = ()

    def values(self, series: Iterable[int] | None = None) -> pa.Table:
        """The numbers of some series, or of all: ``segment, iteration, series, value, flags``, sorted by series and
        iteration."""
        return self.read_values(None if series is None else sorted(set(series)))

    def vectors(self, series: Iterable[int] | None = None) -> pa.Table:
        """The histograms of some series, or of all: ``segment, iteration, series, bin, count``, sorted likewise."""
        return self.read_vectors(None if series is None else sorted(set(series)))

    def select(self, **wanted: str | int | None) -> list[int]:
        """The numbers of the series whose columns have these values: ``layer``, ``tensor``, ``statistic``, ``gemm``,
        ``scope``, ``rank``; ``rank=None`` selects what is reduced over ranks."""
        mask = None
        for column, value in wanted.items():
            found = self.series[column]
            is_it = pc.is_null(found) if value is None else pc.fill_null(pc.equal(found, pa.scalar(value)), False)
            mask = is_it if mask is None else pc.and_(mask, is_it)
        table = self.series if mask is None else self.series.filter(mask)
        numbers: list[int] = table["series"].to_pylist()
        return numbers

    @cached_property
    def ordered_layers(self) -> list[str]:
        """All layers, in the order of execution as far as it was seen, then in the order of the model."""
        by_place: dict[str, float] = {}
        for layer, place in zip(self.layers["layer"].to_pylist(), self.layers["exec_fwd"].to_pylist(), strict=True):
            by_place.setdefault(layer, np.inf)
            if place is not None:
                by_place[layer] = min(by_place[layer], place)
        for layer in pc.unique(self.series["layer"]).to_pylist():
            if layer:
                by_place.setdefault(layer, np.inf)
        return sorted(by_place, key=lambda layer: by_place[layer])

    def grid(self, statistic: str, tensor: str, *, rank: int | None = None) -> Grid:
        """A statistic of a tensor, in all layers that have it and all iterations.

        Args:
            statistic: as in ``series``.
            tensor: likewise.
            rank: the rank whose own numbers are meant; None for what is reduced over ranks.
        """
        numbers = self.select(statistic=statistic, tensor=tensor, rank=rank)
        layer_of = dict(zip(numbers, self.series["layer"].take(pa.array(numbers, pa.int64())).to_pylist(), strict=True))
        found = set(layer_of.values())
        layers = [layer for layer in self.ordered_layers if layer in found]
        table = self.values(numbers)
        iterations, column = np.unique(table["iteration"].to_numpy(), return_inverse=True)
        place = {layer: row for row, layer in enumerate(layers)}
        row_of = np.zeros(max(numbers, default=-1) + 1, np.int64)
        for number, layer in layer_of.items():
            row_of[number] = place[layer]
        rows = row_of[table["series"].to_numpy()]
        values = np.full((len(layers), len(iterations)), np.nan)
        values[rows, column] = table["value"].to_numpy()
        present = np.zeros(values.shape, bool)
        present[rows, column] = True
        return Grid(layers, iterations, values, present)
