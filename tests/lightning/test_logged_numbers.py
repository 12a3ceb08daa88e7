"""What a LightningModule logs reaches the rules, and what the rules find reaches Lightning's own callbacks."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import EarlyStopping
from lightning.pytorch.loggers import CSVLogger

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.runs import open_run
from tests.lightning.models import Plain, csv_scalars, loader, trainer

LOST = 4


class Logs(Plain):
    """Logs the norm of its gradient, which is nan from a step on, and its loss under a name of its own."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.log("grad_norm", norm if self.global_step < LOST else norm * math.nan)


@pytest.mark.parametrize("has_logger", [True, False])
def test_a_gradient_norm_that_the_module_logs_is_checked(tmp_path: Path, has_logger: bool) -> None:
    callback = PrecisionDebugCallback(log_dir=tmp_path / "debug")
    board = CSVLogger(tmp_path, name="csv", version="") if has_logger else False
    trainer(tmp_path, callbacks=[callback], logger=board, log_every_n_steps=50).fit(Logs(), loader(8))
    findings = callback.session.findings
    assert [(item.rule, item.severity, item.since, item.until) for item in findings.wrong] == [
        ("nonfinite-gradient-norm", "error", LOST, 7)
    ]
    assert diagnose(tmp_path / "debug") == findings
    rows = open_run(tmp_path / "debug").scalars.to_pylist()
    for name in ("grad_norm", "loss", "train_loss_step"):
        assert [row["iteration"] for row in rows if row["name"] == name] == list(range(8)), name
    assert "te/findings" not in {row["name"] for row in rows}, "it is a result, no number of the trainer"


class Starts(EarlyStopping):
    """Keeps the metric that it monitors after each batch."""

    def __init__(self, **keywords: Any) -> None:
        super().__init__("te/findings", mode="min", patience=100, strict=True, **keywords)
        self.monitored: list[float] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any, **keywords: Any) -> None:
        self.monitored.append(float(trainer.callback_metrics["te/findings"]))


def test_early_stopping_monitors_the_findings_from_the_first_step_on(tmp_path: Path) -> None:
    stops = Starts(divergence_threshold=0.5)
    callback = PrecisionDebugCallback(log_dir=tmp_path / "debug")
    board = CSVLogger(tmp_path, name="csv", version="")
    fitted = trainer(tmp_path, callbacks=[callback, stops], logger=board, max_epochs=3, log_every_n_steps=1)
    fitted.fit(Logs(), loader(4))
    assert stops.monitored == [0.0] * LOST + [1.0] * 4
    assert fitted.current_epoch == 2, "stopped after the second epoch"
    assert csv_scalars(tmp_path / "csv")["te/findings"][0] == 0.0
