"""The layers of a run in the order of execution, and its families of statistics."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.terminal import visible
from te_precision_callbacks.base.vocabulary import TENSORS
from te_precision_callbacks.layers.folding import ShortNames
from te_precision_callbacks.runs.index import REDUCED
from te_precision_callbacks.runs.recorded import RecordedRun, sort_by_position
from te_precision_callbacks.runs.run_files import FOLDER
from te_precision_callbacks.statistics.arrays import Ints
from te_precision_callbacks.statistics.series import Family, family_of

SHORT = 42


class ReportError(PrecisionDebugError, ValueError):
    """A report cannot be made: the run has no values, or the file cannot be written."""


@dataclass(frozen=True)
class ReportLayer:
    """A layer of the run. The short name is for plots, without control characters."""

    name: str
    short: str


@dataclass(frozen=True, eq=False)
class FamilySeries:
    """The series of a statistic of a tensor in all layers and ranks; all arrays are [n].

    Attributes:
        series: indices of the series.
        layer: indices in :attr:`Subjects.layers`; -1 without a layer.
        rank: :data:`REDUCED` for reduced values.
    """

    family: Family
    series: Ints
    layer: Ints
    rank: Ints

    @property
    def ranks(self) -> list[int]:
        """The ranks with local values, and :data:`REDUCED` if there are reduced values; ascending."""
        ranks: list[int] = np.unique(self.rank).tolist()
        return ranks

    @property
    def rows(self) -> Ints:
        return np.unique(self.layer)


class Subjects:
    """The layers of a run in the order of execution, then layers that have not run, and its families of statistics.

    Attributes:
        number_of_layer: name -> index in ``layers``; also without the scope, then the first of its layers.
        families, histograms: by tensor.
        free: the families without a layer.
    """

    def __init__(self, run: RecordedRun) -> None:
        names = [layer_name(subject.scope, subject.layer) for subject in run.subjects]
        self.layers = _layers(run, names)
        self.number_of_layer = {layer.name: number for number, layer in enumerate(self.layers)}
        without_scope = dict(zip(names, (subject.layer for subject in run.subjects), strict=True))
        for row in run.layers.to_pylist():
            without_scope[layer_name(row["scope"], row["layer"])] = row["layer"]
        for number, layer in enumerate(self.layers):
            self.number_of_layer.setdefault(without_scope[layer.name], number)
        numbers = np.array([self.number_of_layer.get(name, -1) for name in names], np.int64)
        ranks = run.series["rank"].fill_null(REDUCED).to_numpy().astype(np.int64)
        members = group_by_key(
            (family_of(subject.tensor, subject.statistic, subject.gemm or None), row)
            for row, subject in enumerate(run.subjects)
        )
        order: dict[str, int] = {tensor: number for number, tensor in enumerate(TENSORS)}
        self.histograms: list[FamilySeries] = []
        self.families: list[FamilySeries] = []
        self.free: list[FamilySeries] = []
        # The order of their first values is arbitrary.
        for family in sorted(members, key=lambda family: order.get(family.tensor, len(order))):
            rows = np.array(members[family], np.int64)
            series = FamilySeries(family, rows, numbers[rows], ranks[rows])
            if family.request is not None and family.request.statistic.is_histogram:
                self.histograms.append(series)
            elif (series.layer >= 0).all():
                self.families.append(series)
            else:
                self.free.append(series)


def layer_name(scope: str | None, layer: str | None) -> str:
    """The name of a layer in a report: prefixed with the scope, unless it already begins with it."""
    if not layer or not scope or layer.startswith(f"{scope}."):
        return layer or ""
    return f"{scope}.{layer}"


def folder_name(run: RecordedRun) -> str:
    path = Path(os.path.abspath(run.path))  # without dots; links stay as they are
    above = next((parent.parent for parent in path.parents if parent.name == FOLDER), path)
    return (above.parent if above.name == FOLDER else above).name or run.run_id


def _layers(run: RecordedRun, names_of_series: list[str]) -> list[ReportLayer]:
    placed = [(layer_name(row["scope"], row["layer"]), row["exec_fwd"]) for row in run.layers.to_pylist()]
    names = sort_by_position((*placed, *zip(names_of_series, itertools.repeat(None))))
    short = ShortNames(map(visible, names))
    return [ReportLayer(name, short.of(visible(name), SHORT)) for name in names]
