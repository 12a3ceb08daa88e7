"""Records of sessions, through every integration."""

import importlib.metadata
import json
import os
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from transformer_engine.common.recipe import DelayedScaling, Float8CurrentScaling

from te_precision_callbacks import (
    InspectSession,
    PrecisionDebugCallback,
    PrecisionDebugger,
    PrecisionDebugTrainerCallback,
)
from te_precision_callbacks.overflow import ActivationOverflowError
from te_precision_callbacks.runs import RecordedRun, list_runs, open_run
from te_precision_callbacks.session import PrecisionContractError
from te_precision_callbacks.sinks import writer_thread
from tests.accelerate import loops
from tests.conftest import Keeper, feature, statistics
from tests.full_disk import files_up_to
from tests.lightning import models as lightning
from tests.transformers import models as transformers


def net() -> torch.nn.Module:
    return torch.nn.Sequential(te.Linear(32, 32), te.LayerNormMLP(32, 32), torch.nn.Linear(32, 16))


def train(session: InspectSession, model: torch.nn.Module, steps: int, recipe: Any = None) -> None:
    for _ in range(steps):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            loss = model(torch.randn(16, 32)).pow(2).mean()
        loss.backward()
        session.log({"loss": loss})
        session.step()


def observed(folder: Path, config: Any, steps: int, **keywords: Any) -> RecordedRun:
    model = net()
    with InspectSession(config, model=model, log_dir=folder, **keywords) as session:
        train(session, model, steps)
    return open_run(folder)


@pytest.mark.parametrize("records", ["off", False])
def test_a_session_that_records_nothing(tmp_path: Path, records: Any) -> None:
    assert observed(tmp_path, statistics(), 1, records=records).source == "nvidia-dlfw-inspect", "its log"
    assert not (tmp_path / "precision_records").exists()


def scalars(run: RecordedRun, name: str) -> dict[int, float]:
    rows = [row for row in run.scalars.to_pylist() if row["name"] == name]
    assert len({row["iteration"] for row in rows}) == len(rows), "each once"
    return {row["iteration"]: row["value"] for row in rows}


# ---------------------------------------------------------------------- statistics and facts


def test_a_session_records_what_a_sink_gets(tmp_path: Path, keeper: Keeper) -> None:
    model = net()
    config = statistics(tensors=["activation", "gradient"])
    with InspectSession(config, model=model, log_dir=tmp_path, sinks=[keeper]) as session:
        train(session, model, 3, DelayedScaling())
        products, layers = session.coverage(), session.layers
    run = open_run(tmp_path)
    names = [(row["layer"], row["tensor"], row["statistic"]) for row in run.series.to_pylist()]
    recorded = {(row["iteration"], *names[row["series"]]): row["value"] for row in run.values().to_pylist()}
    assert recorded == {
        (records.iteration, row.layer, row.tensor, row.statistic): row.value
        for records in keeper.steps
        for row in records
    }
    assert run.ordered_layers == ["0", "1.fc1", "1.fc2", "2"]
    sizes = ("layer", "gemm", "backward", "macs", "precision", "runs", "n", "m", "k")
    operands = run.operands.to_pylist()
    by_gemm = {tuple(row[name] for name in sizes): row for row in run.gemms.to_pylist()}
    assert by_gemm.keys() == {tuple(getattr(product, name) for name in sizes) for product in products}
    for product in products:
        row = by_gemm[tuple(getattr(product, name) for name in sizes)]
        own = {item["tensor"]: item["format"] for item in operands if item["gemm_id"] == row["gemm_id"]}
        assert (row["reason"], own) == (product.reason and product.reason.name, product.operands)
    rows = {row["layer"]: row for row in run.layers.to_pylist()}
    for layer in layers:
        assert (rows[layer.name]["exec_fwd"], rows[layer.name]["class"]) == (layer.exec_fwd, layer.module_class)
    assert (rows["0"]["params"], rows["0"]["weight_dtype"], rows["0"]["primary_weights"]) == (1024, "float32", "high")
    assert (rows["2"]["family"], rows["2"]["exec_fwd"]) == ("torch", None)
    assert {(row["section"], row["feature"], row["layer"]) for row in run.plan.to_pylist()} == {
        ("stats", "LogTensorStats", name) for name in ("0", "1.fc1", "1.fc2")
    }
    assert "parameter" in {row["subject"] for row in run.states.to_pylist()}
    facts = run.segments[0].facts
    assert (facts["recipes"], facts["integration"]) == (["fp8_delayed_scaling"], "session")
    assert facts["te_backend"] in ("reference", "compiled")
    assert facts["versions"]["torch"] == importlib.metadata.version("torch")
    assert "LogTensorStats" in facts["config_text"]
    assert run.steps["observe_seconds"].null_count == 0
    assert run.steps["step_seconds"].to_pylist()[0] is None
    assert run.events["kind"].to_pylist() == ["segment_started", "parameters", "last_steps", "segment_ended"]


