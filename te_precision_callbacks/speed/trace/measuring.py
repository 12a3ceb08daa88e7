"""The measured time of a step, by layer, pass, GEMM and kind of kernel, from a trace."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.speed.errors import TraceError
from te_precision_callbacks.speed.trace.assigning import set_contexts
from te_precision_callbacks.speed.trace.kinds import KernelKind, NamedKernel, of_kernel, of_operator
from te_precision_callbacks.speed.trace.range_names import parse_range
from te_precision_callbacks.speed.trace.reading import Pass, Trace, TraceEvent

_OF_AN_OPTIMIZER = ("elementwise", "reduction", "norm", "host")
_MOST_UNKNOWN = 5


@dataclass(frozen=True)
class MeasuredProduct:
    """Time per step of one kind of kernel in a layer and pass.

    Attributes:
        layer: the layer of a GEMM; of other kernels the module, where several layers share one; empty if unknown.
        gemm: the GEMM of a Transformer Engine layer; empty for other layers and kinds.
        of_pass: empty outside of forward, backward and optimizer.
        kind: None if the kernel's name is unknown.
        format: the format of a GEMM's operands, from the kernel's name.
        ms: the mean over iterations; concurrent kernels count fully.
        calls: kernels, or operators of the host, per step.
    """

    layer: str
    gemm: str
    of_pass: Pass
    kind: KernelKind | None
    format: str
    ms: float
    calls: float


@dataclass(frozen=True)
class MeasuredStep:
    """Time of a step in a trace, the mean over iterations.

    Attributes:
        device: the name of the device, or ``CPU``.
        on_device: whether device kernels were measured, rather than host operators.
        iterations: empty if the trace does not mark them and counts as one step.
        wall_ms: milliseconds per step from the first kernel to the last; on a CPU, the length of the iterations.
        products: longest first.
        notes: limits of these times.
    """

    device: str
    on_device: bool
    rank: int | None
    iterations: tuple[int, ...]
    wall_ms: float
    products: tuple[MeasuredProduct, ...]
    notes: tuple[str, ...]

    @property
    def work_ms(self) -> float:
        """Milliseconds of all kernels."""
        return sum(row.ms for row in self.products)

    def by_kind(self) -> dict[tuple[str, str], float]:
        """Return kind and format -> milliseconds, longest first; ``unknown`` for unknown kernels."""
        sums: dict[tuple[str, str], float] = defaultdict(float)
        for row in self.products:
            sums[row.kind or "unknown", row.format] += row.ms
        return dict(sorted(sums.items(), key=lambda item: -item[1]))


def measure(trace: Trace) -> MeasuredStep:
    """Measure the steps of a trace.

    Raises:
        TraceError: the trace has no layer ranges, or nothing in it has a time.
    """
    spans = set_contexts(trace)
    all_work = trace.kernels or [event for event in trace.host if event.what == "operator"]
    work, iterations = _in_iterations(all_work, spans)
    if not work:
        raise TraceError(
            f"{trace.path} has no kernels and no operators. Profile a step of the training with the activities CPU and"
            " CUDA."
        )
    if not any(parse_range(event.name)[0] in ("forward", "backward") for event in trace.host):
        raise TraceError(
            f"{trace.path} has no ranges of layers, so kernels cannot be assigned to layers. Record the trace with"
            ' profile=, such as profile="11-13", which adds them.'
        )
    steps = max(1, len(iterations))
    wall = max(event.end for event in work) - min(event.begin for event in work)
    if not trace.kernels and iterations:
        wall = sum(spans[number][1] - spans[number][0] for number in iterations)
    known = {event: _named(event) for event in work}
    return MeasuredStep(
        device=(trace.device or "a GPU that the trace does not name") if trace.kernels else "CPU",
        on_device=bool(trace.kernels),
        rank=trace.rank,
        iterations=iterations,
        wall_ms=wall / 1e3 / steps,
        products=_rows(known, steps),
        notes=tuple(_notes(trace, known, iterations)),
    )


def _in_iterations(
    work: Sequence[TraceEvent], spans: Mapping[int, tuple[float, float]]
) -> tuple[Sequence[TraceEvent], tuple[int, ...]]:
    if not spans:
        return work, ()
    counted, iterations = [], set()
    for event in work:
        for number, (begin, end) in spans.items():
            if event.launched is not None and begin <= event.launched <= end:
                counted.append(event)
                iterations.add(number)
    return counted, tuple(sorted(iterations))


def _named(event: TraceEvent) -> NamedKernel | None:
    if event.what == "operator":
        return of_operator(event.name) or NamedKernel("host")
    operator = event.context.operator
    return of_kernel(event.name) or (None if operator is None else of_operator(operator.name))


def _rows(work: Mapping[TraceEvent, NamedKernel | None], steps: int) -> tuple[MeasuredProduct, ...]:
    sums: dict[tuple[str, str, Pass, KernelKind | None, str], list[float]] = defaultdict(lambda: [0.0, 0.0])
    for event, known in work.items():
        layer, gemm, of_pass, _, _ = event.context
        kind, form = (None, "") if known is None else known
        if kind not in ("gemm", "convolution"):
            gemm = form = ""
        if of_pass == "optimizer" and kind in _OF_AN_OPTIMIZER:
            kind = "optimizer"
        entry = sums[layer, gemm, of_pass, kind, form]
        entry[0] += max(0.0, event.us) / 1e3 / steps
        entry[1] += 1 / steps
    rows = (MeasuredProduct(*key, ms, count) for key, (ms, count) in sums.items())
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.layer, row.gemm)))


def _notes(trace: Trace, work: Mapping[TraceEvent, NamedKernel | None], iterations: tuple[int, ...]) -> Iterable[str]:
    if not iterations:
        yield (
            "The trace does not mark steps, so all of it counts as one step. Profile with profile=, or call step() of"
            " torch.profiler once per step."
        )
    if not trace.kernels:
        yield "The trace has no GPU events. The times are those of operators on the host."
    products = [event for event, known in work.items() if known and known.kind in ("gemm", "attention")]
    without = sum(not event.context.layer for event in products)
    if without:
        yield f"{without} of {len(products)} GEMM and attention kernels ran outside all ranges: their layer is unknown."
    unknown: dict[str, float] = defaultdict(float)
    for event, known in work.items():
        if known is None:
            unknown[event.name] += event.us
    if unknown:
        share = 100 * sum(unknown.values()) / sum(event.us for event in work)
        names = in_sentence(*sorted(unknown, key=lambda name: -unknown[name]), most=_MOST_UNKNOWN)
        yield f"Kernels of unknown kind take {share:.1f} % of the kernels' time: {names}."
