"""The records of a step, the facts of a run, and the protocol of a sink."""

from __future__ import annotations

import functools
import time
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from te_precision_callbacks.statistics.series import Family, Series, SeriesTable


class Row(NamedTuple):
    """A number of a step.

    Attributes:
        layer: the layer's name; empty for a number that a user's own feature logged under a free name.
        tensor: ``activation``, ``weight``, ``gradient``, ``output``, ``wgrad`` or ``dgrad``; empty as above.
        gemm: ``fprop``, ``dgrad`` or ``wgrad`` where the number belongs to one GEMM, else None.
    """

    layer: str
    tensor: str
    gemm: str | None
    statistic: str
    value: float


@dataclass(frozen=True, eq=False)
class StepRecords:
    """The values of one debug iteration: series, and the value of each. Iterating gives :class:`Row` objects.

    Attributes:
        iteration: the debug iteration: 0-based, counted by the session, restored on resume.
        logging_step: the step of the trainer's own metrics of the same batch.
        table: the run's series.
        series: [values], int32: the series of each value.
        values: [values], float64.
        histograms: series -> counts.
        local: True if the values belong to this rank alone although statistics are reduced over ranks: values collected
            after the last step of the run, and all values while the ranks are separated.
        own: [values]: True for a value of this rank alone, such as of users' own features. False: all ranks have the
            same value; or, while the ranks are separated, the first of them writes it.
        observe_seconds: the seconds that the session took at the end of the step, without sinks; None if unknown.
        unscaled: the layers that ran delayed scaling in this step with the scale 1, before there is an amax. Their
            quantization statistics are excluded from the worst values of several steps.
        findings: rule -> number of its errors and warnings in the run so far.
    """

    iteration: int
    logging_step: int
    table: SeriesTable = field(default_factory=SeriesTable)
    series: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, np.int32))
    values: array[float] = field(default_factory=lambda: array("d"))
    histograms: Mapping[int, tuple[float, ...]] = field(default_factory=dict)
    local: bool = False
    own: Sequence[bool] = ()
    unscaled: frozenset[str] = frozenset()
    observe_seconds: float | None = None
    findings: Mapping[str, int] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.values)

    def __iter__(self) -> Iterator[Row]:
        return map(row_of, map(self.table.__getitem__, self.series.tolist()), self.values)

    @functools.cached_property
    def families(self) -> Mapping[Family, Mapping[str, float]]:
        """The numbers by tensor and statistic: family -> layer -> value."""
        families: dict[Family, dict[str, float]] = {}
        for number, value in zip(self.series.tolist(), self.values, strict=True):
            layer, family = self.table[number]
            families.setdefault(family, {})[layer] = value
        return families

    @property
    def vectors(self) -> Mapping[tuple[str, str, str], tuple[float, ...]]:
        named = ((self.table[number], counts) for number, counts in self.histograms.items())
        return {(layer, family.tensor, family.statistic): counts for (layer, family), counts in named}


def row_of(series: Series, value: float) -> Row:
    family = series.family
    return Row(series.layer, family.tensor, family.gemm, family.statistic, value)


@dataclass(frozen=True)
class LayerInfo:
    """A layer, and its features in the config.

    Attributes:
        sections: the sections of the config that select it.
        features: namespace -> feature -> options, as passed to nvidia-dlfw-inspect.
        scope: the first part of its name, if layers of other ranks have the same path; else empty.
        given: the name that the script has given to no other layer, used by the statistics log and ``summary``.
        refused: why Transformer Engine's debug path refuses the layer, or some of its forwards, which are not observed.
        exec_fwd, exec_bwd: the position of its first forward and backward among those of all layers of this rank; None
            if it has not run, or was not observed.
    """

    name: str
    module_class: str
    sections: tuple[str, ...]
    features: Mapping[str, Mapping[str, Mapping[str, Any]]]
    scope: str = ""
    given: str = ""
    refused: str = ""
    exec_fwd: int | None = None
    exec_bwd: int | None = None


@dataclass(frozen=True)
class RunInfo:
    """The facts of a run, given once to each sink before the first step.

    Attributes:
        log_dir: the folder of the session's files.
        rank, world_size: of torch.distributed; 0 and 1 without it.
        start_iteration: the first debug iteration; above 0 on resume.
        layers: every layer of the model that can be observed.
        versions: package -> version, for the packages that affect the numbers.
        config: the source of the config, a path or ``<mapping>``.
    """

    log_dir: Path
    rank: int
    world_size: int
    start_iteration: int
    layers: tuple[LayerInfo, ...]
    versions: Mapping[str, str]
    config: str


Severity = Literal["info", "warning", "error"]


@dataclass(frozen=True)
class Event:
    """An event in a run.

    Attributes:
        kind: ``nonfinite``, ``dump_written``, ...; docs/records.md has all.
        phase: ``forward``, ``backward``, ``step`` or ``checkpoint``; None if that does not matter.
        layer, tensor, gemm: the subject; empty if there are several.
        data: JSON values for programs.
        wall_time: seconds since the epoch.
    """

    kind: str
    text: str
    iteration: int
    severity: Severity = "info"
    phase: str | None = None
    layer: str = ""
    tensor: str = ""
    gemm: str = ""
    data: Mapping[str, Any] = field(default_factory=dict)
    wall_time: float = field(default_factory=time.time)


def end_of(error: BaseException | None, iteration: int) -> Event:
    """The end of a run, or of one of its starts; ``iteration`` is the last debug iteration."""
    text = "The session was stopped." if error is None else f"{type(error).__name__}: {error}".removesuffix(": ")
    return Event("segment_ended", text, iteration, "info" if error is None else "error")


@dataclass(frozen=True)
class Scalars:
    """Scalars that the trainer logs: loss, gradient norm, learning rate, loss scale."""

    iteration: int
    logging_step: int
    values: Mapping[str, float]


@runtime_checkable
class Sink(Protocol):
    """A receiver of records. A sink that raises is reported once and dropped; with ``strict=True`` it ends the run.

    The methods of the base class do nothing, so a sink defines only the methods that it needs.
    """

    def start(self, run: RunInfo) -> None:
        """Receive the facts of the run: called once, when the layers are known and before the first step."""
        return

    def write(self, records: StepRecords) -> None:
        """Receive a step's records: called at the end of each step that has any, on every rank; again if
        interrupted."""
        return

    def close(self, error: BaseException | None) -> None:
        """End the run: called once; ``error`` is the exception that ended it, None after a normal end."""
        return


@runtime_checkable
class EventSink(Sink, Protocol):
    """A sink that also receives what happens in a run, and the trainer's own numbers; on every rank."""

    def event(self, event: Event) -> None:
        return

    def scalars(self, scalars: Scalars) -> None:
        return
