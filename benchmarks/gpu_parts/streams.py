"""Tensors that are measured on two streams of a GPU, while the engine's vectors grow and while the other stream waits.

A kernel that sleeps stands before the values of the second stream. A reading that does not wait for that stream, or a
vector that is filled after an addition or copied before it, gives wrong sums. On a CPU there is one stream.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from gpu_parts.rows import Rows, Settings
from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.overflow.frames import measure, read
from te_precision_callbacks.statistics.names import Request, tensor_request

ROUNDS = 5
_CYCLES = 20_000_000  # for which the second stream sleeps: some 10 ms
_REQUESTS: tuple[Request, ...] = (tensor_request("max"), tensor_request("mean"))


@contextlib.contextmanager
def entered(stream: torch.cuda.Stream | None, *, asleep: bool) -> Iterator[None]:
    """Queue operations after the current stream's operations, perhaps behind a sleeping kernel. None: on a CPU."""
    if stream is not None:
        stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # which does nothing with None
        if stream is not None and asleep:
            torch.cuda._sleep(_CYCLES)  # type: ignore[no-untyped-call]
        yield


def _wrong_statistics(
    settings: Settings, second: torch.cuda.Stream | None, *, ends_on_second: bool, grows: bool
) -> int:
    """Count the wrong values of all rounds."""
    engine, wrong = StatisticsEngine(), 0
    layers = (200 if settings.on_gpu else 20) if grows else 1

    def measure(layer: str, values: torch.Tensor) -> None:
        engine.note(Watched(layer, "activation", 0, values), _REQUESTS)
        engine.measure()

    for number in range(1, ROUNDS + 1):
        expected: dict[tuple[str, str], float] = {}
        for layer in range(layers * number):
            name = f"layer {layer}"
            measure(name, torch.full((64,), 1.0, device=settings.device))
            with entered(second, asleep=layer == 0):
                values = torch.full((64,), float(number), device=settings.device)
                values += 1.0
                measure(name, values)
            expected |= {(name, "max"): number + 1.0, (name, "mean"): (number + 2.0) / 2}
        with torch.cuda.stream(second if ends_on_second else None):
            results = {(row.layer, row.statistic): row.value for row in engine.flush(reduce=False)}
        wrong += sum(results.get(key) != right for key, right in expected.items())
    return wrong


def _wrong_extremes(settings: Settings, second: torch.cuda.Stream | None) -> int:
    """As :func:`_wrong_statistics`, of overflow detection."""
    wrong = 0
    for number in range(1, ROUNDS + 1):
        measured = []
        for place in range(1000 if settings.on_gpu else 100):
            with entered(second, asleep=place == 0) if place % 2 == 0 else contextlib.nullcontext():
                values = torch.full((16,), float(place), device=settings.device)
                values[0] = -number
                measured.append(measure(values, abs_min=False))
        read(measured)
        wrong += sum((one.low, one.high) != (-number, place) for place, one in enumerate(measured))
    return wrong


def check(settings: Settings, rows: Rows) -> None:
    second = torch.cuda.Stream(settings.device) if settings.on_gpu else None  # type: ignore[no-untyped-call]
    if not settings.on_gpu:
        rows.left_out("a second stream", "needs a GPU: here both are one")
    ways = {"one vector": (False, False), "growing vectors": (False, True), "the second stream reads": (True, True)}
    for name, (ends_on_second, grows) in ways.items():
        with rows.of(name):
            wrong = _wrong_statistics(settings, second, ends_on_second=ends_on_second, grows=grows)
            rows.equal(f"statistics, {name}: wrong numbers", wrong, 0)
    with rows.of("extremes"):
        rows.equal("overflow detection: wrong extremes", _wrong_extremes(settings, second), 0)
