"""A reentrant checkpoint that computes again outside of te.autocast: the reason, the warning, and what helps."""

from __future__ import annotations

import functools
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from torch.utils.checkpoint import checkpoint
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.session import InspectSession, Reason

WIDTH = 32


@pytest.mark.parametrize("how", ["torch", "te", "autocast inside"])
def test_a_reentrant_checkpoint_outside_of_autocast(how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The remedies of the message: Transformer Engine's checkpoint, and an autocast inside of what is checkpointed."""
    net = te.Linear(WIDTH, WIDTH)

    def part(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()) if how == "autocast inside" else nullcontext():
            result: torch.Tensor = net(x)
            return result

    run = te.checkpoint if how == "te" else functools.partial(checkpoint, use_reentrant=True)
    with InspectSession(None, model=net, log_dir=tmp_path, records="off") as session:
        for _ in range(2):
            with te.autocast(enabled=how != "autocast inside", recipe=Float8CurrentScaling()):
                result = run(net if how == "te" else part, torch.randn(WIDTH, WIDTH, requires_grad=True))
            result.sum().backward()
            session.step()
    for at in (0, 1):
        reasons = {product.reason for product in session.coverage(at) if product.macs}
        assert reasons == ({Reason.RECOMPUTED} if how == "torch" else {None}), at
    said = [record.getMessage() for record in caplog.records if "Gradient checkpointing" in record.getMessage()]
    assert len(said) == (how == "torch")


def test_nested_reentrant_checkpoints(tmp_path: Path) -> None:
    """The forward runs three times, and is one product; the two that are computed again are no dgrad."""
    net = te.Linear(WIDTH, WIDTH)

    def part(x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            result: torch.Tensor = net(x)
            return result

    again = functools.partial(checkpoint, use_reentrant=True)
    with InspectSession(None, model=net, log_dir=tmp_path, records="off") as session:
        again(functools.partial(again, part), torch.randn(WIDTH, WIDTH, requires_grad=True)).sum().backward()
        session.step()
    products = {(product.layer, product.gemm): product.macs for product in session.coverage() if product.macs}
    assert products == {("linear", gemm): WIDTH**3 for gemm in ("fprop", "dgrad", "wgrad")}
