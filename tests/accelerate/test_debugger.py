"""The debugger in real loops with Accelerate: what counts as an iteration, where logs go, how it ends."""

import gc
import importlib
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from te_precision_callbacks import PrecisionDebugger
from te_precision_callbacks.base.errors import MissingExtraError, OptionError
from te_precision_callbacks.session import SessionError
from tests.accelerate.loops import Plain, fresh, prepared, run, train
from tests.conftest import Keeper, module_state, statistics
from tests.lightning.models import batch_of, largest, largest_inputs, logged_lines


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
    expected = {step: largest(step) for step in range(6)}
    assert observe(tmp_path, accumulate=4, step_on="batch") == expected


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
    with pytest.raises(SessionError, match=r"prepare\(\) was not given this Plain. Make the debugger after"):
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
        with pytest.raises(SessionError, match=r"start\(\): the debugger is running already"):
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
