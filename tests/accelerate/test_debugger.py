"""The debugger in real loops with Accelerate: what counts as an iteration, where logs go, how it ends and resumes."""

import gc
import importlib
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator

from te_precision_callbacks import PrecisionDebugger
from te_precision_callbacks.accelerate.debugger import STATE_FILE
from te_precision_callbacks.base.errors import MissingExtraError, OptionError
from te_precision_callbacks.overflow import ActivationOverflowError
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.runs.fingerprints import FILE_NAME
from te_precision_callbacks.session import SessionError
from tests.accelerate.loops import Plain, fresh, prepared, run, train
from tests.conftest import Keeper, module_state, statistics
from tests.lightning.models import batch_of, largest, largest_inputs, logged_lines
from tests.session.test_resume_audit import DELAYED, findings, warned


def observe(tmp_path: Path, batches: int = 6, accumulate: int = 1, **keywords: Any) -> dict[int, float]:
    accelerator, *loop = fresh(batches=batches, gradient_accumulation_steps=accumulate)
    with PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=tmp_path, **keywords) as debugger:
        run(accelerator, debugger, *loop)
    return largest_inputs(tmp_path, "fc1")


def test_an_accumulation_is_one_iteration(tmp_path: Path) -> None:
    """Also the last one, which Accelerate ends with the loader."""
    expected = {0: largest(0, 1, 2, 3), 1: largest(4, 5, 6, 7), 2: largest(8, 9)}
    assert observe(tmp_path, batches=10, accumulate=4) == expected


def test_every_batch_may_be_an_iteration(tmp_path: Path) -> None:
    assert observe(tmp_path, accumulate=4, step_on="batch") == {step: largest(step) for step in range(6)}


def test_start_and_stop_instead_of_a_block(tmp_path: Path, keeper: Keeper) -> None:
    accelerator, *loop = fresh(batches=2)
    before = module_state(loop[0])
    debugger = PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=tmp_path, sinks=[keeper])
    assert not debugger.session.running
    assert debugger.start() is debugger
    run(accelerator, debugger, *loop)
    debugger.stop()
    debugger.stop()
    assert keeper.iterations == [0, 1]
    assert [layer.name for layer in debugger.session.layers] == ["fc1", "fc2"]
    assert module_state(loop[0]) == before
    with debugger:  # again: it counts on
        run(accelerator, debugger, *loop)
    assert keeper.iterations == [0, 1, 2, 3]


def test_only_training_is_observed(tmp_path: Path) -> None:
    """Evaluation of a hundred times larger batches, in eval mode and without gradients."""
    accelerator, model, optimizer, loader = fresh(batches=4)
    with PrecisionDebugger(accelerator, model, statistics(), log_dir=tmp_path) as debugger:
        for index, _ in enumerate(train(accelerator, debugger, model, optimizer, loader)):
            inputs = 100 * batch_of(index).to(accelerator.device)
            model.eval()
            model(inputs)
            model.train()
            with torch.no_grad():
                model(inputs)
    assert largest_inputs(tmp_path, "fc1") == {step: largest(step) for step in range(4)}


def test_an_exception_ends_the_session_and_what_was_gathered_is_written(tmp_path: Path, keeper: Keeper) -> None:
    accelerator, model, optimizer, loader = fresh(batches=4)
    before = module_state(model)
    with pytest.raises(ValueError, match="a bad batch") as raised:
        with PrecisionDebugger(accelerator, model, statistics(), log_dir=tmp_path, sinks=[keeper]) as debugger:
            for index, _ in enumerate(train(accelerator, debugger, model, optimizer, loader)):
                if index == 2:
                    raise ValueError("a bad batch")
    assert keeper.closed == [raised.value]
    assert {step for _, step in logged_lines(tmp_path)} == {0, 1, 2}
    assert keeper.steps[-1].logging_step == 3, "where the step would have been logged"
    assert module_state(model) == before


def test_a_debugger_that_is_gone_leaves_nothing_with_the_accelerator() -> None:
    accelerator, model, *_ = fresh()
    debuggers = [PrecisionDebugger(accelerator, model, statistics()) for _ in range(3)]
    assert len(accelerator._save_model_state_pre_hook) == len(accelerator._load_model_state_pre_hook) == 3
    del debuggers
    gc.collect()
    assert len(accelerator._save_model_state_pre_hook) == len(accelerator._load_model_state_pre_hook) == 0


# ---------------------------------------------------------------------- what cannot be


def test_without_accelerate_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "accelerate", None)
    monkeypatch.delitem(sys.modules, "te_precision_callbacks.accelerate")
    with pytest.raises(MissingExtraError, match=r"\[accelerate\]"):
        importlib.import_module("te_precision_callbacks.accelerate")


