"""save_state and load_state: the debug iteration goes on, the audit finds nothing, and no checkpoint is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.accelerate import STATE_FILE, PrecisionDebugger
from te_precision_callbacks.runs.fingerprints import FILE_NAME
from tests.accelerate.loops import Plain, fresh, run
from tests.conftest import Keeper, statistics
from tests.session.test_resume_audit import DELAYED, findings, warned

pytestmark = pytest.mark.usefixtures("trusted_checkpoints")


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
    options: dict[str, Any] = {"log_dir": folder / "second", "sinks": [keeper], **keywords}
    debugger = PrecisionDebugger(accelerator, loop[0], statistics(), **options)
    if before_start:
        accelerator.load_state(str(checkpoint))
    with debugger:
        if not before_start:
            accelerator.load_state(str(checkpoint))
        run(accelerator, debugger, *loop)
    return debugger


@pytest.mark.parametrize("before_start", [True, False])
@pytest.mark.parametrize("inside", [True, False])
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


def test_a_checkpoint_without_the_debugger_loads_with_it(tmp_path: Path, keeper: Keeper) -> None:
    accelerator, *_ = new_process()
    accelerator.save_state(str(tmp_path / "checkpoint"), safe_serialization=False)
    assert not (tmp_path / "checkpoint" / STATE_FILE).exists()
    resumed(keeper, tmp_path, tmp_path / "checkpoint", before_start=False)
    assert keeper.iterations == [0, 1, 2]


def test_what_was_counted_in_another_way_is_not_taken_up(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    resumed(keeper, tmp_path, saved(tmp_path), step_on="batch")
    assert keeper.iterations == list(range(6))
    assert "was counted with step_on='optimizer_step', so it is not restored with step_on='batch'" in caplog.text


@pytest.mark.parametrize(
    ("name", "content", "begins", "warning"),
    [
        (STATE_FILE, "", 0, f"{STATE_FILE} holds no debug iteration"),
        (STATE_FILE, "{}", 0, f"{STATE_FILE} holds no debug iteration"),
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
        options: dict[str, Any] = {"log_dir": tmp_path, "sinks": [keeper], **keywords}
        with PrecisionDebugger(accelerator, loop[0], statistics(), **options) as debugger:
            run(accelerator, debugger, *loop)
        assert keeper.iterations[-3:] == [begins, begins + 1, begins + 2]
        assert ("make the PrecisionDebugger before accelerator.load_state()" in caplog.text) == (not keywords)
