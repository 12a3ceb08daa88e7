"""Real trackers, read back: the numbers of the statistics log, at the steps of the script's own metrics."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from accelerate.tracking import GeneralTracker, on_main_process
from accelerate.utils import TERecipeKwargs
from torch.nn.functional import layer_norm, linear

from te_precision_callbacks.accelerate import PrecisionDebugger
from tests.accelerate.loops import Plain, Torch, fresh, mlflow_metrics, prepared, run, train, wandb_history
from tests.conftest import Keeper, statistics
from tests.forked import executable
from tests.lightning.models import batch_of, board, board_scalars, log_of, logged_lines
from tests.reference import processes

CONFIG = {
    "stats": {
        "enabled": True,
        "layers": {"layer_types": ["fc1", "fc2"]},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "gradient"],
                "stats": ["max", "l1_norm", "exponent_histogram"],
            },
            "LogFp8TensorStats": {"enabled": True, "tensors": ["weight"], "stats": ["underflows%", "scale_inv_min"]},
        },
    }
}


class Kept(GeneralTracker):
    name = "kept"
    requires_logging_directory = False

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[dict[str, float], int | None]] = []

    @property
    def tracker(self) -> list[Any]:
        return self.calls

    @on_main_process
    def start(self) -> None:
        pass

    @on_main_process
    def store_init_configuration(self, values: dict[str, Any]) -> None:
        pass

    @on_main_process
    def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
        self.calls.append((dict(values), step))


@pytest.mark.slow
def test_every_tracker_has_the_numbers_of_the_log(
    offline_trackers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")  # Transformer Engine loads no checkpoint without it
    kept = Kept()
    losses: dict[int, float] = {}
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[TERecipeKwargs()],
        gradient_accumulation_steps=2,
        log_with=["tensorboard", "mlflow", "wandb", kept],
        project_dir=str(tmp_path / "run"),
    )
    accelerator.init_trackers("project")
    trackers, loop = accelerator.trackers, prepared(accelerator, Torch(), size=16)
    for part in ("first", "second"):
        if part == "second":
            accelerator, *loop = fresh(Torch(), size=16, mixed_precision="fp8", gradient_accumulation_steps=2)
            accelerator.trackers = trackers  # the same runs of the trackers, as a script that resumes them has
        with PrecisionDebugger(accelerator, loop[0], CONFIG, log_dir=tmp_path / part) as debugger:
            if part == "second":
                accelerator.load_state(str(tmp_path / "checkpoint"))
            for loss in train(accelerator, debugger, *loop):
                if accelerator.sync_gradients:
                    step = len(losses) + 1
                    losses[step] = loss.item()
                    accelerator.log({"loss": losses[step]}, step=step)
            accelerator.save_state(str(tmp_path / "checkpoint"))
    accelerator.log({"end": 1.0}, step=6)
    accelerator.end_training()

    first, second = logged_lines(tmp_path / "first"), logged_lines(tmp_path / "second")
    assert {step for _, step in first} == {0, 1, 2}
    assert {step for _, step in second} == {3, 4, 5}
    expected = {
        (f"te.{layer}/{tensor}/{statistic}", iteration + 1): value
        for (name, iteration), value in {**first, **second}.items()
        for layer, tensor, statistic in [name.split("_", 2)]
    }
    assert len(expected) == 6 * 2 * (2 * 2 + 2)

    scalars = board_scalars(tmp_path / "run" / "project")
    store = mlflow_metrics(tmp_path / "mlruns")
    history = wandb_history(tmp_path)
    of_own = {(name, step): value for values, step in kept.calls for name, value in values.items()}
    for (name, step), value in expected.items():
        assert store[name.replace("%", "_pct")][step] == value == history[step][name] == of_own[name, step]
        assert np.float32(scalars[name][step]) == np.float32(value)
    for step, loss in losses.items():
        assert store["loss"][step] == loss == history[step]["loss"] == of_own["loss", step]
        assert np.float32(scalars["loss"][step]) == np.float32(loss)
    assert sorted(history) == [1, 2, 3, 4, 5, 6], "W&B drops what comes at an earlier step than the last one"
    assert history[6]["end"] == 1.0
    for calls, worst in ((scalars, "te/worst_underflows%"), (store, "te/worst_underflows_pct")):
        assert {worst, "te/all/activation/max/median"} <= set(calls)
        assert {step for name in calls if name.startswith("te.") for step in calls[name]} == {1, 2, 3, 4, 5, 6}
    # One call a step.
    assert [step for values, step in kept.calls if values.keys().isdisjoint(("loss", "end"))] == [1, 2, 3, 4, 5, 6]

    # The first step's histogram of what enters fc1: two batches.
    inputs = batch_of(0, 32).double()
    exponents, counts = np.unique(np.floor(np.log2(inputs.abs().numpy())), return_counts=True)
    drawn = dict(zip(exponents.tolist(), counts.tolist(), strict=True))

    events = board(tmp_path / "run" / "project").Histograms("te.fc1/activation/exponent_histogram")
    assert [event.step for event in events] == [1, 2, 3, 4, 5, 6]
    values = events[0].histogram_value
    results = dict(zip(values.bucket_limit, values.bucket, strict=True))
    assert {limit - 1: count for limit, count in results.items() if count} == drawn

    parts = {part: history[1][f"te.fc1/activation/exponent_histogram/{part}"] for part in ("_type", "bins", "values")}
    assert parts["_type"] == "histogram"
    results = dict(zip(parts["bins"], parts["values"], strict=False))
    assert {edge: count for edge, count in results.items() if count} == drawn


def test_the_scripts_own_step(tmp_path: Path) -> None:
    kept = Kept()
    accelerator, model, _, loader = fresh(batches=4, log_with=[kept], gradient_accumulation_steps=2)
    accelerator.init_trackers("project")
    with PrecisionDebugger(accelerator, model, statistics(), log_dir=tmp_path) as debugger:
        for index, batch in enumerate(loader):
            with accelerator.accumulate(model):
                accelerator.backward(model(batch).sum())
            debugger.step(step=10 * index)
        model(batch).sum().backward()  # after the last step
    assert [step for _, step in kept.calls] == [10, 30, 31]


@pytest.mark.parametrize(
    ("log_with", "advice"),
    [(None, "pass log_with='tensorboard'"), ([Kept()], "call accelerator.init_trackers('my_pr")],
)
def test_trackers_that_were_never_initialized(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, log_with: Any, advice: str
) -> None:
    accelerator, *loop = fresh(batches=3, log_with=log_with)
    with PrecisionDebugger(accelerator, loop[0], statistics(start_step=1), log_dir=tmp_path) as debugger:
        for index, _ in enumerate(train(accelerator, debugger, *loop)):
            assert bool(caplog.records) == (index == 2), "not before there is something to log"
    (record,) = caplog.records
    assert (record.levelname, advice in record.message) == ("WARNING", True)
    assert {step for _, step in logged_lines(tmp_path)} == {1, 2}


def test_a_tracker_that_fails_does_not_end_the_run(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    class Broken(Kept):
        def log(self, values: dict[str, float], step: int | None = None, **_: Any) -> None:
            raise ConnectionError("the server is gone")

    accelerator, *loop = fresh(batches=3, log_with=[Broken()])
    accelerator.init_trackers("project")
    with PrecisionDebugger(accelerator, loop[0], statistics(), log_dir=tmp_path, sinks=[keeper]) as debugger:
        run(accelerator, debugger, *loop)
    assert keeper.iterations == [0, 1, 2]
    assert caplog.text.count("the server is gone. Training continues") == 1


# --- `accelerate launch` with two processes on the CPU


def in_one_process() -> Iterator[dict[str, tuple[float, float]]]:
    """The same training in float64 and plain torch, over the batches of both ranks: in each step tensor -> its largest
    value and its l1 norm."""
    p = {name: parameter.detach().double().requires_grad_() for name, parameter in Plain().named_parameters()}
    optimizer = torch.optim.SGD(p.values(), lr=0.01)
    for step in range(6):
        # A loader gives a batch to each rank in turn, and a step has two of each; the second epoch is the first again.
        batches = torch.cat([batch_of(4 * (step % 3) + index) for index in range(4)]).double()
        hidden = linear(batches, p["fc1.weight"], p["fc1.bias"])
        normed = layer_norm(hidden, (32,), p["fc2.layer_norm_weight"], p["fc2.layer_norm_bias"])
        output = linear(normed, p["fc2.weight"], p["fc2.bias"])
        hidden.retain_grad()
        output.retain_grad()
        optimizer.zero_grad()
        output.pow(2).mean().backward()
        optimizer.step()
        # Of the four batches' mean, Accelerate divides by the two of an accumulation before the layers see a gradient,
        # and DDP by the two ranks after it.
        of_hidden, of_output = (2 * tensor.grad for tensor in (hidden, output))
        tensors = {
            "fc1_activation": batches,
            "fc1_gradient": of_hidden,
            "fc2_activation": normed,
            "fc2_gradient": of_output,
        }
        yield {name: (tensor.max().item(), tensor.abs().sum().item()) for name, tensor in tensors.items()}


@pytest.mark.processes
def test_two_processes_log_one_set_of_numbers(tmp_path: Path) -> None:
    # With --multi_gpu the launcher starts torchrun, whatever the device is.
    options = "--multi_gpu --num_processes 2 --num_machines 1 --mixed_precision no --dynamo_backend no"
    command = [executable(whole=True), "-m", "accelerate.commands.launch", *options.split(), "--main_process_port", "0"]
    result = processes.run([*command, str(Path(__file__).with_name("launch_script.py")), str(tmp_path)])
    assert result.returncode == 0, result.stderr
    first, second = (logged_lines(tmp_path / part) for part in ("first", "second"))
    assert not log_of(tmp_path / "first", 1).exists(), "the statistics are reduced, and rank 0 writes them"
    lines = {**first, **second}
    assert {step for _, step in second} == {3, 4, 5}, "both ranks went on where the checkpoint was saved"
    scalars = board_scalars(tmp_path / "board")
    for step, expected in enumerate(in_one_process()):
        for name, (largest, l1_norm) in expected.items():
            metric = f"te.{name.replace('_', '/')}"
            assert lines[f"{name}_max", step] == pytest.approx(largest, rel=1e-4)
            assert lines[f"{name}_l1_norm", step] == pytest.approx(l1_norm, rel=1e-4)
            assert scalars[f"{metric}/max"][step + 1] == pytest.approx(largest, rel=1e-4)
    assert sorted(scalars["te.fc1/gradient/l1_norm"]) == sorted(scalars["loss"]) == [1, 2, 3, 4, 5, 6]
