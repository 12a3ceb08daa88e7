"""``debug="activation_overflow"`` under the Lightning callback."""

import contextlib
from pathlib import Path

import lightning as L
import pytest
import torch

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.overflow import ActivationOverflowError
from tests.conftest import statistics
from tests.lightning.models import Plain, loader, trainer


class Overflowing(Plain):
    """Calls its layers itself, never its own forward; the first layer overflows in one batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.before: dict[str, torch.Tensor] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.at:
            self.before = {name: value.detach().clone() for name, value in self.named_parameters()}
            with torch.no_grad():
                self.net[0].bias.fill_(torch.inf)
        return self.net(batch).pow(2).mean()


def test_the_fit_ends_with_the_module_and_the_batch(tmp_path: Path) -> None:
    callback = PrecisionDebugCallback(statistics(), debug="activation_overflow")
    model = Overflowing(at=4)
    with pytest.raises(ActivationOverflowError) as caught:
        trainer(tmp_path, callbacks=[callback], accumulate_grad_batches=2).fit(model, loader(8))
    error = caught.value
    assert (error.path, error.class_name, error.role, error.batch) == ("net.0", "Linear", "output", 4)
    assert error.report.splitlines()[0] == "< [4] net.0: Linear: output has infs"
    for name, value in model.named_parameters():
        if name != "net.0.bias":
            assert torch.equal(value, model.before[name]), "the optimizer has not stepped"
    assert not callback.session.running
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_healthy_fit_with_validation_ends_without_a_hook_on_the_model(tmp_path: Path) -> None:
    callback = PrecisionDebugCallback(statistics(), debug=["activation_overflow", "te_precision"])
    model = Plain()
    fit = trainer(tmp_path, callbacks=[callback], val_check_interval=2)
    fit.fit(model, loader(6), loader(2))
    assert fit.global_step == 6
    assert callback.session.overflow is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Scaled(Overflowing):
    """Its loss is large enough for the first scales to be too much; its first bias overflows in one batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * 2.0**20


@pytest.mark.parametrize("at", [-1, 6])
def test_the_gradients_of_a_scaled_loss_are_the_scalers_affair(tmp_path: Path, at: int) -> None:
    """And an overflow of the forward, under which the scaler leaves out the step, is not."""
    callback = PrecisionDebugCallback(statistics(), debug="activation_overflow")
    plugin = L.pytorch.plugins.MixedPrecision("bf16-mixed", "cpu")
    fit = trainer(tmp_path, callbacks=[callback], plugins=[plugin])
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1000)
    ends = contextlib.nullcontext() if at < 0 else pytest.raises(ActivationOverflowError, match=r"\[6\] net.0: Linear")
    with ends:
        fit.fit(Scaled(at), loader(24))
    assert plugin.scaler.get_scale() <= 2.0**115
