"""debug="activation_overflow": the loop ends before the optimizer spreads an inf."""

from pathlib import Path

import pytest
import torch

from te_precision_callbacks.accelerate import PrecisionDebugger
from te_precision_callbacks.overflow import ActivationOverflowError
from tests.accelerate.loops import fresh, run
from tests.conftest import Keeper, module_state, statistics
from tests.lightning.models import batch_of


@pytest.mark.parametrize(("batch", "steps_before"), [(0, 0), (2, 1), (3, 1), (5, 2)])
def test_the_weights_are_those_of_the_step_before(
    tmp_path: Path, keeper: Keeper, batch: int, steps_before: int
) -> None:
    """Two batches an optimizer step; in one of them the layer norm of fc2 overflows: float32 cannot hold the square of
    its input."""
    accelerator, model, optimizer, _ = fresh(gradient_accumulation_steps=2)
    before = module_state(model)
    weights = [model.fc1.weight.detach().clone()]
    optimizer.optimizer.register_step_post_hook(lambda *_: weights.append(model.fc1.weight.detach().clone()))
    debugger = PrecisionDebugger(
        accelerator, model, statistics(), debug="activation_overflow", log_dir=tmp_path, sinks=[keeper]
    )
    batches = [batch_of(index).to(accelerator.device) for index in range(6)]
    batches[batch] *= 3e38 / batches[batch].abs().max()
    first_bad = rf"< \[{batch}\] fc2: LayerNormLinear: output has nans"
    with pytest.raises(ActivationOverflowError, match=first_bad) as raised, debugger:
        run(accelerator, debugger, model, optimizer, batches)
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
