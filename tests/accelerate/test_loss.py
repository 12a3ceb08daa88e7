"""The loss that a script gives accelerator.backward() is recorded, and judged, if the script logs none."""

from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.accelerate import PrecisionDebugger
from te_precision_callbacks.runs import open_run
from tests.accelerate.loops import Plain, fresh
from tests.conftest import statistics
from tests.lightning.models import batch_of


def train(folder: Path | None, *, logs: str = "", nan_at: int = -1) -> tuple[Any, list[float]]:
    """Six batches, of which two make a step: the debugger, and the parameters at the end."""
    accelerator, model, optimizer, loader = fresh(gradient_accumulation_steps=2)
    own = accelerator.backward
    debugger = folder and PrecisionDebugger(accelerator, model, statistics(), log_dir=folder, quiet=True).start()
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss * (float("nan") if index == nan_at else 1))
            optimizer.step()
            optimizer.zero_grad()
        if debugger is not None:
            debugger.step()
        if logs and accelerator.sync_gradients:
            accelerator.log({logs: 7.0}, step=index // 2 + 1)
    if debugger is not None:
        debugger.stop()
    assert accelerator.backward == own
    return debugger, [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def losses(folder: Path, name: str = "loss") -> list[float]:
    return open_run(folder).metrics[name][1].tolist()


def test_the_mean_of_a_step_is_its_loss(tmp_path: Path) -> None:
    debugger, with_debugger = train(tmp_path)
    assert with_debugger == train(None)[1]
    model = Plain()
    first, second = (model(batch_of(index)).pow(2).mean().item() for index in (0, 1))
    assert losses(tmp_path)[0] == pytest.approx((first + second) / 2, rel=1e-6)
    assert len(losses(tmp_path)) == 3
    assert "nonfinite-loss" in debugger.session.findings.judged


@pytest.mark.parametrize("logs", ["loss", "train/other"])
def test_a_script_that_logs_its_loss(tmp_path: Path, logs: str) -> None:
    train(tmp_path, logs=logs)
    assert len(losses(tmp_path)) == 3
    assert losses(tmp_path, logs)[-3:] == [7.0] * 3


def test_a_loss_that_is_nan_is_found(tmp_path: Path) -> None:
    debugger, _ = train(tmp_path, nan_at=3)
    (finding,) = (finding for finding in debugger.session.findings.wrong if finding.rule == "nonfinite-loss")
    assert finding.since == 1