def test_a_model_that_was_not_prepared_is_refused() -> None:
    accelerator = Accelerator()
    with pytest.raises(SessionError, match=r"prepare\(\) was not given this Plain. Create the debugger after"):
        PrecisionDebugger(accelerator, Plain())
    prepared(accelerator, Plain())
    with pytest.raises(SessionError, match=r"prepare\(\) was not given this Plain, but another one"):
        PrecisionDebugger(accelerator, Plain())


def test_bad_arguments_are_refused_at_once() -> None:
    accelerator, model, *_ = fresh()
    with pytest.raises(OptionError, match=r"The order is PrecisionDebugger\(accelerator, model, config\)"):
        PrecisionDebugger(model, accelerator)
    for wrong in (None, "model", [], [model, None]):
        with pytest.raises(OptionError, match=r"model= must be the torch\.nn\.Module that"):
            PrecisionDebugger(accelerator, wrong)  # type: ignore[arg-type]
    with pytest.raises(OptionError, match="step_on= must be one of 'optimizer_step', 'batch', not 'epoch'"):
        PrecisionDebugger(accelerator, model, step_on="epoch")  # type: ignore[arg-type]


def test_steps_out_of_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    accelerator, model, *_ = fresh()
    debugger = PrecisionDebugger(accelerator, model, statistics(), log_dir=tmp_path)
    with pytest.raises(SessionError, match=r"step\(\): the debugger is not running. Call start\(\) before the loop"):
        debugger.step()
    with debugger:
        with pytest.raises(SessionError, match=r"start\(\): the debugger is already running"):
            debugger.start()
        with pytest.raises(SessionError, match="Another session is running"):
            PrecisionDebugger(accelerator, model, statistics(), log_dir=tmp_path).start()
        assert debugger.session.running
        assert debugger.step(np.int64(3)) is None
        for wrong in ("3", 3.0, -1, True):
            with pytest.raises(OptionError, match=r"step= must be a whole number >= 0, not"):
                debugger.step(wrong)  # type: ignore[arg-type]
    for _ in range(2):
        assert debugger.step() is None, "a run that was healthy goes on"
    assert caplog.text.count("the debugger was stopped, so nothing more is observed") == 1


# ---------------------------------------------------------------------- the loss of accelerator.backward()


def train_with_loss(folder: Path | None, *, logs: str = "", nan_at: int = -1) -> tuple[Any, list[float]]:
    """Six batches, two per step: the debugger, and the parameters at the end."""
    accelerator, model, optimizer, loader = fresh(gradient_accumulation_steps=2)
    own = accelerator.backward
    debugger = folder and PrecisionDebugger(accelerator, model, statistics(), log_dir=folder, quiet=True).start()
    for index, batch in enumerate(loader):
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss * (float("nan") if index == nan_at else 1))
            optimizer.step()
            optimizer.zero_grad()
        if debugger is not None:
            debugger.step()
        if logs and accelerator.sync_gradients:
            accelerator.log({logs: 7.0}, step=index // 2 + 1)
    if debugger is not None:
        debugger.stop()
    assert accelerator.backward == own
    return debugger, [value for parameter in model.parameters() for value in parameter.flatten().tolist()]


def losses(folder: Path, name: str = "loss") -> list[float]:
    return open_run(folder).metrics[name][1].tolist()


def test_the_mean_of_a_step_is_its_loss(tmp_path: Path) -> None:
    debugger, with_debugger = train_with_loss(tmp_path)
    assert with_debugger == train_with_loss(None)[1]
    model = Plain()
    first, second = (model(batch_of(index)).pow(2).mean().item() for index in (0, 1))
    assert losses(tmp_path)[0] == pytest.approx((first + second) / 2, rel=1e-6)
    assert len(losses(tmp_path)) == 3
    unchecked = [item for item in debugger.session.findings.not_checked if "training loss" in item.why]
    assert "nonfinite" not in [item.rule for item in unchecked]


@pytest.mark.parametrize("logs", ["loss", "train/other"])
def test_a_script_that_logs_its_loss(tmp_path: Path, logs: str) -> None:
    train_with_loss(tmp_path, logs=logs)
    assert len(losses(tmp_path)) == 3
    assert losses(tmp_path, logs)[-3:] == [7.0] * 3


# ---------------------------------------------------------------------- debug="activation_overflow"


@pytest.mark.parametrize(("batch", "steps_before"), [(0, 0), (3, 1)])
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


# ---------------------------------------------------------------------- save_state and load_state


class InFp8(Plain):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=DELAYED):
            return super().forward(inputs)


def new_process() -> Any:
    return fresh(InFp8(), size=32, gradient_accumulation_steps=2)


