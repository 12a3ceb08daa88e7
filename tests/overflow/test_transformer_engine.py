"""Modules of Transformer Engine: the FP8 scale in their frames, their names, and a session beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics
from tests.overflow.models import hooks_on

INF = float("inf")


def frames_with_scale(model: torch.nn.Module, recipe: Any, amaxes: list[float], size: int = 16) -> list[str]:
    """The frames with a scale of a training with inputs of given amaxes, without their abs_max column."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watching = DebugActivationOverflow(model, 1000)
    inputs = torch.linspace(-1, 1, 16 * size).view(16, size)
    for amax in amaxes:
        with te.autocast(enabled=True, recipe=recipe):
            output = model(amax * inputs)
        output.sum().backward()
        optimizer.step()
    with pytest.raises(ActivationOverflowError) as raised:
        model(inputs * INF)
        watching.close()
    assert hooks_on(model) == 0
    return [line[18:] for line in raised.value.report.splitlines() if "FP8 scale" in line]


def test_delayed_scaling() -> None:
    model = torch.nn.Sequential(te.Linear(16, 16, device="cpu"))
    found = frames_with_scale(model, DelayedScaling(), [16.0, 4.0, 32.0, 1.0])
    # 448 over the largest amax so far; a gradient is 1 everywhere, in E5M2.
    assert [line for line in found if ">" in line and "input" in line] == [
        "> [0] 0: Linear: input[0] FP8 scale 1.00",
        "> [1] 0: Linear: input[0] FP8 scale 28.0",
        "> [2] 0: Linear: input[0] FP8 scale 28.0",
        "> [3] 0: Linear: input[0] FP8 scale 14.0",
    ]
    assert [line for line in found if "grad" in line] == [
        "> [0] 0: Linear: grad_output FP8 scale 1.00",
        *[f"> [{batch}] 0: Linear: grad_output FP8 scale 5.73e+04" for batch in (1, 2, 3)],
    ]


def test_current_scaling() -> None:
    model = torch.nn.Sequential(te.Linear(16, 16, device="cpu"))
    found = frames_with_scale(model, Float8CurrentScaling(), [16.0, 4.0])
    assert found == [
        "> [0] 0: Linear: input[0] FP8 scale 28.0",
        "> [0] 0: Linear: grad_output FP8 scale 5.73e+04",
        "> [1] 0: Linear: input[0] FP8 scale 112.",
        "> [1] 0: Linear: grad_output FP8 scale 5.73e+04",
    ]


def test_scales_stand_beside_what_they_scale() -> None:
    """Attention without FP8 has none; the gradient of an MLP's output is that of its second GEMM."""
    model = te.TransformerLayer(16, 16, 2, hidden_dropout=0.0, attention_dropout=0.0, device="cpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    watching = DebugActivationOverflow(model, 1000)
    inputs = torch.linspace(-1, 1, 16 * 16).view(16, 1, 16)
    for _ in range(2):
        with te.autocast(enabled=True, recipe=DelayedScaling()):
            output = model(inputs)
        (4 * output).sum().backward()
        optimizer.step()
    with pytest.raises(ActivationOverflowError) as raised:
        model(inputs * INF)
        watching.close()
    lines = [line[18:] for line in raised.value.report.splitlines() if "FP8 scale" in line and " [1] " in line]
    assert not [line for line in lines if "DotProductAttention" in line]
    layers = {line.split(":")[1].strip() for line in lines}
    assert layers == {"LayerNormLinear", "Linear", "LayerNormMLP"}
    (of_mlp,) = (line for line in lines if "LayerNormMLP: grad_output" in line)
    assert of_mlp.endswith("FP8 scale 1.43e+04"), "the largest number of E5M2, 57344, over the gradient 4"


@pytest.mark.parametrize("names", [None, [], ["scaling_fwd"]])
def test_quantizers_of_another_version(names: list[str] | None) -> None:
    """A module that keeps its quantizers otherwise has no scale in its frames, and is watched all the same."""

    class Float8CurrentScalingQuantizer:
        pass

    class Linear(torch.nn.Linear):
        fp8 = True

    model = Linear(2, 2)
    model.fp8_meta = {}  # type: ignore[assignment]
    if names is not None:
        model.quantizers = {name: [Float8CurrentScalingQuantizer()] for name in names}  # type: ignore[assignment]
    with pytest.raises(ActivationOverflowError, match=r"> \[0\] Linear: input\[0\] has infs"):
        with DebugActivationOverflow(model):
            model(torch.tensor([[INF, 1.0]]))


def test_a_transformer_layer_names_itself_and_has_no_scale_without_fp8() -> None:
    model = te.TransformerLayer(32, 64, 4, device="cpu")
    watching = DebugActivationOverflow(model, 1000)
    model(torch.randn(4, 2, 32)).sum().backward()
    with torch.no_grad():
        model.layernorm_mlp.fc2_weight.fill_(INF)
    with pytest.raises(ActivationOverflowError) as raised:
        model(torch.randn(4, 2, 32)).sum().backward()
        watching.look()
    assert raised.value.path == "transformer_layer.layernorm_mlp"
    assert raised.value.class_name == "LayerNormMLP"
    assert "FP8 scale" not in raised.value.report
    assert "transformer_layer.self_attention.layernorm_qkv: LayerNormLinear: input[0]" in raised.value.report


def test_quantized_tensors() -> None:
    quantizer = te.Float8CurrentScalingQuantizer(fp8_dtype=te.DType.kFloat8E4M3, device="cpu")
    values = torch.linspace(-6, 5, 256).view(16, 16)
    quantized = quantizer(values)

    class Takes(torch.nn.Module):
        def forward(self, x: torch.Tensor, factor: float) -> torch.Tensor:
            return x.dequantize() * factor  # type: ignore[attr-defined, no-any-return]

    model = Takes()
    with pytest.raises(ActivationOverflowError) as raised, DebugActivationOverflow(model):
        model(quantized, INF)
    assert raised.value.report.splitlines()[4] == "abs_max= 6.00e+00 > [0] Takes: input[0]"


@pytest.mark.usefixtures("backward_thread")
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_its_own_checkpoint(use_reentrant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    # Transformer Engine 2.20.2 remembers the last choice, and fuses otherwise after it.
    monkeypatch.setattr(te.distributed, "_USE_REENTRANT_ACTIVATION_RECOMPUTE", True)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = te.Linear(16, 16, device="cpu")
            self.second = te.Linear(16, 16, device="cpu")

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return te.checkpoint(self.second, self.first(x), use_reentrant=use_reentrant)  # type: ignore[no-any-return]

    model = Model()
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
    assert [line.partition(" FP8")[0] for line in lines if "put" in line and "grad" not in line] == [
        "> [1] first: Linear: input[0]",
        "< [1] first: Linear: output",
        "> [1] second: Linear: input[0]",
        "< [1] second: Linear: output",
        "> [1] Model: input[0]",
        "< [1] Model: output",
    ]
    gradients = {line.partition(" FP8")[0] for line in lines if "grad_" in line}
    assert gradients == {
        "> [1] Model: grad_output",
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
                    with torch.no_grad():
                        model[1].bias.fill_(INF)
                with te.autocast(enabled=True, recipe=DelayedScaling()):
                    output = model(torch.ones(16, 16))
                output.sum().backward()
                optimizer.step()
                session.step()
    assert hooks_on(model) == 0
    assert session.overflow is None
    assert not session.running
