"""What a comparison finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.views.compare.new_findings import ComparedVerdicts

Origin = Literal["made here", "inherited"]


class ComparisonError(PrecisionDebugError, ValueError):
    """Runs that cannot be compared: nothing pairs."""


@dataclass(frozen=True)
class FactDifference:
    """A fact in which the sides differ.

    Attributes:
        name: such as ``versions.torch``, ``recipes``, ``coverage``; ``config`` for a line of the config.
        a, b: what it is; empty where a side does not have it. A line of the config comes after the keys that it is
            under, such as ``statistics / LogTensorStats: freq: 5``.
    """

    name: str
    a: str
    b: str


@dataclass(frozen=True)
class StatisticDeparture:
    """A statistic that departs, and stays away.

    Attributes:
        statistic: its name.
        gemm: the GEMM, if the number belongs to one; else empty.
        iteration: the first one.
        until: the last one.
        steps: how many steps of the series it lasts.
        to_the_end: whether it lasts to the end of what was compared.
        a, b: the medians of both sides over these steps.
        difference: the median of b - a over these steps, in ``unit``.
        unit: ``powers of two`` for magnitudes, ``points`` for percentages, ``dB``, or ``of its size`` for what may have
            any sign.
        spread: the noise floor of the statistic, in ``unit``; None if there is none.
        bound: the difference from which on it counts, in ``unit``.
    """

    statistic: str
    gemm: str
    iteration: int
    until: int
    steps: int
    to_the_end: bool
    a: float
    b: float
    difference: float
    unit: str
    spread: float | None
    bound: float

    @property
    def strength(self) -> float:
        """How far beyond its bound it is, as a multiple of it."""
        return abs(self.difference) / self.bound


@dataclass(frozen=True)
class Parting:
    """A tensor in which the sides part.

    Attributes:
        scope, layer, tensor: what; layer and tensor are empty for a number of the trainer, such as the loss.
        rank: the rank whose own numbers they are; None if they are reduced over ranks.
        iteration: the first one.
        since: the first one at which it may have begun, which is earlier where the tensor does not have numbers in each
            step. Tensors that inherit from it come after it, even if they have numbers in between.
        departures: the statistics that depart, the strongest first.
        origin: ``made here`` if nothing that the tensor is made of has departed by as much before; else ``inherited``.
        source: the tensor that it inherits most of the difference from, such as ``layers.3.fc1 weight``; else empty.
    """

    scope: str
    layer: str
    tensor: str
    rank: int | None
    iteration: int
    since: int
    departures: tuple[StatisticDeparture, ...]
    origin: Origin
    source: str

    @property
    def strongest(self) -> StatisticDeparture:
        """The statistic that is farthest beyond its bound."""
        return self.departures[0]

    @property
    def name(self) -> str:
        """Layer, tensor and rank, in words."""
        subject = " ".join(part for part in (self.layer, self.tensor) if part) or self.strongest.statistic
        return subject if self.rank is None else f"{subject} (rank {self.rank})"


@dataclass(frozen=True)
class FirstUnequal:
    """The first number that is not the same on both sides, to the last bit.

    Attributes:
        iteration: when.
        scope, layer, tensor, statistic: what; layer and tensor are empty for a number of the trainer.
    """

    iteration: int
    scope: str
    layer: str
    tensor: str
    statistic: str


@dataclass(frozen=True)
class Pairing:
    """What could be compared.

    Attributes:
        series: how many series are on both sides, with a step in common.
        without_steps: how many are on both sides, with none.
        only_a, only_b: how many are on one side only.
        layers: how many layers are on both sides.
        layers_only_a, layers_only_b: the layers that are on one side only.
        statistics_only_a, statistics_only_b: the statistics that are on one side only.
        first, last: iterations of the steps that both sides have.
        with_other_rows: the layers whose inputs have another number of rows in a step of the other side, such as with
            another batch size.
        steps: how many steps have numbers of both sides.
    """

    series: int
    without_steps: int
    only_a: int
    only_b: int
    layers: int
    layers_only_a: tuple[str, ...]
    layers_only_b: tuple[str, ...]
    statistics_only_a: tuple[str, ...]
    statistics_only_b: tuple[str, ...]
    first: int | None
    last: int | None
    with_other_rows: tuple[str, ...] = ()
    steps: int = 0


@dataclass(frozen=True)
class Floor:
    """Where the ordinary spread is known from.

    Attributes:
        sides: what was compared with A, and with each other.
        without: how many of the series that pair have no counterpart there; fixed bounds hold for them.
    """

    sides: tuple[str, ...]
    without: int


@dataclass(frozen=True)
class Yardstick:
    """A known bound for the difference of two losses.

    Attributes:
        name: of what against what.
        bound: relative, such as 0.0025.
        source: who has measured it.
        holds: whether the losses are within it; None if the runs are not of these precisions.
    """

    name: str
    bound: float
    source: str
    holds: bool | None


@dataclass(frozen=True)
class LossSpike:
    """Steps in which one loss is ten times the other or more, and the running medians are not.

    Attributes:
        steps: how many they are.
        iteration: the one with the largest factor.
        a, b: the losses there.
    """

    steps: int
    iteration: int
    a: float
    b: float


@dataclass(frozen=True)
class LostLoss:
    """A loss that is no number any more, to the end of its run.

    Attributes:
        since: the first iteration of these.
        until: the last one, which is that of the run's losses.
        what: ``nan``, ``inf`` or ``-inf``; of several of them all, such as ``inf or nan``.
    """

    since: int
    until: int
    what: str


@dataclass(frozen=True)
class LossComparison:
    """The loss curves, smoothed by a running median, up to where either is lost.

    Attributes:
        name: the number's name.
        steps: how many steps both have, up to where either is lost. Without any, the numbers below are nan.
        window: the steps of the running median.
        stable_since: the iteration from which on a quarter of the steps is left, the stable phase.
        a, b: the means in the stable phase.
        relative: the mean of (b - a) / |a| in the stable phase.
        largest: the largest |b - a| / |a| of the last three quarters, and ``largest_at`` its iteration.
        floor: the largest magnitude of ``relative`` among the sides of the noise; None without one.
        yardsticks: the known bounds.
        spike: what the running median hides; None if there is nothing, or the noise has as much.
        precisions: what A and B compute in: the low precision of a run that has one, else its most frequent precision.
            Empty if nothing is known.
        lost_a, lost_b: where the loss of A and of B is lost; None where it is not.
    """

    name: str
    steps: int
    window: int
    stable_since: int
    a: float
    b: float
    relative: float
    largest: float
    largest_at: int
    floor: float | None
    yardsticks: tuple[Yardstick, ...]
    spike: LossSpike | None = None
    precisions: tuple[str, str] = ("", "")
    lost_a: LostLoss | None = None
    lost_b: LostLoss | None = None

    @property
    def is_finding(self) -> bool:
        """Whether one of the losses is lost, there is a spike, or the difference is beyond a yardstick that is for
        these runs, and the noise."""
        if self.spike is not None or (self.lost_a is None) != (self.lost_b is None):
            return True
        broken = any(yardstick.holds is False for yardstick in self.yardsticks)
        return broken and (self.floor is None or abs(self.relative) > self.floor)


@dataclass(frozen=True)
class Comparison:
    """How two runs differ.

    Attributes:
        a, b: what the sides are.
        facts: what differs beside the numbers: config, versions, recipe, environment, coverage.
        pairing: what could be compared.
        lasting: the steps that a difference must last; in a series with fewer it must last all of them.
        floor: where the ordinary spread is known from; None without one.
        ordered: whether the order of execution is known; else layers are in the order of their first numbers.
        parted: the tensors in which the sides part, by iteration, and within one by the order of execution.
        first_unequal: the first number that differs at all; None if none does.
        loss: the losses; None if a side has none.
        notes: what is missing or damaged, in words.
        same_run: whether a run is compared with itself.
        verdicts: the findings of the rules on both sides; None for a run with itself.
        layers_apart: why only numbers of the trainer, such as the loss, were compared, and what to do; else empty.
    """

    a: str
    b: str
    facts: tuple[FactDifference, ...]
    pairing: Pairing
    lasting: int
    floor: Floor | None
    ordered: bool
    parted: tuple[Parting, ...]
    first_unequal: FirstUnequal | None
    loss: LossComparison | None
    notes: tuple[str, ...]
    same_run: bool = False
    verdicts: ComparedVerdicts | None = None
    layers_apart: str = ""

    @property
    def first(self) -> Parting | None:
        """Where they part first; None if they do not."""
        return self.parted[0] if self.parted else None

    @property
    def has_findings(self) -> bool:
        """Whether they part, or their losses do."""
        return bool(self.parted) or (self.loss is not None and self.loss.is_finding)
