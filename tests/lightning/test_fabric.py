"""The callback for Fabric, in a loop as Fabric's users write it."""

import importlib
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from lightning.fabric import Fabric
from lightning.fabric.loggers import CSVLogger

from te_precision_callbacks import InspectSession, PrecisionDebugFabricCallback
from te_precision_callbacks.session import SessionError
from tests.conftest import Keeper, global_state, statistics
from tests.lightning.models import batch_of, board_scalars, csv_scalars

ROOT = Path(__file__).parents[2]
FIRST = statistics(tensors=["activation", "gradient"])


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormLinear(32, 32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


def fabric_of(folder: Path, callback: PrecisionDebugFabricCallback) -> Fabric:
    made = Fabric(accelerator="cpu", callbacks=[callback], loggers=CSVLogger(folder, name="csv", version=""), devices=1)
    made.launch()
    return made


def prepared(fabric: Fabric) -> Any:
    model = Net()
    return fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))


def started(folder: Path, **options: Any) -> Any:
    callback = PrecisionDebugFabricCallback(FIRST, **options)
    fabric = fabric_of(folder, callback)
    return callback, fabric, *prepared(fabric)


def train(fabric: Fabric, model: Any, optimizer: Any, batches: range, every: int = 1) -> None:
    for index in batches:
        fabric.backward(model(batch_of(index)).pow(2).mean())
        if (index + 1) % every == 0:
            optimizer.step()
            optimizer.zero_grad()


def values(keeper: Keeper) -> list[list[tuple[Any, ...]]]:
    return [[(row.layer, row.tensor, row.statistic, row.value) for row in records] for records in keeper.steps]


def test_a_loop_has_the_numbers_of_a_session(tmp_path: Path) -> None:
    Net()  # Transformer Engine's first module notes that it is not debugged
    before = global_state()
    by_fabric, by_session = Keeper(), Keeper()
    callback, fabric, *loop = started(tmp_path, sinks=[by_fabric])
    with callback:
        train(fabric, *loop, range(3))
        assert callback.session.running
    assert not callback.session.running
    assert global_state() == before

    net = Net()
    plain = torch.optim.SGD(net.parameters(), lr=0.1)
    with InspectSession(FIRST, model=net, log_dir=tmp_path / "session", sinks=[by_session]) as session:
        for index in range(3):
            net(batch_of(index)).pow(2).mean().backward()
            plain.step()
            plain.zero_grad()
            session.step()
    assert by_fabric.iterations == [0, 1, 2]
    assert values(by_fabric) == values(by_session)
    fabric.logger.finalize("success")
    logged = csv_scalars(tmp_path / "csv")["te.net.0/activation/max"]
    assert logged == {step: batch_of(step).max().item() for step in range(3)}
    assert (tmp_path / "csv" / "nvdlfw_inspect_statistics_logs").is_dir(), "the folder of Fabric's logger"


def test_of_several_optimizers_the_first_counts(tmp_path: Path, keeper: Keeper) -> None:
    callback, fabric, *first = started(tmp_path, sinks=[keeper])
    second = prepared(fabric)
    with callback:
        for index in range(2):
            for loop in (first, second):
                train(fabric, *loop, range(index, index + 1))
        assert keeper.iterations == [0, 1]
    assert {layer.name for layer in callback.session.layers} == {f"model{a}.net.{b}" for a in (0, 1) for b in (0, 1)}


def test_accumulated_batches_are_one_iteration(tmp_path: Path, keeper: Keeper) -> None:
    callback, fabric, *loop = started(tmp_path, sinks=[keeper])
    with callback:
        train(fabric, *loop, range(4), every=2)
        assert keeper.iterations == [0, 1]


def test_a_resumed_loop_goes_on_counting_and_is_audited(tmp_path: Path, keeper: Keeper) -> None:
    callback, fabric, model, optimizer = started(tmp_path / "a")
    with callback:
        train(fabric, model, optimizer, range(2))
        fabric.save(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer, "precision": callback})

    resumed, fabric, model, optimizer = started(tmp_path / "b", sinks=[keeper])
    fabric.load(tmp_path / "saved.ckpt", {"model": model, "optimizer": optimizer, "precision": resumed})
    with resumed:
        train(fabric, model, optimizer, range(2, 4))
    assert keeper.iterations == [2, 3]
    assert not resumed.session.resume_report.findings


def test_a_model_that_was_set_up_alone(tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture) -> None:
    callback = PrecisionDebugFabricCallback(FIRST, sinks=[keeper])
    fabric = fabric_of(tmp_path, callback)
    model = fabric.setup_module(Net())
    optimizer = fabric.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1))
    train(fabric, model, optimizer, range(2))
    (text,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "callback.on_after_setup(fabric, model)" in text
    with pytest.raises(SessionError, match="no session yet"):
        _ = callback.session
    callback.on_after_setup(fabric, model)
    with callback:
        train(fabric, model, optimizer, range(2))
    assert keeper.iterations == [0, 1]
    assert {row.layer for row in keeper.steps[0]} == {"net.0", "net.1"}


def test_an_error_ends_the_session(tmp_path: Path, keeper: Keeper) -> None:
    callback, fabric, model, optimizer = started(tmp_path, sinks=[keeper])
    with pytest.raises(ValueError, match="a bad batch") as raised, callback:
        train(fabric, model, optimizer, range(1))
        model(batch_of(1)).sum().backward()
        raise ValueError("a bad batch")
    assert keeper.iterations == [0, 1], "what was gathered since the last step is written"
    assert keeper.closed == [raised.value]


@pytest.mark.slow
def test_the_example_runs_and_shows_what_came_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    losses = importlib.import_module("fabric_fp8").main(["--steps", "8", "--log-dir", str(tmp_path)])
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.3
    assert "of the multiply-adds" in capsys.readouterr().out
    (events,) = (tmp_path / "board").rglob("events.out.tfevents*")
    board = board_scalars(events)
    assert board["loss"] == {step: pytest.approx(loss) for step, loss in enumerate(losses)}
    assert any(name.startswith("te.") and name.endswith("/activation/max") for name in board)


def test_a_block_in_which_nothing_was_observed_says_so(
    tmp_path: Path, keeper: Keeper, caplog: pytest.LogCaptureFixture
) -> None:
    callback = PrecisionDebugFabricCallback(FIRST, sinks=[keeper])
    with callback:
        pass
    assert "nothing was observed" in caplog.text
    caplog.clear()
    fabric, net = fabric_of(tmp_path, callback), Net()
    with callback:
        model, _ = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=0.1))
        callback.on_after_setup(fabric, model)
        assert {info.name for info in callback.session.layers} == {"net.0", "net.1"}, "one model, given twice"
    assert "nothing was observed" not in caplog.text
    with callback:
        pass
    assert "nothing was observed" in caplog.text, "the session of the block before has ended"
