"""Transformer Engine's functions are read by the names of their parameters: another version may have more of them."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.module import linear

from tests.conftest import Keeper, statistics
from tests.instrumentation.steps import stepped

Upstream: Any = linear._Linear


class WithOneInFront(Upstream):  # type: ignore[misc]
    """The Function with a further parameter in front, as Transformer Engine 2.21 has it."""

    @staticmethod
    def forward(ctx: Any, quantized_tensor: Any, weight: Any, inp: Any, bias: Any, fwd_args: Any) -> Any:
        return Upstream.forward(ctx, weight, inp, bias, fwd_args)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return None, *Upstream.backward(ctx, *gradients)

    @classmethod
    def apply(cls, *arguments: Any) -> Any:
        return super().apply(None, *arguments)


class WithAnotherName(Upstream):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, parameter: Any, inp: Any, bias: Any, fwd_args: Any) -> Any:
        return Upstream.forward(ctx, parameter, inp, bias, fwd_args)


def elements(folder: Path) -> dict[str, float]:
    keeper, config = Keeper(), statistics(tensors=["weight", "activation"], stats=["numel"])
    options: dict[str, Any] = {"inputs": lambda: torch.randn(16, 64), "sinks": [keeper], "observe": "fused"}
    stepped(te.Linear(64, 32), folder, [Float8CurrentScaling()], config, **options)
    return {row.tensor: row.value for step in keeper.steps for row in step if row.statistic == "numel"}


def test_a_parameter_in_front(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "_Linear", WithOneInFront)
    assert elements(tmp_path) == {"weight": 64 * 32, "activation": 16 * 64}


def test_a_parameter_that_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(linear, "_Linear", WithAnotherName)
    with caplog.at_level(logging.WARNING):
        assert elements(tmp_path) == {}, "its quantized operands would be taken for what they were made of"
    stated = [record.getMessage() for record in caplog.records if "has no parameter weight" in record.getMessage()]
    assert len(stated) == 1, stated
