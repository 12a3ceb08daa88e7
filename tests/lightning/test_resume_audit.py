"""The audit of a resume in real fits, with Lightning's own checkpoints."""

from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.session import ResumeAuditError
from tests.capability import any_capability, stand_for
from tests.conftest import statistics
from tests.lightning.models import Plain, loader, trainer
from tests.session.test_resume_audit import DELAYED, MISSING, RECIPES, findings, warned, without_extra_state

pytestmark = pytest.mark.usefixtures("trusted_checkpoints")


class InFp8(Plain):
    def __init__(self, recipe: recipes.Recipe, *, quantized: bool = False) -> None:
        with te.quantized_model_init(enabled=quantized, recipe=recipe):
            super().__init__(lr=1e-4)
        self.recipe = recipe
        self.strict_loading = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with te.autocast(recipe=self.recipe):
            return super().training_step(batch, batch_idx)


def saved(folder: Path, model: InFp8) -> Path:
    callback = PrecisionDebugCallback(statistics(), log_dir=folder / "first")
    made = trainer(folder, callbacks=[callback], max_steps=2)
    made.fit(model, loader(4, size=32))
    made.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def resumed(folder: Path, model: InFp8, checkpoint: Path) -> PrecisionDebugCallback:
    callback = PrecisionDebugCallback(statistics(), log_dir=folder / "second", strict=True)
    fitted = trainer(folder, callbacks=[callback], max_steps=4, max_epochs=2)
    fitted.fit(model, loader(4, size=32), ckpt_path=checkpoint)
    return callback


@pytest.mark.parametrize(("name", "quantized"), [("delayed", False), ("delayed", True), ("nvfp4", True)])
def test_a_good_resume_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, quantized: bool) -> None:
    recipe, capability = RECIPES[name]
    with any_capability():
        stand_for(capability)
        checkpoint = saved(tmp_path, InFp8(recipe, quantized=quantized))
        callback = resumed(tmp_path, InFp8(recipe, quantized=quantized), checkpoint)
    assert findings(callback.session.resume_report) == []
    assert callback.session.iteration == 4
    assert warned(caplog) == []


def test_strict_ends_the_fit_before_the_parameters_change(tmp_path: Path) -> None:
    checkpoint, model = saved(tmp_path, InFp8(DELAYED)), InFp8(DELAYED)
    content = torch.load(checkpoint)
    content["state_dict"] = without_extra_state(content["state_dict"])
    torch.save(content, checkpoint)
    with pytest.raises(ResumeAuditError, match=MISSING):
        resumed(tmp_path, model, checkpoint)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, content["state_dict"][name]), name
