"""Statistics of one step through the engine."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from te_precision_callbacks.engine.engine import StatisticsEngine
from te_precision_callbacks.layers.gemm_events import Watched
from te_precision_callbacks.statistics.names import Request, quantized_request

Found = dict[str, Any]


def one_step(
    watched: Iterable[Watched], names: Sequence[Any], request: Callable[[Any], Request] = quantized_request
) -> tuple[Found, list[str]]:
    """The statistics, and what failed."""
    engine, failures = StatisticsEngine(), []
    engine.on_failure = lambda doing, of, error: failures.append(f"{doing} {of}: {error}")
    requests = tuple(map(request, names))
    for item in watched:
        engine.note(item, requests)
        engine.measure()
    return {row.statistic: row.value for row in engine.flush(reduce=False)}, failures


def statistics(*arguments: Any, **keywords: Any) -> Found:
    results, failures = one_step(*arguments, **keywords)
    assert not failures
    return results
