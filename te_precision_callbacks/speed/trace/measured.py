"""What a step really took, as rows that a report prints."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from te_precision_callbacks.speed.trace.contexts import Pass
from te_precision_callbacks.speed.trace.kinds import KernelKind

KeyT = TypeVar("KeyT")


@dataclass(frozen=True)
class MeasuredProduct:
    """What kernels of one kind took for a layer in a pass, in a step.

    Attributes:
        layer: the layer of a GEMM; of other kernels its module, where several layers share one; empty where no layer is
            known.
        gemm: as ``Product.gemm``; empty for kernels of other kinds, for attention in one kernel, and where it is not
            known.
        of_pass: the pass; empty outside of forward, backward and optimizer.
        kind: what the kernels do; None if their names are unknown.
        format: the format of a GEMM's operands; empty for other kinds, and where nothing says it.
        ms: milliseconds of a step, the mean of the iterations in the trace; kernels that ran at the same time count
            fully.
        calls: kernels, or operators of the host, of a step.
        inferred: whether the layer or the GEMM was inferred from order and shape, and no range says it.
    """

    layer: str
    gemm: str
    of_pass: Pass
    kind: KernelKind | None
    format: str
    ms: float
    calls: float
    inferred: bool


class Unassigned(NamedTuple):
    """A kernel whose kind nobody knows.

    Attributes:
        name: its name.
        ms: milliseconds of a step.
    """

    name: str
    ms: float


@dataclass(frozen=True)
class Launches:
    """Why a device has been idle in a step.

    Attributes:
        kernels: kernels of a step.
        late_ms: milliseconds in which the device had no work, since the host had not launched any: it was launching.
        after_wait_ms: the same, after the host had waited for the device, as ``loss.item()`` does.
        queued_ms: milliseconds in which the device had work that was waiting, for another stream or its own start.
        device_us: the median time of a kernel, in microseconds.
        host_us: the median time from a launch to the next, in microseconds.
        is_bound: whether the step is launch bound: idle for a tenth of it or longer since the host was launching.
    """

    kernels: float
    late_ms: float
    after_wait_ms: float
    queued_ms: float
    device_us: float
    host_us: float
    is_bound: bool


@dataclass(frozen=True)
class MeasuredStep:
    """What a step really took: the mean of the iterations in a trace.

    ``sum(row.ms for row in products) - overlap_ms + idle_ms`` is ``wall_ms``.

    Attributes:
        device: the name of the device, or ``CPU``.
        on_device: whether kernels of a device were measured; else operators of the host.
        rank: the rank that the trace is of; None if it does not say it.
        iterations: the iterations in the trace; empty if no range says them, and the whole trace counts as one step.
        wall_ms: milliseconds from the first kernel of a step to that of the next one, or to the last kernel.
        busy_ms: milliseconds in which any kernel ran.
        idle_ms: the others.
        overlap_ms: milliseconds that kernels ran while another kernel ran.
        products: the rows, by time.
        unassigned: the kernels whose kind nobody knows, by time.
        launches: why the device was idle; None without a device.
        notes: what is uncertain of the measurement, in words.
    """

    device: str
    on_device: bool
    rank: int | None
    iterations: tuple[int, ...]
    wall_ms: float
    busy_ms: float
    idle_ms: float
    overlap_ms: float
    products: tuple[MeasuredProduct, ...]
    unassigned: tuple[Unassigned, ...]
    launches: Launches | None
    notes: tuple[str, ...]

    @property
    def work_ms(self) -> float:
        """Milliseconds of all kernels."""
        return sum(row.ms for row in self.products)

    @property
    def busy_share(self) -> float:
        """The share of the step in which any kernel ran, from 0 to 1; nan without a time."""
        return self.busy_ms / self.wall_ms if self.wall_ms else float("nan")

    @property
    def unassigned_share(self) -> float:
        """The share of the kernels' time of which nobody knows the kind; nan without a kernel."""
        work = self.work_ms
        return sum(row.ms for row in self.unassigned) / work if work else float("nan")

    @property
    def without_layer_share(self) -> float:
        """The share of the GEMMs' time without a layer; nan without a GEMM."""
        gemms = [row for row in self.products if row.kind in ("gemm", "convolution")]
        whole = sum(row.ms for row in gemms)
        return sum(row.ms for row in gemms if not row.layer) / whole if whole else float("nan")

    def by_kind(self) -> dict[tuple[str, str], float]:
        """Kind and format -> milliseconds, by time; the kind ``unknown`` of kernels that nobody knows."""
        return self._sums(lambda row: (row.kind or "unknown", row.format))

    def by_pass(self) -> dict[str, float]:
        """Pass -> milliseconds, by time; ``other`` outside of all passes."""
        return self._sums(lambda row: row.of_pass or "other")

    def by_layer(self) -> dict[str, float]:
        """Layer -> milliseconds, by time; empty for all without a layer."""
        return self._sums(lambda row: row.layer)

    def _sums(self, key: Callable[[MeasuredProduct], KeyT]) -> dict[KeyT, float]:
        sums: dict[KeyT, float] = defaultdict(float)
        for row in self.products:
            sums[key(row)] += row.ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))
