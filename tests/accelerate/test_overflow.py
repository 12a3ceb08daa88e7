"""debug="activation_overflow": the loop ends before the optimizer spreads an inf."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

from te_precision_callbacks.accelerate import PrecisionDebugger
from te_precision_callbacks.overflow import ActivationOverflowError
from tests.accelerate.loops import Plain, batch_of, prepared
from tests.conftest import Keeper, module_state, statistics


def overflow_at(batch: int, accelerator: Accelerator, model: Any, optimizer: Any, debugger: PrecisionDebugger) -> None:
    """A loop in which the layer norm of fc2 overflows in one batch: its input squared is above float32's maximum."""
    for index in range(6):
        inputs = batch_of(index).to(accelerator.device)
        with accelerator.accumulate(model):
            output = model(inputs * (3e38 / inputs.abs().max()) if index == batch else inputs)
            accelerator.backward(output.mean())
            optimizer.step()
            optimizer.zero_grad()
        debugger.step()


@pytest.mark.parametrize(("batch", "steps_before"), [(0, 0), (2, 1), (3, 1), (5, 2)])
def test_the_weights_are_those_of_the_step_before(
    tmp_path: Path, keeper: Keeper, batch: int, steps_before: int
) -> None:
    """Two batches an optimizer step; the overflow is in the first or second of them."""
    accelerator = Accelerator(gradient_accumulation_steps=2)
    model, optimizer, _ = prepared(accelerator, Plain())
    before = module_state(model)
    weights: list[torch.Tensor] = []
    optimizer.optimizer.register_step_post_hook(lambda *_: weights.append(model.fc1.weight.detach().clone()))
    weights.append(model.fc1.weight.detach().clone())
    debugger = PrecisionDebugger(
        accelerator, model, statistics(), debug="activation_overflow", log_dir=tmp_path, sinks=[keeper]
    )
    first_bad = rf"< \[{batch}\] fc2: LayerNormLinear: output has nans"
    with pytest.raises(ActivationOverflowError, match=first_bad) as raised, debugger:
        assert debugger.session.overflow is not None
        assert not debugger.session.overflow.loss_scaled
        overflow_at(batch, accelerator, model, optimizer, debugger)
    step = f"debug iteration {steps_before}, step {steps_before + 1}"
    assert f"in batch {batch} ({step})" in str(raised.value)
    assert raised.value.report.splitlines()[1] == f"batch {batch} is in {step}"
    assert len(weights) == steps_before + 1
    assert torch.equal(model.fc1.weight, weights[-1])
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert keeper.closed == [raised.value]
    assert keeper.iterations == [*range(steps_before), steps_before], "what was gathered until then is written too"
    assert debugger.session.overflow is None
    assert module_state(model) == before
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
