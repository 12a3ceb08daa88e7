"""A detection that can no longer work says so: it raises in the look, unless the user has it warn."""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch

from te_precision_callbacks.overflow import (
    ActivationOverflowError,
    DebugActivationOverflow,
    DetectionFailedError,
)
from te_precision_callbacks.overflow.extreme_slots import Slots
from tests.overflow.models import Function, hooks_on, step

INF = float("inf")


class TwoOutputs(torch.autograd.Function):
    """Gives no gradient to its second input: None, as DistributedDataParallel's does for an unused output."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return a.clone(), b.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


def made() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Two layers; no gradient reaches the second."""
    first, second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)
    model = Function(lambda x: sum(TwoOutputs.apply(first(x), second(x))), first=first, second=second)  # type: ignore[no-untyped-call]
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def failing(method: str = "measure") -> Any:
    return mock.patch.object(Slots, method, side_effect=LookupError("no slot"))


def test_a_gradient_of_none(caplog: pytest.LogCaptureFixture) -> None:
    """No gradient has come to that tensor: it has no frame, and what comes after is watched."""
    model, optimizer = made()
    with DebugActivationOverflow(model, max_frames=1000) as watching:
        for _ in range(3):
            step(model, optimizer)
        assert not caplog.records
        with pytest.raises(ActivationOverflowError, match=r"> \[3\] first: Linear: input\[0\] has infs") as raised:
            step(model, optimizer, INF)
        assert watching.batch_number == 3
    gradients = [line for line in raised.value.report.splitlines() if "grad" in line]
    assert any("first" in line for line in gradients)
    assert not any("second" in line for line in gradients)


def test_the_next_step_raises() -> None:
    """Not the hook: other ranks would wait for this one. The weights are not touched; then it watches anew."""
    model, optimizer = made()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with DebugActivationOverflow(model) as watching:
        with failing():
            model(torch.ones(2, 4)).sum().backward()
        with pytest.raises(DetectionFailedError, match=r"on rank 0 \(LookupError: no slot\)") as raised:
            optimizer.step()
        assert isinstance(raised.value.__cause__, LookupError)
        assert "make no DebugActivationOverflow" in str(raised.value)
        assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
        assert watching.reports == 0
        step(model, optimizer)
        with pytest.raises(ActivationOverflowError):
            step(model, optimizer, INF)
    copied = pickle.loads(pickle.dumps(raised.value))
    assert (str(copied), copied.rank, copied.failure) == (str(raised.value), 0, "LookupError: no slot")


LOOKS: dict[str, Callable[[DebugActivationOverflow, torch.optim.Optimizer], object]] = {
    "look": lambda watching, optimizer: watching.look(),
    "close": lambda watching, optimizer: watching.close(),
    "step": lambda watching, optimizer: optimizer.step(),
}


@pytest.mark.parametrize("look", LOOKS)
@pytest.mark.parametrize("method", ["measure", "read"])
def test_wherever_it_fails_and_whoever_looks(look: str, method: str) -> None:
    model, optimizer = made()
    watching = DebugActivationOverflow(model)
    with failing(method), pytest.raises(DetectionFailedError):
        model(torch.ones(2, 4)).sum().backward()
        LOOKS[look](watching, optimizer)
    watching.close()
    assert hooks_on(model) == 0


def test_what_was_seen_before_the_failure_comes_first() -> None:
    model, optimizer = made()
    with DebugActivationOverflow(model), pytest.raises(ActivationOverflowError, match="first: Linear: input"):
        loss = model(torch.full((2, 4), INF)).sum()
        with failing():
            loss.backward()
        optimizer.step()


def test_it_is_not_raised_over_another_exception(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = made()
    with pytest.raises(KeyError, match="mine"), failing(), DebugActivationOverflow(model):
        model(torch.ones(2, 4))
        raise KeyError("mine")
    (record,) = caplog.records
    assert (record.levelno, "LookupError: no slot" in record.getMessage()) == (logging.ERROR, True)
