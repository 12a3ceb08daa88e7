"""docs/transformers.md: its code and its commands, as they stand there; and the example."""

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import launch_command_parser
from torch.utils.data import DataLoader

from te_precision_callbacks.runs import open_run
from tests.conftest import statistics
from tests.docs.pages import blocks
from tests.forked import executable
from tests.lightning.models import board_scalars, logged_lines
from tests.reference import processes
from tests.reference.processes import REPOSITORY
from tests.transformers.models import llama, tokens

PAGE = "docs/transformers.md"
BLOCKS = blocks(PAGE, "python")
(CALLS,) = blocks(PAGE, "bash", "python train.py")
COMMANDS = [call.removeprefix("python train.py ") for call in CALLS.splitlines()]


@pytest.fixture(autouse=True)
def in_a_folder_with_a_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the trackers that other tests need, since transformers 4 reports to them unasked."""
    monkeypatch.setenv("DISABLE_MLFLOW_INTEGRATION", "TRUE")
    monkeypatch.setenv("WANDB_DISABLED", "true")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(statistics()))


def run(code: str) -> dict[str, Any]:
    """With the model and the data that the page leaves to its reader, a few steps, and no GPU."""
    model = llama()
    namespace: dict[str, Any] = {
        "model": model,
        "data": tokens(),
        "loader": DataLoader(tokens(), batch_size=8),
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
    }
    exec(code.replace("max_steps=100", "max_steps=2, use_cpu=True, disable_tqdm=True"), namespace)
    return namespace


def test_the_page_has_these_blocks() -> None:
    assert len(BLOCKS) == 5
    assert len(COMMANDS) == 3


@pytest.mark.parametrize("index", [0, 2])
def test_the_scripts(index: int) -> None:
    assert run(BLOCKS[index])["trainer"].state.global_step == 2
    assert len(logged_lines(Path("run"))) == 2 * 8 * 2


def test_the_pair_beside_another_trainer() -> None:
    """The classes of one block in the script of the one before, which saves none of them: they are in no module."""
    _, _, script = BLOCKS[2].partition("\n\n")
    script = script.replace("TrainingArguments(", "MyArguments(save_strategy='no', output_dir=")
    trainer = run(BLOCKS[3] + script.replace("Trainer(", "MyTrainer("))
    assert trainer["trainer"].state.global_step == 2
    assert len(logged_lines(Path("run"))) == 2 * 8 * 2


@pytest.mark.parametrize("command", COMMANDS)
def test_the_script_with_the_flag(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    more = ["--max_steps", "2", "--use_cpu", "--disable_tqdm", "true"]
    monkeypatch.setattr(sys, "argv", ["train.py", *shlex.split(command), *more])
    trainer = run(BLOCKS[1])["trainer"]
    assert trainer.state.global_step == 2
    assert [option.value for option in trainer.args.debug] == re.findall(r"\w+flow\b|te_precision\b(?!_)", command)
    assert bool(list(Path().rglob("nvdlfw_inspect_statistics_logs"))) == ("te_precision" in command)


@pytest.mark.parametrize("flags", ["", "--debug activation_overflow te_precision --te_precision_config config.yaml"])
def test_the_loop_with_argparse(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", *flags.split()])
    run(BLOCKS[4])
    written = sorted({step for _, step in logged_lines(Path("run"))}) if flags else []
    assert written == (list(range(4)) if flags else [])


def test_the_launchers_file() -> None:
    (block,) = blocks(PAGE, "yaml")
    Path("launch.yaml").write_text(block)
    assert yaml.safe_load(block) == yaml.safe_load((REPOSITORY / "examples" / "hf_trainer_fp8_launch.yaml").read_text())
    (command,) = blocks(PAGE, "bash", "accelerate launch")
    given = launch_command_parser().parse_args(shlex.split(command)[2:])
    assert (given.config_file, given.training_script) == ("launch.yaml", "train.py")
    assert f"{given.training_script} {shlex.join(given.training_script_args)}" in CALLS.replace("--output_dir run ", "")
    loaded = load_config_from_file(given.config_file)
    assert loaded.mixed_precision == "fp8"
    assert loaded.fp8_config["backend"] == "TE"


# ---------------------------------------------------------------------- the example


EXAMPLES = REPOSITORY / "examples"


@pytest.mark.processes
@pytest.mark.extended
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
    result = processes.run(command, cwd=tmp_path, COLUMNS="160")
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
