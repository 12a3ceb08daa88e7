"""The trainer's reporting integrations, read back: the numbers of the statistics log at the trainer's own steps."""

import ast
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK, TensorBoardCallback

from te_precision_callbacks import PrecisionDebugTrainerCallback
from tests.accelerate.loops import wandb_history
from tests.conftest import Keeper, statistics
from tests.forked import launched
from tests.lightning.models import board, board_scalars, largest_inputs, log_of, logged_lines, sample
from tests.transformers.models import arguments, trainer

CONFIG = {
    "stats": {
        "enabled": True,
        "layers": {"layer_types": ["all"]},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "gradient"],
                "stats": ["max", "l1_norm", "exponent_histogram"],
                "freq": 1,
            },
            "LogFp8TensorStats": {"enabled": True, "tensors": ["weight"], "stats": ["underflows%"], "freq": 1},
        },
    }
}


class Custom(transformers.TrainerCallback):
    def __init__(self) -> None:
        self.logs: dict[int, list[str]] = {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        self.logs.setdefault(state.global_step, []).extend(logs)

    def has_statistics(self) -> bool:
        return any(name.startswith(("te/", "te.")) for names in self.logs.values() for name in names)


class Printed(Custom, transformers.PrinterCallback):
    """Logs by printing, in addition to ``Custom``."""


@pytest.mark.slow
def test_every_integration_has_the_numbers_of_the_log_at_the_trainers_steps(
    offline_trackers: Path, tmp_path: Path
) -> None:
    import mlflow
    import wandb

    keywords: dict[str, Any] = {
        "report_to": ["tensorboard", "mlflow", "wandb"],
        "gradient_accumulation_steps": 2,
        "save_strategy": "steps",
        "save_steps": 3,
        "logging_steps": 2,
    }
    printed = Printed()
    metrics: dict[str, dict[int, float]] = {}
    of_the_trainer: dict[int, float] = {}
    first_run = mlflow.start_run()
    expected: dict[tuple[str, int], float] = {}
    for part, last in (("first", 3), ("second", 6)):
        callback = PrecisionDebugTrainerCallback(CONFIG, log_dir=tmp_path / part)
        made = trainer(arguments(tmp_path / "out", max_steps=last, **keywords), printed, callback)
        made.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-3") if part == "second" else None)
        of_the_trainer |= {entry["step"]: entry["loss"] for entry in made.state.log_history if "loss" in entry}
        for (name, iteration), value in logged_lines(tmp_path / part).items():
            layer, tensor, statistic = name.split("_", 2)
            expected[f"te.{layer}/{tensor}/{statistic}", iteration + 1] = value
    mlflow.end_run()
    wandb.finish()
    assert {step for _, step in expected} == set(range(1, 7))
    assert len(expected) == 6 * 2 * (2 * 2 + 1)
    assert sorted(of_the_trainer) == [2, 4, 6]

    for events in (tmp_path / "out").rglob("events.out.tfevents*"):
        for tag, values in board_scalars(events).items():
            metrics.setdefault(tag, {}).update(values)
    rows = list(wandb_history(tmp_path).values())
    assert all("train/global_step" in row for row in rows)
    steps_of_rows = [row["train/global_step"] for row in rows]
    assert steps_of_rows == sorted(steps_of_rows)
    history = {(name, row["train/global_step"]): value for row in rows for name, value in row.items()}
    store = {
        (name, entry.step): entry.value
        for name in {name for name, _ in expected} | {"loss"}
        for entry in mlflow.MlflowClient().get_metric_history(first_run.info.run_id, name.replace("%", "_pct"))
    }
    for (name, step), value in expected.items():
        assert np.float32(metrics[name][step]) == np.float32(value)
        assert history[name, step] == value == store[name, step]
    for step, loss in of_the_trainer.items():
        assert np.float32(metrics["train/loss"][step]) == np.float32(loss)
        assert history["train/loss", step] == loss == store["loss", step]
    histograms = {step for name, step in history if name.startswith("te.net.0/activation/exponent_histogram")}
    assert histograms == set(range(1, 7))
    of_the_model = {"te/worst_underflows%", "te/all/activation/max/min"}
    for names in (metrics, {name for name, _ in history}):
        assert of_the_model <= set(names)
        assert not [name for name in names if name.startswith("train/te")], "not in the group of the loss"
    assert printed.logs
    assert not printed.has_statistics(), "never to the printer"


def test_a_histogram_is_a_histogram(tmp_path: Path) -> None:
    args = arguments(tmp_path, report_to="tensorboard", max_steps=2)
    trainer(args, PrecisionDebugTrainerCallback(CONFIG)).train()
    (events,) = tmp_path.rglob("events.out.tfevents*")
    logged = board(events)
    result = logged.Histograms("te.net.0/activation/exponent_histogram")
    assert [event.step for event in result] == [1, 2]
    assert result[0].histogram_value.num == 8 * 32
    assert not [tag for tag in logged.Tags()["scalars"] if "histogram" in tag]


def test_an_integration_that_raises_is_reported_once_and_dropped(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(TensorBoardCallback):
        calls = 0

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if any(name.startswith("te.") for name in logs):
                self.calls += 1
                raise OSError("disk full")

    broken = Broken()  # type: ignore[no-untyped-call]
    callback = PrecisionDebugTrainerCallback(statistics(), sinks=[keeper])
    made = trainer(arguments(tmp_path, report_to="tensorboard"), broken, callback)
    made.train()
    assert made.state.global_step == 4
    assert broken.calls == 1
    (record,) = [record for record in caplog.records if "disk full" in record.getMessage()]
    assert "Broken could not log statistics: OSError: disk full" in record.getMessage()
    assert keeper.iterations == [0, 1, 2, 3]
    events = [path for path in tmp_path.rglob("events.out.tfevents*") if "train/loss" in board_scalars(path)]
    assert sorted(board_scalars(events[0])["te.net.0/activation/max"]) == [1, 2, 3, 4], "the other one goes on"


def test_a_custom_callback_gets_statistics_once_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user's callback gets the trainer's logs alone; where it is in transformers' table, statistics too."""
    alone, registered = Custom(), Custom()
    trainer(arguments(tmp_path, max_steps=2), alone, PrecisionDebugTrainerCallback(statistics())).train()
    assert sorted(alone.logs) == [1, 2]
    assert not alone.has_statistics()
    monkeypatch.setitem(INTEGRATION_TO_CALLBACK, "custom", Custom)
    trainer(arguments(tmp_path, max_steps=2), registered, PrecisionDebugTrainerCallback(statistics())).train()
    assert all("te.net.0/activation/max" in names for names in registered.logs.values())
    assert all("loss" in names for names in registered.logs.values())


# --- two processes as under torchrun, and under it


SCRIPT = Path(__file__).with_name("ranks_script.py")


def trained_on(folder: Path, rank: int) -> list[list[int]]:
    return ast.literal_eval((folder / f"trained_on_{rank}.txt").read_text())


@pytest.mark.processes
def test_two_ranks_have_one_set_of_statistics(tmp_path: Path) -> None:
    ended = launched(SCRIPT, [str(tmp_path), "unmodified"])
    assert [rank.returncode for rank in ended] == [0, 0], [rank.stderr for rank in ended]
    lines = logged_lines(tmp_path / "debug")
    assert not log_of(tmp_path / "debug", 1).exists(), "the statistics are reduced, and rank 0 writes them"
    assert len(lines) == 4 * 2 * 2 * 2
    (events,) = tmp_path.rglob("events.out.tfevents*")
    scalars = board_scalars(events)
    batches = [trained_on(tmp_path, rank) for rank in (0, 1)]
    epoch = [{index for batch in batches[rank][:4] for index in batch} for rank in (0, 1)]
    assert len(epoch[0] | epoch[1]) == 64, "each rank has samples of its own"
    for step in range(4):
        indices = [index for rank in (0, 1) for batch in batches[rank][2 * step : 2 * step + 2] for index in batch]
        seen = torch.stack([sample(index) for index in indices]).double()
        assert lines["net.0_activation_max", step] == seen.max().item()
        assert lines["net.0_activation_l1_norm", step] == pytest.approx(seen.abs().sum().item(), rel=1e-6)
        assert scalars["te.net.0/activation/max"][step + 1] == seen.max().item()
    assert sorted(scalars["te.net.0/activation/max"]) == sorted(scalars["train/loss"]) == [1, 2, 3, 4]


@pytest.mark.processes
def test_a_rank_that_raises_ends_both(tmp_path: Path) -> None:
    """With our Trainer: its session ends before the other rank gets notice."""
    ended = launched(SCRIPT, [str(tmp_path), "ours", "0"])
    assert all(rank.returncode != 0 for rank in ended)
    assert "rank 0 has a bad batch" in ended[0].stderr
    # The rank's gathered values are written, without a collective; the failed step's numbers are its own.
    lines = largest_inputs(tmp_path / "debug")
    assert sorted(lines) == [0, 1]
    own = [sample(index).max().item() for batch in trained_on(tmp_path, 0)[2:4] for index in batch]
    assert lines[1] == max(own)


@pytest.mark.processes
def test_an_overflow_of_one_rank_ends_both_in_the_same_step(tmp_path: Path) -> None:
    ended = launched(SCRIPT, [str(tmp_path), "overflow"])
    for rank, item in enumerate(ended):
        assert item.returncode != 0
        assert "ActivationOverflowError:" in item.stderr
        assert "net.1: LayerNormLinear: input[0]" in item.stderr
        assert len(trained_on(tmp_path, rank)) == 4, "both looked before the second step of the optimizer"
        assert (tmp_path / f"finite_{rank}.txt").read_text() == "True"
