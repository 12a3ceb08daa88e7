"""Modules of Transformer Engine: their names, quantized tensors, checkpoints, and a session beside the detector."""

import functools
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics
from tests.functions import Function
from tests.overflow.models import hooks_on

INF = float("inf")


def test_a_transformer_layer_names_itself() -> None:
    model = te.TransformerLayer(32, 64, 4, device="cpu")
    watching = DebugActivationOverflow(model, 1000)
    model(torch.randn(4, 2, 32)).sum().backward()
    torch.nn.init.constant_(model.layernorm_mlp.fc2_weight, INF)
    with pytest.raises(ActivationOverflowError) as raised:
        model(torch.randn(4, 2, 32)).sum().backward()
        watching.look()
    assert (raised.value.path, raised.value.class_name) == ("transformer_layer.layernorm_mlp", "LayerNormMLP")
    assert "transformer_layer.self_attention.layernorm_qkv: LayerNormLinear: input[0]" in raised.value.report


def test_quantized_tensors() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(fp8_dtype=te.DType.kFloat8E4M3, device="cpu")
    quantized = quantizer(torch.linspace(-6, 5, 256).view(16, 16))
    model = Function(lambda x, factor: x.dequantize() * factor)
    with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model):
        model(quantized, INF)
    assert raised.value.report.splitlines()[4] == "abs_max= 6.00e+00 > [0] Function: input[0]"


@pytest.mark.usefixtures("backward_thread")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_its_own_checkpoint(use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Transformer Engine 2.20.2 remembers the last choice, and fuses otherwise after it.
    monkeypatch.setattr(te.distributed, "_USE_REENTRANT_ACTIVATION_RECOMPUTE", True)

    first, second = te.Linear(16, 16, device="cpu"), te.Linear(16, 16, device="cpu")
    again = functools.partial(te.checkpoint, second, use_reentrant=use_reentrant)
    model = Function(lambda x: again(first(x)), first=first, second=second)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watching = DebugActivationOverflow(model, 1000)
    for _ in range(2):
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            output = model(torch.ones(16, 16))
        output.sum().backward()
        optimizer.step()
    with pytest.raises(ActivationOverflowError) as raised:
        model(torch.ones(16, 16) * INF)
        watching.close()
    lines = [line[18:] for line in raised.value.report.splitlines() if "[1]" in line]
    assert [line for line in lines if "put" in line and "grad" not in line] == [
        "> [1] first: Linear: input[0]",
        "< [1] first: Linear: output",
        "> [1] second: Linear: input[0]",
        "< [1] second: Linear: output",
        "> [1] Function: input[0]",
        "< [1] Function: output",
    ]
    assert {line for line in lines if "grad_" in line} == {
        "> [1] Function: grad_output",
        "> [1] second: Linear: grad_output",
        "< [1] second: Linear: grad_input[0]",
        "> [1] first: Linear: grad_output",
    }


def test_a_session_with_the_flag(tmp_path: Path) -> None:
    model = torch.nn.Sequential(te.Linear(16, 16, device="cpu"), te.Linear(16, 16, device="cpu"))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with pytest.raises(ActivationOverflowError, match=r"< \[3\] 1: Linear: output has infs"):
        with InspectSession(statistics(), model=model, log_dir=tmp_path, debug="activation_overflow") as session:
            for iteration in range(10):
                if iteration == 3:
                    torch.nn.init.constant_(model[1].bias, INF)
                with te.autocast(enabled=True, recipe=DelayedScaling()):
                    output = model(torch.ones(16, 16))
                output.sum().backward()
                optimizer.step()
                session.step()
    assert hooks_on(model) == 0
    assert session.overflow is None
    assert not session.running
