"""examples/hf_trainer_fp8.py, as its docstring starts it."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from tests.forked import executable
from tests.lightning.models import board_scalars, logged_lines
from tests.reference.processes import REPOSITORY, run

EXAMPLES = REPOSITORY / "examples"


@pytest.mark.processes
def test_the_example_trains_in_fp8_under_accelerate_launch(tmp_path: Path) -> None:
    """The setting of the launcher reaches the Trainer: FP8 on layers that Accelerate has converted."""
    command = [
        *(executable(whole=True), "-m", "accelerate.commands.launch"),
        *("--config_file", str(EXAMPLES / "hf_trainer_fp8_launch.yaml"), str(EXAMPLES / "hf_trainer_fp8.py")),
        *("--debug", "te_precision", "activation_overflow"),
        *("--te_precision_config", str(EXAMPLES / "hf_trainer_fp8.yaml")),
        *("--max_steps", "12", "--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4"),
        *("--eval_steps", "6", "--save_strategy", "steps", "--save_steps", "6", "--logging_steps", "2"),
    ]
    result = run(command, cwd=tmp_path, COLUMNS="160")
    assert result.returncode == 0, result.stderr
    shown = result.stdout
    rows = [line for line in shown.splitlines() if line.strip().startswith(("model.layers", "lm_head"))]
    precision = [row.split(maxsplit=1) for row in rows if "FP8 E5M2 * E4M3" in row]
    assert len(precision) == 7 + 1, "each Linear layer, in one row for both blocks, and the head"
    for layer, operands in precision:
        assert operands.startswith("BF16" if layer.endswith("down_proj") else "FP8 E4M3"), (layer, operands)

    folder = tmp_path / "runs" / "hf_trainer_fp8"
    lines = logged_lines(folder)
    assert {0, 5, 10} <= {step for _, step in lines}
    (events,) = folder.rglob("events.out.tfevents*")
    board = board_scalars(events)
    for (name, step), value in lines.items():
        if match := re.fullmatch(r"(.*)_(activation|weight|gradient)_(.*)", name):  # the optimizer's have no tensor
            assert np.float32(board["te.{}/{}/{}".format(*match.groups())][step + 1]) == np.float32(value)
    assert sorted(board["train/loss"]) == [2, 4, 6, 8, 10, 12]
    assert sorted(board["eval/loss"]) == [6, 12]
    assert board["train/loss"][12] < board["train/loss"][2]
