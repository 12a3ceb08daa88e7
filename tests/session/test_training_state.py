"""What optimizers step and keep, in a checkpoint and after its resume: in a loop and under each trainer."""

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import accelerate
import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
import transformers
from transformer_engine.common import recipe as recipes

from te_precision_callbacks import PrecisionDebugCallback, PrecisionDebugger, PrecisionDebugTrainerCallback
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.runs.fingerprints import Fingerprint
from te_precision_callbacks.session import InspectSession
from tests.conftest import statistics
from tests.lightning.models import Plain, loader
from tests.lightning.models import trainer as lightning_trainer
from tests.transformers.models import Net, arguments
from tests.transformers.models import trainer as hugging_face_trainer

RECIPE = recipes.Float8CurrentScaling()

Change = Callable[[torch.nn.Module, torch.optim.Optimizer], Any]


def moments(change: Callable[[dict[str, Any]], Any]) -> Change:
    def spoil(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            change(state)

    return spoil


def in_group(**settings: Any) -> Change:
    return lambda model, optimizer: [group.update(settings) for group in optimizer.param_groups]


def weights(change: Callable[[torch.Tensor], torch.Tensor], *, most: int = 99) -> Change:
    def spoil(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in [parameter for parameter in model.parameters() if parameter.ndim > 1][:most]:
                parameter.copy_(change(parameter))

    return spoil


def swap_moments(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    first, *_, second = [state for tensor, state in optimizer.state.items() if tensor.ndim > 1]
    first["exp_avg"], second["exp_avg"] = second["exp_avg"], first["exp_avg"]


DEFECTS: Mapping[str, tuple[Change, str]] = {
    "no state": (
        lambda _, optimizer: optimizer.state.clear(),
        "step, exp_avg, exp_avg_sq absent: all",
    ),
    "no state of a parameter": (
        lambda _, optimizer: optimizer.state.pop(optimizer.param_groups[0]["params"][0]),
        "step, exp_avg, exp_avg_sq absent: net.0.weight.",
    ),
    "steps from 0": (moments(lambda state: state["step"].zero_()), "step 0 instead of 2: all"),
    "second moments in float16": (
        moments(lambda state: state["exp_avg_sq"].copy_((1e-8 * state["exp_avg_sq"]).half())),
        "Elements of exp_avg_sq have become 0: all",
    ),
    "moments in bfloat16": (
        moments(lambda state: state.update(exp_avg_sq=state["exp_avg_sq"].bfloat16())),
        "exp_avg_sq in bfloat16 instead of float32: all",
    ),
    "rounded moments": (
        moments(lambda state: state["exp_avg"].copy_(state["exp_avg"].bfloat16())),
        "exp_avg with slightly different values, as after rounding: ",
    ),
    "moments of another parameter": (swap_moments, "exp_avg with other values: "),
    "another learning rate": (in_group(lr=0.1), "lr 0.1 instead of 0.001: all"),
    "no weight decay": (in_group(weight_decay=0.0), "weight_decay 0 instead of 0.01: all"),
    "another average": (in_group(betas=(0.9, 0.9)), "betas[1] 0.9 instead of 0.999: all"),
    "weights of the start": (weights(torch.randn_like), "weights with other values: "),
    "one weight": (weights(lambda weight: weight.flip(0), most=1), "weights with slightly different values"),
}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)


def of_a_loop(
    folder: Path, spoil: Change | None, make: Callable[[torch.nn.Module], torch.optim.Optimizer] = adam
) -> InspectSession:
    model = Net(RECIPE)
    optimizer = make(model)
    with InspectSession(statistics(), model=model, log_dir=folder / "logs") as session:
        if spoil is not None:
            state = torch.load(folder / "saved.pt")
            session.load_state_dict(state["session"])
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            spoil(model, optimizer)
        for _ in range(2):
            model(torch.randn(32, 32, dtype=next(model.parameters()).dtype))["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
            session.step()
        if spoil is None:
            state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "session": session.state_dict()}
            torch.save(state, folder / "saved.pt")
    return session


def of_accelerate(folder: Path, spoil: Change | None) -> InspectSession:
    accelerator = accelerate.Accelerator(cpu=True)
    model = Net(RECIPE)
    model, optimizer = accelerator.prepare(model, adam(model))
    with PrecisionDebugger(accelerator, model, statistics(), log_dir=folder / "logs") as debugger:
        if spoil is not None:
            accelerator.load_state(str(folder / "saved"))
            spoil(model, optimizer.optimizer)
        for _ in range(2):
            accelerator.backward(model(torch.randn(32, 32))["loss"])
            optimizer.step()
            optimizer.zero_grad()
            debugger.step()
        if spoil is None:
            accelerator.save_state(str(folder / "saved"), safe_serialization=False)
    return debugger.session


class InFp8(Plain):
    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with te.autocast(recipe=RECIPE):
            return super().training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self)


def of_lightning(folder: Path, spoil: Change | None) -> InspectSession:
    class Spoils(L.Callback):
        def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
            if spoil is not None:
                spoil(module, trainer.optimizers[0])

    callback = PrecisionDebugCallback(statistics(), log_dir=folder / "logs")
    steps = {"max_steps": 2} if spoil is None else {"max_steps": 4, "max_epochs": 2}
    fitted = lightning_trainer(folder, callbacks=[callback, Spoils()], **steps)
    fitted.fit(InFp8(), loader(4, size=32), ckpt_path=None if spoil is None else folder / "saved.ckpt")
    if spoil is None:
        fitted.save_checkpoint(folder / "saved.ckpt")
    return callback.session


def of_hugging_face(folder: Path, spoil: Change | None) -> InspectSession:
    class Spoils(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, model: Any, optimizer: Any, **others: Any) -> None:
            if spoil is not None:
                spoil(model, getattr(optimizer, "optimizer", optimizer))

    model = Net(RECIPE)
    optimizer = adam(model)
    constant = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    callback = PrecisionDebugTrainerCallback(statistics(), log_dir=folder / "logs")
    steps = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2} if spoil is None else {"max_steps": 4}
    args = arguments(folder, per_device_train_batch_size=32, **steps)
    made = hugging_face_trainer(args, callback, Spoils(), model=model, optimizers=(optimizer, constant))
    made.train(resume_from_checkpoint=None if spoil is None else str(folder / "checkpoint-2"))
    return callback.session