def test_the_end_is_that_of_the_run(tmp_path: Path) -> None:
    events = observed(tmp_path, statistics(freq=3), 6).events.to_pylist()
    assert [row["iteration"] for row in events if row["kind"] == "segment_ended"] == [5]


def test_precision_that_changes_has_spans(tmp_path: Path) -> None:
    model = te.Linear(32, 32)
    with InspectSession(statistics(), model=model, log_dir=tmp_path) as session:
        train(session, model, 2, Float8CurrentScaling())
        train(session, model, 2, DelayedScaling())
        train(session, model, 1)
    fprop = [row for row in open_run(tmp_path).gemms.to_pylist() if row["gemm"] == "fprop"]
    assert [(row["precision"], row["recipe"], row["since"], row["until"]) for row in fprop] == [
        ("fp8", "fp8_current_scaling", 0, 1),
        ("fp8", "fp8_delayed_scaling", 2, 3),
        ("fp32", "none", 4, None),
    ]


# ---------------------------------------------------------------------- events


def test_an_overflow_a_dump_and_a_checkpoint(tmp_path: Path) -> None:
    model = net()
    config = {"dump": feature("DumpTensors", ["0"], tensors=["weight"], high_precision_tensor=True, freq=1)}
    with pytest.raises(ActivationOverflowError):
        with InspectSession(config, model=model, log_dir=tmp_path, debug="activation_overflow") as session:
            train(session, model, 2)
            session.state_dict()
            model(torch.full((16, 32), float("inf"))).sum().backward()
            session.step()
    result = open_run(tmp_path)
    by_kind = {event["kind"]: event for event in result.events.to_pylist()}
    assert (by_kind["nonfinite"]["severity"], by_kind["nonfinite"]["iteration"]) == ("error", 2)
    assert json.loads(by_kind["nonfinite"]["data"])["rank"] == 0
    assert (by_kind["dump_written"]["layer"], by_kind["dump_written"]["tensor"]) == ("0", "weight")
    assert by_kind["checkpoint_saved"]["iteration"] == 2
    assert result.segments[0].status == "failed"


def test_a_contract_and_a_failure(tmp_path: Path) -> None:
    class Fails(Keeper):
        def write(self, records: Any) -> None:
            raise ValueError("no room")

    with pytest.raises(PrecisionContractError):
        observed(tmp_path, statistics(), 4, require="fp8 >= 95%", sinks=[Fails()])
    events = {event["kind"]: event for event in open_run(tmp_path).events.to_pylist()}
    assert events["contract_checked"]["severity"] == "warning"
    assert "breaks its precision contract" in events["contract_checked"]["text"]
    assert events["observation_failed"]["text"] == "writing records to Fails: ValueError: no room"


# ---------------------------------------------------------------------- runs and segments


def test_a_resumed_session_goes_on_in_its_run(tmp_path: Path) -> None:
    state: dict[str, Any] = {}
    for _ in range(3):
        model = net()
        with InspectSession(statistics(), model=model, log_dir=tmp_path) as session:
            if state:
                session.load_state_dict({**state, "iteration": state["iteration"] - 1})
            train(session, model, 3, DelayedScaling())
            state = session.state_dict()
    run = open_run(tmp_path)
    assert [segment.first_iteration for segment in run.segments] == [0, 2, 4]
    assert run.steps["iteration"].to_pylist() == list(range(7))
    assert run.steps["segment"].to_pylist() == [0, 0, 1, 1, 2, 2, 2]
    assert run.events["kind"].to_pylist().count("resume_audited") == 2


def test_a_trainer_without_a_step_left_makes_no_run(tmp_path: Path) -> None:
    """The Trainer logs the time and the mean loss of a training of no step, too."""
    ended = transformers.arguments(
        tmp_path, max_steps=2, per_device_train_batch_size=32, save_strategy="steps", save_steps=2
    )
    transformers.trainer(ended).train()
    callback = PrecisionDebugTrainerCallback(statistics(), log_dir=tmp_path)
    transformers.trainer(ended, callback).train(resume_from_checkpoint=True)
    assert callback.session.iteration == 2
    assert not list_runs(tmp_path)


# ---------------------------------------------------------------------- what goes wrong


@pytest.mark.skipif(os.geteuid() != 0, reason="limits the size of files for the whole process")
def test_training_goes_on_with_a_full_disk_and_says_so_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(writer_thread, "FLUSH_SECONDS", 0.01)
    model = te.Linear(32, 32)
    with InspectSession(statistics(), model=model, log_dir=tmp_path, statistics_log="off") as session:
        train(session, model, 3)
        with files_up_to(2000):
            while session.iteration < 500 and not caplog.messages:
                train(session, model, 1)
        train(session, model, 3)
    (said,) = [text for text in caplog.messages if "precision_records" in text]
    assert "is no longer recorded; what was recorded remains readable" in said
    assert "Training continues" in said


