"""examples/hf_trainer_fp8.py, as its docstring starts it."""

from __future__ import annotations

from pathlib import Path

import pytest

from te_precision_callbacks.runs import open_run
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
    assert "% of the multiply-adds" in result.stdout
    folder = tmp_path / "runs" / "hf_trainer_fp8"
    products = open_run(folder).gemms.to_pylist()
    layers = [row for row in products if row["layer"].endswith(("_proj", "lm_head"))]
    assert {row["gemm"] for row in layers} == {"fprop", "dgrad", "wgrad"}
    for row in layers:
        is_high = row["layer"].endswith("down_proj") and row["gemm"] == "fprop"
        assert row["precision"] == ("bf16" if is_high else "fp8"), row
    assert {0, 5, 10} <= {step for _, step in logged_lines(folder)}
    (events,) = folder.rglob("events.out.tfevents*")
    board = board_scalars(events)
    assert {"te.lm_head/activation/max", "te/worst_underflows%"} <= set(board)
    assert sorted(board["train/loss"]) == [2, 4, 6, 8, 10, 12]
    assert sorted(board["eval/loss"]) == [6, 12]
    assert board["train/loss"][12] < board["train/loss"][2]
