"""What the rules find in real fits: which checkpoints stay, what is judged of the module's numbers, and who sees it."""

import math
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.lightning import HealthyCheckpoint
from te_precision_callbacks.runs import open_run
from tests.conftest import statistics
from tests.lightning.models import Plain, csv_scalars, loader, trainer

STEPS, BREAKS_AT = 12, 6


class Breaks(Plain):
    """Its activations are NaN from a step on, which leaves the loss and the weights as they are."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx >= BREAKS_AT:
            with te.autocast(enabled=False):
                self.net[0](batch * float("nan"))
        return super().training_step(batch, batch_idx)


def saved_steps(folder: Path) -> list[int]:
    return sorted(torch.load(path)["global_step"] for path in folder.glob("*.ckpt"))


def fit(folder: Path, keeping: L.Callback, **keywords: Any) -> PrecisionDebugCallback:
    precision = PrecisionDebugCallback(statistics(stats=["nonfinite_num"]), log_dir=folder / "logs", **keywords)
    fitted = trainer(folder, callbacks=[keeping, precision], max_steps=STEPS, enable_checkpointing=True)
    fitted.fit(Breaks(), loader(STEPS))
    return precision


@pytest.mark.parametrize(
    "keywords",
    [
        {"monitor": "step", "mode": "max", "save_top_k": 3},
        {"monitor": "step", "mode": "max", "save_top_k": 1, "save_last": True, "save_on_exception": True},
        {"save_last": "link"},
    ],
    ids=["top 3", "last", "link"],
)
def test_the_good_checkpoints_stay(tmp_path: Path, keywords: dict[str, Any]) -> None:
    keeping = HealthyCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=1, **keywords)
    precision = fit(tmp_path, keeping)
    (finding,) = precision.session.findings.wrong
    assert (finding.rule, finding.since) == ("nonfinite", BREAKS_AT)
    kept = saved_steps(tmp_path / "saved")
    assert kept[-1] == BREAKS_AT
    assert len(set(kept)) == min(keywords.get("save_top_k", 1), 3)
    assert torch.load(keeping.best_model_path)["global_step"] == BREAKS_AT


def test_nothing_is_saved_after_a_finding_that_stops_the_fit(tmp_path: Path) -> None:
    keeping = HealthyCheckpoint(dirpath=tmp_path / "saved", every_n_train_steps=2, save_on_exception=True)
    with pytest.raises(RuntimeError, match="nonfinite"):
        fit(tmp_path, keeping, on_finding="stop")
    assert saved_steps(tmp_path / "saved") == [BREAKS_AT]


@pytest.mark.parametrize("keep", [8, 2])
def test_a_finding_names_no_deleted_checkpoint(tmp_path: Path, keep: int) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", monitor="step", mode="max", save_top_k=keep, every_n_train_steps=1)
    precision = fit(tmp_path, saving)
    (finding,) = precision.session.findings.wrong
    assert finding.last_good == BREAKS_AT - 1
    assert finding.checkpoint == (BREAKS_AT - 1 if keep == 8 else None)
    assert diagnose(tmp_path / "logs") == precision.session.findings


def test_it_needs_the_precision_callback(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="PrecisionDebugCallback"):
        trainer(tmp_path, callbacks=[HealthyCheckpoint()], enable_checkpointing=True).fit(Plain(), loader(1))


# ---------------------------------------------------------------------- numbers that the module logs


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
