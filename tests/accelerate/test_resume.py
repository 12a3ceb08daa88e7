"""save_state and load_state: the debug iteration goes on, and no checkpoint is refused because of the debugger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState

from te_precision_callbacks.accelerate import STATE_FILE, PrecisionDebugger
from tests.accelerate.loops import Plain, prepared, run
from tests.conftest import Keeper, statistics


def fresh(**keywords: Any) -> tuple[Accelerator, Any, Any, Any]:
    """A new process, as far as Accelerate can tell."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator(gradient_accumulation_steps=2, **keywords)
    return accelerator, *prepared(accelerator, Plain(), batches=6)


def saved(folder: Path, *, inside: bool = True) -> Path:
    """A checkpoint, three iterations old."""
    accelerator, *loop = fresh()
    debugger = PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=folder / "first")
    with debugger:
        run(accelerator, debugger, *loop)
        if inside:
            accelerator.save_state(str(folder / "checkpoint"), safe_serialization=False)
    if not inside:
        accelerator.save_state(str(folder / "checkpoint"), safe_serialization=False)
    return folder / "checkpoint"


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    return saved(tmp_path)


def resumed(keeper: Keeper, folder: Path, checkpoint: Path, *, before_start: bool, **keywords: Any) -> list[int]:
    """The iterations of a second run of three optimizer steps."""
    accelerator, *loop = fresh()
    debugger = PrecisionDebugger(
        accelerator, loop[0], statistics(), log_dir=folder / "second", sinks=[keeper], **keywords
    )
    if before_start:
        accelerator.load_state(str(checkpoint))
    with debugger:
        if not before_start:
            accelerator.load_state(str(checkpoint))
        run(accelerator, debugger, *loop)
    return keeper.iterations


def test_a_checkpoint_that_is_saved_after_the_block(tmp_path: Path, keeper: Keeper) -> None:
    checkpoint = saved(tmp_path, inside=False)
    assert resumed(keeper, tmp_path, checkpoint, before_start=True) == [3, 4, 5]


@pytest.mark.parametrize("before_start", [True, False])
def test_the_iteration_goes_on(tmp_path: Path, checkpoint: Path, keeper: Keeper, before_start: bool) -> None:
    assert resumed(keeper, tmp_path, checkpoint, before_start=before_start) == [3, 4, 5]
    assert [records.logging_step for records in keeper.steps] == [4, 5, 6]
    assert keeper.runs[0].start_iteration == 3


def test_a_checkpoint_without_the_debugger_loads_with_it(tmp_path: Path, keeper: Keeper) -> None:
    accelerator, *_ = fresh()
    accelerator.save_state(str(tmp_path / "checkpoint"), safe_serialization=False)
    assert not (tmp_path / "checkpoint" / STATE_FILE).exists()
    assert resumed(keeper, tmp_path, tmp_path / "checkpoint", before_start=False) == [0, 1, 2]


def test_what_was_counted_in_another_way_is_not_taken_up(
    tmp_path: Path, checkpoint: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    assert resumed(keeper, tmp_path, checkpoint, before_start=True, step_on="batch") == list(range(6))
    assert "was counted with step_on='optimizer_step', so it is not restored with step_on='batch'" in caplog.text


@pytest.mark.parametrize("content", ["", "{}"])
def test_a_broken_file_does_not_stop_a_resume(
    tmp_path: Path, checkpoint: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture, content: str
) -> None:
    (checkpoint / STATE_FILE).write_text(content)
    assert resumed(keeper, tmp_path, checkpoint, before_start=True) == [0, 1, 2]
    assert f"{STATE_FILE} holds no debug iteration" in caplog.text


def test_a_debugger_that_was_made_too_late_says_so(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    def with_a_state(kind: type[torch.optim.Optimizer]) -> tuple[Accelerator, Any, Any, Any]:
        accelerator, model, _, loader = fresh()
        return accelerator, model, accelerator.prepare(kind(model.parameters())), loader  # type: ignore[call-arg]

    accelerator, *loop = with_a_state(torch.optim.Adagrad)
    with PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=tmp_path):
        assert "accelerator.load_state()" not in caplog.text, "Adagrad's state is there from the beginning"

    accelerator, *loop = with_a_state(torch.optim.AdamW)
    with PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=tmp_path) as debugger:
        run(accelerator, debugger, *loop)
        accelerator.save_state(str(tmp_path / "checkpoint"), safe_serialization=False)
    assert json.loads((tmp_path / "checkpoint" / STATE_FILE).read_text()) == {
        "iteration": 3,
        "step_on": "optimizer_step",
    }
    assert "accelerator.load_state()" not in caplog.text

    accelerator, *loop = with_a_state(torch.optim.AdamW)
    accelerator.load_state(str(tmp_path / "checkpoint"))
    for keywords, iterations in (({}, [0, 1, 2]), ({"start_step": 3}, [3, 4, 5])):
        caplog.clear()
        keeper.steps.clear()
        with PrecisionDebugger(
            accelerator, loop[0], statistics(), log_dir=tmp_path, sinks=[keeper], **keywords
        ) as debugger:
            run(accelerator, debugger, *loop)
        assert keeper.iterations == iterations
        assert ("make the PrecisionDebugger before accelerator.load_state()" in caplog.text) == (not keywords)