@pytest.mark.usefixtures("fresh_accelerate_state")
@pytest.mark.parametrize("way", [of_a_loop, of_accelerate, of_lightning, of_hugging_face])
def test_what_was_not_restored_is_told(tmp_path: Path, way: Callable[..., InspectSession]) -> None:
    way(tmp_path, None)
    right = way(tmp_path, lambda model, optimizer: None)
    assert (right.resume_report.findings, "resume" in right.findings.checked) == ((), True)
    for name, (spoil, expected) in DEFECTS.items():
        session = way(tmp_path, spoil)  # from the same checkpoint, in the same folder
        told = [str(finding) for finding in session.resume_report.findings]
        assert [text.startswith(expected) for text in told] == [True], (name, told)
        first = next(iter(session.findings))
        assert (first.rule, first.severity) == ("resume", "warning")
        assert told[0].rstrip(".") in first.seen
    assert diagnose(tmp_path / "logs") == session.findings
    way(tmp_path, lambda model, optimizer: None)
    assert "resume" not in {finding.rule for finding in diagnose(tmp_path / "logs")}, "the repeated one is right"


@pytest.mark.parametrize(
    "make",
    [
        lambda model: torch.optim.SGD(model.parameters(), lr=0.9, momentum=0.9),
        lambda model: torch.optim.Adafactor(model.parameters()),
        lambda model: te.optimizers.FusedAdam(model.parameters(), master_weights=True),
    ],
)
def test_right_resumes_are_silent(tmp_path: Path, make: Callable[[torch.nn.Module], torch.optim.Optimizer]) -> None:
    of_a_loop(tmp_path, None, make)
    saved = Fingerprint.from_text(torch.load(tmp_path / "saved.pt")["session"]["fingerprint"]).training
    assert saved is not None
    assert saved.settings["lr"].keys() == dict(Net().named_parameters()).keys()
    assert not [key for key in saved.settings if "params" in key]
    report = of_a_loop(tmp_path, lambda model, optimizer: None, make).resume_report
    assert not report.findings
    assert report.not_compared == ("buffers", "random numbers", "the order of the data")


def test_a_schedule_may_step_before_the_first_step_and_halve_the_rate(tmp_path: Path) -> None:
    of_a_loop(tmp_path, None)
    assert not of_a_loop(tmp_path, in_group(lr=0.5e-3, betas=(0.93, 0.999))).resume_report.findings


def test_a_resume_whose_optimizer_steps_copies_of_other_weights(tmp_path: Path) -> None:
    """And of which nothing else is known, so its state is not called restored."""

    def with_masters(model: torch.nn.Module) -> torch.optim.Optimizer:
        model.bfloat16()
        masters = [weight.detach().float().requires_grad_() for weight in model.parameters()]
        for master, weight in zip(masters, model.parameters(), strict=True):
            weight.register_post_accumulate_grad_hook(functools.partial(_copy_gradient, master))
        optimizer = torch.optim.SGD(masters, lr=1e-3)
        optimizer.register_step_post_hook(lambda *_: _copy_weights(masters, model))
        return optimizer

    def of_other_weights(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for master in optimizer.param_groups[0]["params"]:
            master.detach().mul_(3.0)

    of_a_loop(tmp_path, None, with_masters)
    report = of_a_loop(tmp_path, of_other_weights, with_masters).resume_report
    (finding,) = report.findings
    assert report.not_compared[0] == "6 parameters that no optimizer was seen to step"
    assert str(finding) == "Master weights, as copies of the weights, not found: all 6 parameters."


def _copy_gradient(master: torch.Tensor, weight: torch.Tensor) -> None:
    assert weight.grad is not None
    master.grad = weight.grad.float()


@torch.no_grad()
def _copy_weights(masters: Sequence[torch.Tensor], model: torch.nn.Module) -> None:
    for master, weight in zip(masters, model.parameters(), strict=True):
        weight.copy_(master)


def test_an_optimizer_that_keeps_none_of_what_other_ranks_step(tmp_path: Path) -> None:
    """As ZeroRedundancyOptimizer does after it has loaded its state."""

    class Partial(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            super().step(closure)
            self.state = dict.fromkeys(self.param_groups[0]["params"])

    def partial(model: torch.nn.Module) -> torch.optim.Optimizer:
        return Partial(model.parameters(), lr=1e-3)

    of_a_loop(tmp_path, None, partial)
    assert of_a_loop(tmp_path, lambda model, optimizer: None, partial).resume_report.findings == ()