@pytest.mark.processes
def test_a_process_that_is_forked_leaves_the_records_alone(tmp_path: Path) -> None:
    model = te.Linear(32, 32)
    with InspectSession(statistics(), model=model, log_dir=tmp_path) as session:
        train(session, model, 2)
        if (child := os.fork()) == 0:
            session.log({"loss": 9.0})
            session.step()
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        train(session, model, 1)
    run = open_run(tmp_path)
    assert run.notes == ()
    assert run.steps["iteration"].to_pylist() == [0, 1, 2]
    assert 9.0 not in scalars(run, "loss").values()


# ---------------------------------------------------------------------- the trainer's own numbers


class Logs(lightning.Plain):
    def __init__(self) -> None:
        super().__init__()
        self.losses: list[float] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = self.net(batch).pow(2).mean()
        self.losses.append(loss.item())
        self.log("mine", 10.0 + batch_idx)
        return loss

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("val_loss", 7.0)


def test_a_lightning_fit_records_its_scalars(tmp_path: Path) -> None:
    module = Logs()
    fit = lightning.trainer(tmp_path, callbacks=[PrecisionDebugCallback(statistics(), log_dir=tmp_path)],
                            accumulate_grad_batches=2, val_check_interval=4)  # fmt: skip
    fit.fit(module, lightning.loader(8), lightning.loader(2))
    run = open_run(tmp_path)
    pairs = [sum(module.losses[first : first + 2]) / 2 for first in range(0, 8, 2)]
    assert scalars(run, "loss") == pytest.approx(dict(enumerate(pairs)))
    assert set(scalars(run, "lr").values()) == {fit.optimizers[0].param_groups[0]["lr"]}
    assert scalars(run, "mine") == {0: 11.0, 1: 13.0, 2: 15.0, 3: 17.0}
    assert scalars(run, "val_loss") == {1: 7.0, 3: 7.0}
    assert run.segments[0].facts["integration"] == "lightning"
    assert "lightning" in run.segments[0].facts["versions"]


def test_the_hugging_face_trainer(tmp_path: Path) -> None:
    callback = PrecisionDebugTrainerCallback(statistics())
    made = transformers.trainer(
        transformers.arguments(tmp_path, logging_steps=2, max_steps=4), callback, model=transformers.Net()
    )
    made.train()
    logged = {entry["step"]: entry for entry in made.state.log_history if "loss" in entry}
    assert set(logged) == {2, 4}
    run = open_run(tmp_path)
    assert scalars(run, "loss") == {step - 1: entry["loss"] for step, entry in logged.items()}
    assert scalars(run, "grad_norm") == {step - 1: pytest.approx(entry["grad_norm"]) for step, entry in logged.items()}
    assert scalars(run, "lr") == {step - 1: pytest.approx(entry["learning_rate"]) for step, entry in logged.items()}
    assert run.segments[0].facts["integration"] == "transformers"


@pytest.mark.parametrize("after", [False, True])
def test_an_accelerate_loop_records_its_scalars(tmp_path: Path, after: bool) -> None:
    accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project_dir=str(tmp_path)))
    model, optimizer, batches = loops.prepared(accelerator, loops.Plain(), batches=4)
    losses, original = [], accelerator.log
    with PrecisionDebugger(accelerator, model, statistics()) as debugger:
        for count, batch in enumerate(batches, 1):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            if not after:
                accelerator.log({"loss": loss})
            debugger.step(count)
            if after:
                accelerator.log({"loss": loss}, step=count)
    assert accelerator.log == original, "put back"
    run = open_run(tmp_path)
    assert scalars(run, "loss") == pytest.approx(dict(enumerate(losses)))
    assert set(run.scalars["name"].to_pylist()) == {"loss"}, "not the session's own metrics"
    assert run.segments[0].facts["integration"] == "accelerate"


def test_a_resumed_fit_goes_on_in_its_run(tmp_path: Path) -> None:
    def fit(batches: int, checkpoint: Path | None = None) -> L.Trainer:
        made = lightning.trainer(
            tmp_path,
            callbacks=[PrecisionDebugCallback(statistics(), log_dir=tmp_path)],
            max_steps=batches,
            max_epochs=-1,
        )
        made.fit(lightning.Plain(), lightning.loader(8), ckpt_path=checkpoint)
        return made

    fit(2).save_checkpoint(tmp_path / "last.ckpt")
    fit(2, tmp_path / "last.ckpt")
    assert len(open_run(tmp_path).segments) == 1, "a job that has nothing left to train records nothing"
    fit(4, tmp_path / "last.ckpt")
    run = open_run(tmp_path)
    assert run.steps["segment"].to_pylist() == [0, 0, 1, 1]
    assert run.steps["iteration"].to_pylist() == [0, 1, 2, 3]


def test_histograms_of_exponents_are_recorded(tmp_path: Path, keeper: Keeper) -> None:
    config = {"s": feature("LogTensorStats", ["0"], tensors=["weight"], stats=["exponent_histogram"], freq=1)}
    run = observed(tmp_path, config, 2, sinks=[keeper])
    for row, records in zip(run.vectors().to_pylist(), keeper.steps, strict=True):
        (counts,) = records.vectors.values()
        assert {place: count for place, count in enumerate(counts) if count} == dict(
            zip(row["bin"], row["count"], strict=True)
        )
