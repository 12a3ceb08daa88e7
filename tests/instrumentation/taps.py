"""What the entries of the extension are handed, beside the events of a tap."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from te_precision_callbacks.instrumentation.tap import GemmTap
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import GemmEvent
from te_precision_callbacks.layers.naming import named_operations, named_te_modules
from tests.instrumentation.gemm_spy import GEMM_OF, at_the_entries


class Call:
    def __init__(self, a: Any, transa: bool, b: Any, transb: bool, out: Any) -> None:
        self.a, self.b, self.gemm, self.out = a, b, GEMM_OF[transa, transb], out
        first, second = (torch.Size(tensor.size()) for tensor in (a, b))
        rows = (first[:-1].numel(), first[-1]), (second[:-1].numel(), second[-1])
        self.m, self.k = rows[0] if transa else rows[0][::-1]
        self.n = rows[1][1] if transb else rows[1][0]


@contextmanager
def spied() -> Iterator[list[Call]]:
    calls: list[Call] = []
    with at_the_entries(lambda *handed: calls.append(Call(*handed))):
        yield calls


Report = Callable[[str, str, Exception], object]


def fail(doing: str, what: str, error: Exception) -> None:
    raise AssertionError(f"{doing} {what}") from error


@contextmanager
def tapped(
    model: torch.nn.Module, *more: Callable[[GemmEvent], Any], report: Report = fail
) -> Iterator[list[GemmEvent]]:
    events: list[GemmEvent] = []

    tap = GemmTap(lambda module: ForwardKind.OBSERVED, report)
    layers = {id(named.module): [layer.name for layer in named.layers] for named in named_te_modules(model)}
    tap.watch(layers, named_operations(model))
    tap.observe(layers)
    tap.listen(lambda event: event.sizes, events.append, *more)
    try:
        yield events
    finally:
        tap.listen()
        assert not tap.installed


def assert_alike(events: list[GemmEvent], calls: list[Call]) -> None:
    assert [event.gemm for event in events] == [call.gemm for call in calls]
    assert [event.order for event in events] == list(range(len(calls)))
    for event, call in zip(events, calls, strict=True):
        assert event.a.data is call.a
        assert event.b.data is call.b
        assert event.arguments["layout"] == {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}[call.gemm]
        assert event.sizes == (call.n, call.m, call.k)
        if call.out is not None:
            assert event.out is call.out


def layers_of(events: list[GemmEvent]) -> list[str]:
    return [f"{event.layer} {event.gemm}" for event in events]
