"""Optimizer steps without a step() of the session: every integration warns once."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator

from te_precision_callbacks import (
    InspectSession,
    PrecisionDebugCallback,
    PrecisionDebugger,
    PrecisionDebugTrainerCallback,
)
from tests.accelerate import loops
from tests.conftest import statistics
from tests.lightning import models as lightning
from tests.transformers import models as transformers

CONFIG = statistics(freq=100)


pytestmark = pytest.mark.usefixtures("fresh_accelerate_state")


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    results = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    return [text for text in results if "without a step() of precision debugging" in text]


def loop(folder: Path, batches: int, *, steps: int = 0, optimizers: int = 1) -> None:
    """A loop that steps its optimizers in each batch, and the session in the first batches alone."""
    net = te.Linear(32, 32)
    made = [torch.optim.SGD(net.parameters(), lr=0.1) for _ in range(optimizers)]
    other = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))])
    with InspectSession(CONFIG, model=net, log_dir=folder) as session:
        for batch in range(batches):
            net(torch.ones(16, 32)).sum().backward()
            for optimizer in (*made, other):
                optimizer.step()
            if batch < steps:
                session.step()


@pytest.mark.parametrize(
    ("batches", "steps", "optimizers", "warned_at"),
    [(16, 0, 1, [10]), (2, 0, 1, [2]), (1, 0, 1, []), (16, 16, 1, []), (10, 1, 1, []), (6, 6, 3, [])],
    ids=str,
)
def test_a_loop_that_never_steps_is_warned_of_once(
    batches: int, steps: int, optimizers: int, warned_at: list[int], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """At its end if it is short."""
    loop(tmp_path, batches, steps=steps, optimizers=optimizers)
    assert [text.partition(" times")[0] for text in said(caplog)] == [f"SGD has stepped {at}" for at in warned_at]
    assert all("Call step() of the session after each step of the optimizer" in text for text in said(caplog))


AGAIN, MICRO_BATCHES = (
    "step() is called again after each step of the optimizer",
    "step() is called after each micro-batch",
)


@pytest.mark.parametrize(
    ("kinds", "warns"),
    [
        (("train", "nothing"), AGAIN),
        (("train", *["nothing"] * 2), AGAIN),
        (("train", *["nothing"] * 4), AGAIN),
        (("micro-batch", "train"), MICRO_BATCHES),
        ((*["micro-batch"] * 3, "train"), MICRO_BATCHES),
        (("train",), ""),
        (("train", "train", "nothing"), ""),
        (("train", "forward"), ""),  # a rollout before each training
        (("train", "forward", "forward"), ""),
        (("first net", "second net"), ""),  # a GAN
    ],
    ids=str,
)
@pytest.mark.parametrize("set_to_none", [True, False])
def test_a_loop_that_steps_too_often(
    kinds: tuple[str, ...], warns: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, set_to_none: bool
) -> None:
    nets = torch.nn.ModuleList([te.Linear(32, 32), te.Linear(32, 32)])
    optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
    with InspectSession(CONFIG, model=nets, log_dir=tmp_path) as session:
        for batch in range(4 * len(kinds) + 1):
            kind = kinds[batch % len(kinds)]
            if kind != "nothing":
                which = kind == "second net"
                with te.autocast():
                    out = nets[which](torch.ones(16, 32))
                if kind != "forward":
                    out.sum().backward()
                if kind in ("train", "first net", "second net"):
                    optimizers[which].step()
                    optimizers[which].zero_grad(set_to_none=set_to_none)
            session.step()
    results = [text for text in caplog.messages if text.startswith("step() is called")]
    assert [text.partition(":")[0] for text in results] == [warns] * bool(warns)
    assert all(f": {len(kinds)} debug iterations for each step" in text for text in results)


def test_accelerate(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer, loader = loops.prepared(accelerator, loops.Plain(), batches=3)
    with PrecisionDebugger(accelerator, model, CONFIG, log_dir=tmp_path):
        for batch in loader:
            accelerator.backward(model(batch).pow(2).mean())
            optimizer.step()
    (text,) = said(caplog)
    assert "SGD has stepped 3 times" in text
    assert "Call debugger.step() after each batch" in text


class Manual(lightning.Plain):
    """Steps torch's own optimizer, which Lightning does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        loss = self.net(batch).pow(2).mean()
        self.manual_backward(loss)
        optimizer.optimizer.step()
        return loss


def test_lightning_with_an_optimizer_of_torch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = PrecisionDebugCallback(CONFIG)
    lightning.trainer(tmp_path, callbacks=[callback], limit_train_batches=3).fit(Manual(), lightning.loader(3))
    (text,) = said(caplog)
    assert "step the optimizers that self.optimizers() returns" in text


def test_a_trainer_steps_by_itself(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    callback = PrecisionDebugTrainerCallback(CONFIG)
    transformers.trainer(transformers.arguments(tmp_path, max_steps=2), callback).train()
    assert callback.session.iteration == 2
    assert said(caplog) == []


def test_a_model_that_is_trained_in_evaluation_mode(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    net = te.Linear(32, 32).eval()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with InspectSession(CONFIG, model=net, log_dir=tmp_path) as session:
        for _ in range(2):
            net(torch.ones(16, 32)).sum().backward()
            optimizer.step()
            session.step()
    assert not session.coverage()
    (text,) = (record.getMessage() for record in caplog.records if record.levelno == logging.WARNING)
    assert text.startswith("In step 0 the optimizer has stepped, but all observed layers are in evaluation mode")
    assert "call model.train() before the training" in text
