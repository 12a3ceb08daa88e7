"""The audit of a resume in real fits, with Lightning's own checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.session import ResumeAuditError
from tests.capability import any_capability, stand_for
from tests.conftest import statistics
from tests.lightning.models import Plain, loader, trainer
from tests.session.test_resume_audit import (
    DELAYED,
    MISSING,
    RECIPES,
    findings,
    warned,
    without_extra_state,
)

pytestmark = pytest.mark.usefixtures("trusted_checkpoints")


class InFp8(Plain):
    """Two layers of Transformer Engine in FP8; what is done by hand is done when the fit begins."""

    def __init__(self, recipe: recipes.Recipe, *, quantized: bool = False) -> None:
        with te.quantized_model_init(enabled=quantized, recipe=recipe):
            super().__init__(lr=1e-4)
        self.recipe = recipe
        self.strict_loading = False
        self.by_hand: Callable[[torch.nn.Module], Any] | None = None

    def on_train_start(self) -> None:
        if self.by_hand is not None:
            self.by_hand(self.net)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with te.autocast(recipe=self.recipe):
            return super().training_step(batch, batch_idx)


def saved(folder: Path, recipe: recipes.Recipe, callbacks: Sequence[L.Callback] = (), **keywords: Any) -> Path:
    """A checkpoint after two steps."""
    callback = PrecisionDebugCallback(statistics(), log_dir=folder / "first")
    made = trainer(folder, callbacks=[callback, *callbacks], max_steps=2)
    made.fit(InFp8(recipe, **keywords), loader(4, size=32))
    made.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def resumed(
    folder: Path, model: InFp8, checkpoint: Path, callbacks: Sequence[L.Callback] = (), **keywords: Any
) -> PrecisionDebugCallback:
    callback = PrecisionDebugCallback(statistics(), log_dir=folder / "second", **keywords)
    trainer(folder, callbacks=[callback, *callbacks], max_steps=4, max_epochs=2).fit(
        model, loader(4, size=32), ckpt_path=checkpoint
    )
    return callback


def changed(checkpoint: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The checkpoint with another state of the model."""
    content = torch.load(checkpoint)
    content["state_dict"] = change(content["state_dict"])
    torch.save(content, checkpoint)
    return checkpoint


@pytest.mark.parametrize(("name", "quantized"), [("delayed", False), ("delayed", True), ("nvfp4", True)])
def test_a_good_resume_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, quantized: bool) -> None:
    recipe, capability = RECIPES[name]
    with any_capability():
        stand_for(capability)
        checkpoint = saved(tmp_path, recipe, quantized=quantized)
        callback = resumed(tmp_path, InFp8(recipe, quantized=quantized), checkpoint, strict=True)
    assert findings(callback.session.resume_report) == []
    assert callback.session.iteration == 4
    assert warned(caplog) == []


def test_strict_ends_the_fit_before_the_parameters_change(tmp_path: Path) -> None:
    checkpoint = changed(saved(tmp_path, DELAYED), without_extra_state)
    model = InFp8(DELAYED)
    with pytest.raises(ResumeAuditError, match=MISSING):
        resumed(tmp_path, model, checkpoint, strict=True)
    weights = torch.load(checkpoint)["state_dict"]
    assert all(torch.equal(parameter, weights[name]) for name, parameter in model.named_parameters())