def saved(folder: Path, *, inside: bool = True) -> Path:
    accelerator, *loop = new_process()
    checkpoint = folder / "checkpoint"
    with PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=folder / "first") as debugger:
        run(accelerator, debugger, *loop)
        if inside:
            accelerator.save_state(str(checkpoint), safe_serialization=False)
    if not inside:
        accelerator.save_state(str(checkpoint), safe_serialization=False)
    return checkpoint


def resumed(
    keeper: Keeper, folder: Path, checkpoint: Path, *, before_start: bool = True, **keywords: Any
) -> PrecisionDebugger:
    accelerator, *loop = new_process()
    debugger = PrecisionDebugger(
        accelerator, loop[0], statistics(), log_dir=folder / "second", sinks=[keeper], **keywords
    )
    if before_start:
        accelerator.load_state(str(checkpoint))
    with debugger:
        if not before_start:
            accelerator.load_state(str(checkpoint))
        run(accelerator, debugger, *loop)
    return debugger


@pytest.mark.usefixtures("trusted_checkpoints")
@pytest.mark.parametrize(("inside", "before_start"), [(True, True), (False, False)])
def test_a_good_resume(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, inside: bool, before_start: bool
) -> None:
    checkpoint = saved(tmp_path, inside=inside)
    debugger = resumed(keeper, tmp_path, checkpoint, before_start=before_start, strict=True)
    assert keeper.iterations == [3, 4, 5]
    assert [records.logging_step for records in keeper.steps] == [4, 5, 6]
    assert keeper.runs[0].start_iteration == 3
    assert findings(debugger.session.resume_report) == []
    assert warned(caplog) == []


@pytest.mark.usefixtures("trusted_checkpoints")
def test_a_checkpoint_without_the_debugger_loads_with_it(tmp_path: Path, keeper: Keeper) -> None:
    accelerator, *_ = new_process()
    accelerator.save_state(str(tmp_path / "checkpoint"), safe_serialization=False)
    assert not (tmp_path / "checkpoint" / STATE_FILE).exists()
    resumed(keeper, tmp_path, tmp_path / "checkpoint", before_start=False)
    assert keeper.iterations == [0, 1, 2]


@pytest.mark.usefixtures("trusted_checkpoints")
def test_what_was_counted_in_another_way_is_not_taken_up(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    resumed(keeper, tmp_path, saved(tmp_path), step_on="batch")
    assert keeper.iterations == list(range(6))
    assert "was counted with step_on='optimizer_step', so it is not restored with step_on='batch'" in caplog.text


@pytest.mark.usefixtures("trusted_checkpoints")
@pytest.mark.parametrize(
    ("name", "content", "begins", "warning"),
    [
        (STATE_FILE, "", 0, f"{STATE_FILE} has no debug iteration"),
        (STATE_FILE, "{}", 0, f"{STATE_FILE} has no debug iteration"),
        (FILE_NAME, "{", 3, f"{FILE_NAME}: The fingerprint is not JSON"),
    ],
)
def test_a_damaged_file_does_not_stop_a_resume(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, name: str, content: str, begins: int, warning: str
) -> None:
    checkpoint = saved(tmp_path)
    (checkpoint / name).write_text(content)
    resumed(keeper, tmp_path, checkpoint)
    assert keeper.iterations[0] == begins
    assert warning in caplog.text


@pytest.mark.usefixtures("trusted_checkpoints")
def test_a_debugger_that_was_made_too_late_says_so(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    def with_a_state(kind: Any) -> Any:
        accelerator, model, _, loader = fresh(gradient_accumulation_steps=2)
        return accelerator, model, accelerator.prepare(kind(model.parameters())), loader

    accelerator, *loop = with_a_state(torch.optim.Adagrad)
    with PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=tmp_path):
        assert "accelerator.load_state()" not in caplog.text, "Adagrad's state is there from the beginning"

    accelerator, *loop = with_a_state(torch.optim.AdamW)
    with PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=tmp_path) as debugger:
        run(accelerator, debugger, *loop)
        accelerator.save_state(str(tmp_path / "checkpoint"), safe_serialization=False)
    state = json.loads((tmp_path / "checkpoint" / STATE_FILE).read_text())
    assert state == {"iteration": 3, "step_on": "optimizer_step"}
    assert "accelerator.load_state()" not in caplog.text

    accelerator, *loop = with_a_state(torch.optim.AdamW)
    accelerator.load_state(str(tmp_path / "checkpoint"))
    for begins, keywords in ((0, {}), (3, {"start_step": 3})):
        caplog.clear()
        with PrecisionDebugger(
            accelerator, loop[0], statistics(), log_dir=tmp_path, sinks=[keeper], **keywords
        ) as debugger:
            run(accelerator, debugger, *loop)
        assert keeper.iterations[-3:] == [begins, begins + 1, begins + 2]
        assert ("create the PrecisionDebugger before accelerator.load_state()" in caplog.text) == (not keywords)
