"""The layers of a run in the order of execution, and its families of statistics."""

from __future__ import annotations

import itertools
import os
import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np

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

_BLOCK = re.compile(r"^(.*?(?:^|\.)\d+)(?=\.)")


class ReportError(PrecisionDebugError, ValueError):
    """A report cannot be made: the run has no values, or the file cannot be written."""


@dataclass(frozen=True)
class ReportLayer:
    """A layer of the run; ``block`` is the repeated part of the model that contains it, such as ``layers.3``, or empty.
    Short names are for plots, without control characters.
    """

    name: str
    block: str
    short: str
    block_short: str


@dataclass(frozen=True)
class FamilySeries:
    """The series of a statistic of a tensor in all layers and ranks; all arrays are [n].

    Attributes:
        series: indices of the series.
        layer: indices in :attr:`Subjects.layers`; -1 without a layer.
        rank: :data:`REDUCED` for reduced values.
        count: the number of values.
    """

    family: Family
    series: Ints
    layer: Ints
    rank: Ints
    count: Ints

    @property
    def is_histogram(self) -> bool:
        request = self.family.request
        return request is not None and request.statistic.is_histogram

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

    ``free``: the families without a layer.
    """

    def __init__(self, run: RecordedRun) -> None:
        names = [layer_name(subject.scope, subject.layer) for subject in run.subjects]
        self.layers = _layers(run, names)
        self.place_of_layer = {layer.name: number for number, layer in enumerate(self.layers)}
        layer = np.array([self.place_of_layer.get(name, -1) for name in names], np.int64)
        rank = run.series["rank"].fill_null(REDUCED).to_numpy().astype(np.int64)
        count = run.series["count"].fill_null(0).to_numpy().astype(np.int64)
        number = run.series["series"].to_numpy().astype(np.int64)
        members: dict[Family, list[int]] = {}
        for row, subject in enumerate(run.subjects):
            members.setdefault(family_of(subject.tensor, subject.statistic, subject.gemm or None), []).append(row)
        all_series = []
        for family, listed in members.items():
            rows = np.array(listed)
            all_series.append(FamilySeries(family, number[rows], layer[rows], rank[rows], count[rows]))
        places: dict[str, int] = {tensor: place for place, tensor in enumerate(TENSORS)}
        # The order of their first values is arbitrary.
        all_series.sort(key=lambda series: places.get(series.family.tensor, len(places)))
        self.histograms: list[FamilySeries] = []
        self.families: list[FamilySeries] = []
        self.free: list[FamilySeries] = []
        for series in all_series:
            if series.is_histogram:
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


def _layers(run: RecordedRun, of_series: list[str]) -> list[ReportLayer]:
    placed = [(layer_name(row["scope"], row["layer"]), row["exec_fwd"]) for row in run.layers.to_pylist()]
    names = sort_by_position((*placed, *zip(of_series, itertools.repeat(None))))
    blocks = list(map(_block, names))
    short = ShortNames(map(visible, names))
    short_blocks = ShortNames(map(visible, blocks))
    layers = []
    for name, block in zip(names, blocks, strict=True):
        label = short.of(visible(name), SHORT)
        layers.append(ReportLayer(name, block, label, short_blocks.of(visible(block), SHORT)))
    return layers


def _block(name: str) -> str:
    match = _BLOCK.match(name)
    if match:
        return match[1]
    return ""
