"""What the entries of the extension are handed, beside the events of a tap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformer_engine_torch as tex

from te_precision_callbacks.forwards import ForwardKind
from te_precision_callbacks.gemm_events import GemmEvent
from te_precision_callbacks.naming import named_operations, named_te_modules
from te_precision_callbacks.session.tap import GemmTap

GEMM_OF = {(True, False): "fprop", (False, False): "dgrad", (False, True): "wgrad"}


class Call:
    """A GEMM as the extension was asked for it."""

    def __init__(self, a: Any, transa: bool, b: Any, transb: bool, out: Any, more: tuple[Any, ...]) -> None:
        self.a, self.b, self.gemm, self.out = a, b, GEMM_OF[transa, transb], out
        first, second = (torch.Size(tensor.size()) for tensor in (a, b))
        rows = (first[:-1].numel(), first[-1]), (second[:-1].numel(), second[-1])
        self.m, self.k = rows[0] if transa else rows[0][::-1]
        self.n = rows[1][1] if transb else rows[1][0]
        self.more = more


@contextmanager
def spied() -> Iterator[list[Call]]:
    """What the entries of the extension are handed, in their order."""
    calls: list[Call] = []
    one, grouped = tex.generic_gemm, tex.te_general_grouped_gemm

    def generic_gemm(a: Any, transa: bool, b: Any, transb: bool, *more: Any, **keywords: Any) -> Any:
        result = one(a, transa, b, transb, *more, **keywords)
        calls.append(Call(a, transa, b, transb, result[0], more))
        return result

    def te_general_grouped_gemm(a: Any, transa: bool, b: Any, transb: bool, *more: Any) -> Any:
        result = grouped(a, transa, b, transb, *more)
        calls.extend(Call(*pair[:1], transa, *pair[1:], transb, None, more) for pair in zip(a, b, strict=True))
        return result

    tex.generic_gemm, tex.te_general_grouped_gemm = generic_gemm, te_general_grouped_gemm
    try:
        yield calls
    finally:
        tex.generic_gemm, tex.te_general_grouped_gemm = one, grouped


@contextmanager
def tapped(model: torch.nn.Module, *more: Callable[[GemmEvent], Any]) -> Iterator[list[GemmEvent]]:
    """The events of all of a model's GEMMs."""
    events: list[GemmEvent] = []

    def fail(doing: str, what: str, error: Exception) -> None:
        raise AssertionError(f"{doing} {what}") from error

    tap = GemmTap(lambda module: ForwardKind.OBSERVED, fail)
    layers = {id(named.module): [layer.name for layer in named.layers] for named in named_te_modules(model)}
    tap.watch(layers, layers, named_operations(model))
    tap.listen(lambda event: event.call, events.append, *more)
    try:
        yield events
    finally:
        tap.listen()
        assert not tap.installed


def assert_alike(events: list[GemmEvent], calls: list[Call]) -> None:
    """No operand is missing, none is another one, and the order is that of the extension."""
    assert [event.gemm for event in events] == [call.gemm for call in calls]
    assert [event.order for event in events] == list(range(len(calls)))
    for event, call in zip(events, calls, strict=True):
        assert event.a.data is call.a
        assert event.b.data is call.b
        assert event.call.layout == {"fprop": "TN", "dgrad": "NN", "wgrad": "NT"}[call.gemm]
        assert (event.call.m, event.call.n, event.call.k) == (call.m, call.n, call.k)
        if call.out is not None:
            assert event.out is call.out


def layers_of(events: list[GemmEvent]) -> list[str]:
    return [f"{event.layer} {event.gemm}" for event in events]
