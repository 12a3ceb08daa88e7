"""What fused attention is handed, against a spy at the extension's entries."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine_torch as tex
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.instrumentation.tap import GemmTap
from te_precision_callbacks.layers.forwards import ForwardKind
from te_precision_callbacks.layers.gemm_events import AttentionEvent
from tests.capability import any_capability, stand_for
from tests.fused_attention import emulate_kernel

LENGTH, BATCH, HEADS, SIZE = 128, 2, 4, 32


class Told:
    def __init__(self) -> None:
        self.events: list[AttentionEvent] = []
        self.order: list[str] = []
        self.fail = False

    def enter_attention(self, layer: str, kind: ForwardKind) -> None:
        self.order.append(f"enter {layer}")

    def note_attention(self, event: AttentionEvent) -> None:
        self.order.append("backward" if event.backward else "forward")
        if self.fail:
            raise ValueError("no such listener")
        self.events.append(event)

    def leave_attention(self, layer: str, kind: ForwardKind, given: Mapping[str, Any]) -> None:
        assert given["query_layer"].shape == (LENGTH, BATCH, HEADS, SIZE)
        self.order.append(f"leave {layer}")


@contextmanager
def spied(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, dict[int, Any]]]]:
    calls: list[tuple[str, dict[int, Any]]] = []
    for name in ("fused_attn_fwd", "fused_attn_bwd"):
        own = getattr(tex, name)

        def entry(*arguments: Any, own: Any = own, name: str = name) -> Any:
            calls.append((name, {id(value): value for value in arguments}))
            return own(*arguments)

        monkeypatch.setattr(tex, name, entry)
    yield calls


def run(attention: te.DotProductAttention, told: Told, reported: list[str]) -> torch.Tensor:
    tap = GemmTap(
        lambda module: ForwardKind.OBSERVED,
        lambda doing, what, error: reported.append(f"{what}: {error}"),
        attention=told,
    )
    tap.watch({}, ())
    tap.observe({}, {id(attention): "attention"})
    tap.listen(lambda event: None)
    query, key, value = (
        torch.randn(LENGTH, BATCH, HEADS, SIZE, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)
        .bfloat16()
        .requires_grad_()
        for seed in range(3)
    )
    try:
        with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling(fp8_dpa=True)):
            out = attention(query, key, value, attn_mask_type="no_mask")
        out.sum().backward()
    finally:
        tap.listen()
    assert query.grad is not None
    return query.grad


def made() -> te.DotProductAttention:
    return te.DotProductAttention(HEADS, SIZE, attention_dropout=0.0)


def test_operands_are_those_of_the_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    stated, reported = Told(), list[str]()
    emulate_kernel(monkeypatch)
    with any_capability(), spied(monkeypatch) as calls:
        stand_for((10, 0))
        run(made(), stated, reported)
    assert not reported
    assert stated.order == ["enter attention", "forward", "leave attention", "backward"]
    assert [name for name, _ in calls] == ["fused_attn_fwd", "fused_attn_bwd"]
    for event, (_, handed) in zip(stated.events, calls, strict=True):
        operands = [event.query, event.key, event.value, event.probabilities]
        operands += [event.gradient, event.scores] if event.backward else []
        assert all(id(operand) in handed for operand in operands)
        assert type(event.query).__name__.startswith("Float8Tensor")
        assert event.sizes == (BATCH * HEADS, LENGTH, LENGTH, SIZE, SIZE)
        assert event.layer == "attention"


def test_a_listener_that_raises_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stated, reported = Told(), list[str]()
    emulate_kernel(monkeypatch)
    with any_capability():
        stand_for((10, 0))
        expected = run(made(), Told(), reported)
        stated.fail = True
        assert torch.equal(run(made(), stated, reported), expected)
    assert reported == ["attention: no such listener"] * 2
