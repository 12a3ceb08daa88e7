"""Checkpoints of a run that goes wrong, in real fits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.callbacks import ModelCheckpoint

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.lightning import HealthyCheckpoint
from tests.conftest import statistics
from tests.lightning.models import Plain, loader, trainer

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
    made = trainer(folder, callbacks=[keeping, precision], max_steps=STEPS, enable_checkpointing=True)
    made.fit(Breaks(), loader(STEPS))
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
    keywords: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": keep, "every_n_train_steps": 1}
    precision = fit(tmp_path, ModelCheckpoint(dirpath=tmp_path / "saved", **keywords))
    (finding,) = precision.session.findings.wrong
    assert finding.last_good == BREAKS_AT - 1
    assert finding.checkpoint == (BREAKS_AT - 1 if keep == 8 else None)
    assert diagnose(tmp_path / "logs") == precision.session.findings


def test_it_needs_the_precision_callback(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match="PrecisionDebugCallback"):
        trainer(tmp_path, callbacks=[HealthyCheckpoint()], enable_checkpointing=True).fit(Plain(), loader(1))
