"""The audit of a resume with save_state and load_state."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.accelerate import PrecisionDebugger
from te_precision_callbacks.runs.fingerprints import FILE_NAME
from tests.accelerate.loops import Plain, prepared, run
from tests.conftest import statistics
from tests.session.test_resume_audit import (
    DELAYED,
    findings,
    warned,
)

WEIGHTS = "pytorch_model.bin"


pytestmark = pytest.mark.usefixtures("trusted_checkpoints")


class InFp8(Plain):
    """Two layers of Transformer Engine in FP8."""

    def __init__(self, recipe: recipes.Recipe, *, quantized: bool = False) -> None:
        with te.quantized_model_init(enabled=quantized, recipe=recipe):
            super().__init__()
        self.recipe = recipe

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        with te.autocast(recipe=self.recipe):
            return super().forward(inputs)


def fresh(model: torch.nn.Module) -> tuple[Accelerator, Any, Any, Any]:
    """A new process, as far as Accelerate can tell."""
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    accelerator = Accelerator()
    return accelerator, *prepared(accelerator, model, batches=2, size=32)


def saved(folder: Path, recipe: recipes.Recipe, *, inside: bool = True, **keywords: Any) -> Path:
    """A checkpoint after two steps."""
    accelerator, *loop = fresh(InFp8(recipe, **keywords))
    debugger = PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=folder / "first")
    with debugger:
        run(accelerator, debugger, *loop)
        if inside:
            accelerator.save_state(str(folder / "checkpoint"), safe_serialization=False)
    if not inside:
        accelerator.save_state(str(folder / "checkpoint"), safe_serialization=False)
    return folder / "checkpoint"


def resumed(
    folder: Path,
    model: torch.nn.Module,
    checkpoint: Path,
    *,
    before_start: bool = False,
    by_hand: Callable[[torch.nn.Module], Any] | None = None,
    load_keywords: Any = None,
    **keywords: Any,
) -> PrecisionDebugger:
    accelerator, *loop = fresh(model)
    debugger = PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=folder / "second", **keywords)
    if before_start:
        accelerator.load_state(str(checkpoint), **(load_keywords or {}))
    with debugger:
        if not before_start:
            accelerator.load_state(str(checkpoint), **(load_keywords or {}))
        if by_hand is not None:
            by_hand(model)
        run(accelerator, debugger, *loop)
    return debugger


def changed(checkpoint: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> Path:
    """The checkpoint with another state of the model."""
    torch.save(change(torch.load(checkpoint / WEIGHTS)), checkpoint / WEIGHTS)
    return checkpoint


def _train(accelerator: Accelerator, model: Any, optimizer: Any, batch: Any) -> None:
    accelerator.backward(model(batch).pow(2).mean())
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("before_start", [True, False])
@pytest.mark.parametrize("inside", [True, False])
def test_a_checkpoint_outside_of_the_block(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, inside: bool, before_start: bool
) -> None:
    checkpoint = saved(tmp_path, DELAYED, inside=inside)
    debugger = resumed(tmp_path, InFp8(DELAYED), checkpoint, before_start=before_start, strict=True)
    assert findings(debugger.session.resume_report) == []
    assert debugger.session.iteration == 4
    assert warned(caplog) == []


def test_a_damaged_fingerprint_leaves_the_iteration_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = saved(tmp_path, DELAYED)
    (checkpoint / FILE_NAME).write_text("{")
    debugger = resumed(tmp_path, InFp8(DELAYED), checkpoint)
    assert debugger.session.iteration == 4
    assert f"The resume cannot be audited. {checkpoint / FILE_NAME}: The fingerprint is not JSON" in caplog.text
