"""A loss that alone is nan, computed outside of the model, while activations and gradients are finite."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from lightning.fabric import Fabric
from lightning.fabric.plugins.precision import MixedPrecision
from torch.amp.grad_scaler import GradScaler

from te_precision_callbacks import (
    InspectSession,
    PrecisionDebugCallback,
    PrecisionDebugFabricCallback,
    PrecisionDebugTrainerCallback,
)
from te_precision_callbacks.accelerate import PrecisionDebugger
from te_precision_callbacks.overflow import ActivationOverflowError, DebugActivationOverflow
from te_precision_callbacks.transformers import Trainer
from tests.transformers.models import SIZE, Vectors, arguments, trainer

BAD = 2
"""The batch whose loss is nan."""

WATCHED: dict[str, Any] = {"debug": "activation_overflow", "config": None, "allow_unmatched": True}


class Net(torch.nn.Module):
    """Returns no loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(SIZE, 1)
        self.weights: list[torch.Tensor] = []

    def forward(self, inputs: torch.Tensor, labels: Any = None) -> torch.Tensor:
        self.weights.append(self.layer.weight.detach().clone())
        return self.layer(inputs)  # type: ignore[no-any-return]


def batches() -> torch.utils.data.DataLoader[dict[str, torch.Tensor]]:
    return torch.utils.data.DataLoader(Vectors(16), batch_size=4)


def loss_of(output: torch.Tensor, index: int, bad: float = float("nan")) -> torch.Tensor:
    """A loss to which a constant is added: its gradients are always finite."""
    return output.pow(2).mean() + (bad if index == BAD else 0.0)


@pytest.fixture(autouse=True)
def fresh_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture
def model() -> Net:
    return Net()


def found(error: pytest.ExceptionInfo[ActivationOverflowError], model: Net, word: str = "nans") -> None:
    """The report names the loss, with the model's frames before; the step of the bad batch was not made."""
    value = error.value
    assert value.report.splitlines()[0] == f"= [{BAD}] loss has {word}"
    assert (value.path, value.class_name, value.role, value.batch) == ("", "", "loss", BAD)
    *_, output, last = value.report.splitlines()
    assert last.split() == ["abs_max=", word.removesuffix("s"), "=", f"[{BAD}]", "loss"]
    assert f"< [{BAD}]" in output
    assert output.endswith(("layer: Linear: output", "Net: output"))
    assert "outside of the watched modules" in str(value)
    assert len(model.weights) == BAD + 1
    assert torch.equal(model.layer.weight, model.weights[-1])


def scaler_of() -> GradScaler:
    """A scale under which the loss of a healthy batch is above float32's largest number: the scaler halves it."""
    return GradScaler("cpu", init_scale=2.0**127, growth_interval=1000)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("manual", [False, True])
def test_lightning(tmp_path: Path, model: Net, precision: str, manual: bool) -> None:
    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model
            self.automatic_optimization = not manual

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> Any:
            loss = loss_of(self.net(batch["inputs"]), batch_idx)
            if not manual:
                return {"loss": loss}
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            return None

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1e-3)

    plugins = []
    if precision == "16-mixed":
        plugins = [L.pytorch.plugins.MixedPrecision("bf16-mixed", "cpu")]
        plugins[0].scaler = scaler_of()
    fit = L.Trainer(
        default_root_dir=tmp_path,
        max_epochs=1,
        accelerator="cpu",
        callbacks=[PrecisionDebugCallback(**WATCHED)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=plugins or None,
    )
    with pytest.raises(ActivationOverflowError) as raised:
        fit.fit(Module(), batches())
    found(raised, model)


@pytest.mark.parametrize("scaled", [False, True])
def test_fabric(tmp_path: Path, model: Net, scaled: bool) -> None:
    callback = PrecisionDebugFabricCallback(**WATCHED, log_dir=tmp_path)
    plugins = [MixedPrecision("16-mixed", "cpu", scaler_of())] if scaled else None
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[callback], plugins=plugins)
    fabric.launch()
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    with pytest.raises(ActivationOverflowError) as raised, callback:
        for index, batch in enumerate(batches()):
            fabric.backward(loss_of(wrapped(batch["inputs"]), index))
            optimizer.step()
            optimizer.zero_grad()
    found(raised, model)
    assert "backward" not in vars(fabric)


