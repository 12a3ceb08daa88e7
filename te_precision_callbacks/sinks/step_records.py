"""The records of a step, the facts of a run, and the sink protocol."""

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

from te_precision_callbacks.base.errors import error_text
from te_precision_callbacks.statistics.series import Family, Series, SeriesTable


class Row(NamedTuple):
    """A value of a step.

    Attributes:
        layer: the layer's name; empty for a value that a user's feature logged under its own name.
        tensor: ``activation``, ``weight``, ``gradient``, ``output``, ``wgrad`` or ``dgrad``; empty if ``layer`` is.
        gemm: ``fprop``, ``dgrad`` or ``wgrad`` if the value belongs to one GEMM, else None.
    """

    layer: str
    tensor: str
    gemm: str | None
    statistic: str
    value: float


@dataclass(frozen=True, eq=False)
class StepRecords:
    """The values of a debug iteration, by series. Iterating yields :class:`Row` objects.

    Attributes:
        iteration: the debug iteration: counted by the session from 0, restored on resume.
        logging_step: the step of the trainer's own metrics of the same batch.
        table: the series of the run.
        series: [values], int32: the series of each value.
        values: [values], float64.
        histograms: series -> counts.
        local: whether the values are local although statistics are reduced over ranks: values collected after the last
            step, and all values while ranks are disconnected.
        own: [values]: True for a local value, as from users' features. False for a value that is equal on all ranks,
            or, while ranks are disconnected, is written by the first rank only.
        observe_seconds: seconds that the session took at the end of the step, without sinks; None if unknown.
        unscaled: the layers that ran delayed scaling in this step with a scale of 1, before the first amax. Their
            quantization statistics do not count as worst values of a run.
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
        """The values by tensor and statistic: family -> layer -> value."""
        families: dict[Family, dict[str, float]] = {}
        for number, value in zip(self.series.tolist(), self.values, strict=True):
            layer, family = self.table[number]
            families.setdefault(family, {})[layer] = value
        return families

    @property
    def vectors(self) -> Mapping[tuple[str, str, str], tuple[float, ...]]:
        vectors = {}
        for number, counts in self.histograms.items():
            layer, family = self.table[number]
            vectors[layer, family.tensor, family.statistic] = counts
        return vectors


def row_of(series: Series, value: float) -> Row:
    family = series.family
    return Row(series.layer, family.tensor, family.gemm, family.statistic, value)


@dataclass(frozen=True)
class LayerInfo:
    """A layer, and its features in the config.

    Attributes:
        sections: the sections of the config that select it.
        features: namespace -> feature -> options, as passed to nvidia-dlfw-inspect.
        scope: first part of its name, if layers of other ranks have the same path; else empty.
        given: the script's name for the layer, if unique, used by the statistics log and ``summary``.
        refused: why Transformer Engine's debug path does not support the layer, or some of its forwards, which are not
            observed.
        exec_fwd, exec_bwd: position of its first forward and backward among this rank's layers; None if it has not run,
            or was not observed.
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
    """The facts of a run, which each sink receives once, before the first step.

    Attributes:
        log_dir: the folder of the session's files.
        rank, world_size: as in torch.distributed; 0 and 1 without it.
        start_iteration: the first debug iteration; above 0 on resume.
        layers: all observable layers of the model.
        versions: package -> version, for packages that affect the values.
        config: the source of the config: a path or ``<mapping>``.
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
        kind: ``nonfinite``, ``dump_written``, ...; see docs/records.md.
        phase: ``forward``, ``backward``, ``step`` or ``checkpoint``, if relevant.
        layer, tensor, gemm: the subject; empty if there are several.
        data: details, as JSON values.
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


def end_of(error: BaseException | None, iteration: int, step: int) -> Event:
    """Return the event of a segment's end.

    Args:
        iteration: the last debug iteration.
        step: the debug iteration that its end has interrupted.
    """
    text = "The session was stopped." if error is None else error_text(error)
    severity: Severity = "info" if error is None else "error"
    return Event("segment_ended", text, iteration, severity, data={"step": step})


@dataclass(frozen=True)
class Scalars:
    """Scalars that the trainer logs: loss, gradient norm, learning rate, loss scale."""

    iteration: int
    logging_step: int
    values: Mapping[str, float]


@runtime_checkable
class Sink(Protocol):
    """Receiver of records. A sink that raises is reported once and dropped; with ``strict=True`` it ends the run.

    The methods of the base class do nothing; override what you need.
    """

    def start(self, run: RunInfo) -> None:
        """Receive the facts of the run. Called once, before the first step, when the layers are known."""
        return

    def write(self, records: StepRecords) -> None:
        """Receive the records of a step. Called at the end of each step with records, on every rank.

        May be called again with the same records after an interruption.
        """
        return

    def close(self, error: BaseException | None) -> None:
        """End the run. Called once; ``error`` is the exception that ended the run, None after a normal end."""
        return


@runtime_checkable
class EventSink(Sink, Protocol):
    """A sink that also receives events and the trainer's scalars, on every rank."""

    def event(self, event: Event) -> None:
        return

    def scalars(self, scalars: Scalars) -> None:
        return