@pytest.mark.parametrize("scaled", [False, True])
def test_accelerate(tmp_path: Path, model: Net, scaled: bool) -> None:
    accelerator = Accelerator(cpu=True)
    if scaled:
        accelerator.scaler = scaler_of()
    wrapped, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1e-3))
    debugger = PrecisionDebugger(accelerator, wrapped, **WATCHED, log_dir=tmp_path)
    with pytest.raises(ActivationOverflowError) as raised, debugger:
        for index, batch in enumerate(batches()):
            accelerator.backward(loss_of(wrapped(batch["inputs"]), index))
            optimizer.step()
            optimizer.zero_grad()
            debugger.step()
    found(raised, model)
    assert "backward" not in vars(accelerator)


@pytest.mark.parametrize("by", ["compute_loss_func", "compute_loss"])
@pytest.mark.parametrize("session", [False, True])
def test_transformers(tmp_path: Path, model: Net, by: str, session: bool) -> None:
    count = 0

    def compute_loss_func(outputs: Any, labels: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        nonlocal count
        count += 1
        return loss_of(outputs, count - 1)

    class Own(Trainer):
        def compute_loss(self, model: Any, inputs: Mapping[str, Any], *args: Any, **keywords: Any) -> Any:
            return compute_loss_func(model(**inputs), None)

    made = trainer(
        arguments(tmp_path, per_device_train_batch_size=4, max_grad_norm=0.0),
        *([PrecisionDebugTrainerCallback(**WATCHED)] if session else []),
        model=model,
        kind=Trainer if by == "compute_loss_func" else Own,
        **({} if session else {"debug": "activation_overflow"}),
        **({"compute_loss_func": compute_loss_func} if by == "compute_loss_func" else {}),
    )
    with pytest.raises(ActivationOverflowError) as raised:
        made.train()
    found(raised, model)
    assert "backward" not in vars(made.accelerator)


def _spoil(module: Any, inputs: Any, output: Any) -> None:
    output["loss"] = output["loss"] + float("nan")


def test_a_loss_that_the_model_returns_has_one_frame(tmp_path: Path) -> None:
    """transformers.Trainer hands on the loss of the model's output, which the report names as that."""
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=SIZE, intermediate_size=SIZE, num_hidden_layers=1, num_attention_heads=2
    )
    llama = transformers.LlamaForCausalLM(config)
    llama.register_forward_hook(_spoil)
    made = trainer(arguments(tmp_path), model=llama, kind=Trainer, debug="activation_overflow")
    with pytest.raises(ActivationOverflowError, match=r"< \[0\] LlamaForCausalLM: output\[loss\] has nans"):
        made.train()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_loop_of_torch(model: Net, bad: float) -> None:
    """The loop tells the detector; where a GradScaler is used, also of one that is off, it has told already."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for scaler in (None, GradScaler("cpu", enabled=False), scaler_of()):
        model.weights.clear()
        with (
            DebugActivationOverflow(model) as watching,
            pytest.raises(ActivationOverflowError) as raised,
        ):
            for index, batch in enumerate(batches()):
                loss = loss_of(model(batch["inputs"]), index, bad)
                if scaler is None:
                    watching.watch_loss(loss)
                    loss.backward()
                    optimizer.step()
                else:
                    scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
                    scaler.step(optimizer)
                    scaler.update()
                optimizer.zero_grad()
        found(raised, model, "nans" if bad != bad else "infs")


@pytest.mark.parametrize("as_float", [False, True])
def test_a_loss_that_a_session_is_told_after_the_step(tmp_path: Path, model: Net, as_float: bool) -> None:
    """It is found before the next step, without another wait for the device."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    session = InspectSession(model=model, **WATCHED, log_dir=tmp_path)
    with pytest.raises(ActivationOverflowError, match=rf"^= \[{BAD}\] loss has nans") as raised, session:
        for index, batch in enumerate(batches()):
            loss = loss_of(model(batch["inputs"]), index)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            session.log({"loss": loss.item() if as_float else loss, "lr": float("nan")})
            session.step()
    assert len(model.weights) == BAD + 2
    assert torch.equal(model.layer.weight, model.weights[-1])
    assert raised.value.report.splitlines()[-2].endswith("layer: Linear: grad of weight")


def test_the_last_loss_that_a_session_is_told(tmp_path: Path, model: Net) -> None:
    session = InspectSession(model=model, **WATCHED, log_dir=tmp_path)
    with pytest.raises(ActivationOverflowError, match=r"^= \[0\] loss has nans"), session:
        model(torch.ones(1, SIZE)).sum().backward()
        session.log({"loss": float("nan")})
