"""Each way in which a session is closed after a training that failed: the Trainer raises no event then."""

from __future__ import annotations

import gc
import math
import os
import pickle
import subprocess
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from te_precision_callbacks import PrecisionDebugTrainerCallback
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import PrecisionContractError
from te_precision_callbacks.transformers import Trainer
from tests.conftest import Keeper, feature, global_state, module_state, statistics
from tests.forked import executable
from tests.lightning.models import board_scalars, logged_lines
from tests.reference.processes import REPOSITORY
from tests.transformers.models import SIZE, Net, arguments, sample, trainer

ERRORS = (ValueError("a bad batch"), KeyboardInterrupt(), SystemExit(3))


def failing(folder: Path, error: BaseException, how: str, **options: Any) -> tuple[Any, Any, Net]:
    """A trainer whose third training forward raises, the callback, and the model."""
    model = Net()
    model.fail_at = {2: error}
    made = trainer(arguments(folder), model=model, kind=Trainer if how == "ours" else transformers.Trainer)
    callback = PrecisionDebugTrainerCallback(statistics(), trainer=made if how == "given" else None, **options)
    made.add_callback(callback)
    return made, callback, model


def first_layer(folder: Path) -> dict[int, float]:
    return {i: value for (name, i), value in logged_lines(folder).items() if name == "net.0_activation_max"}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("how", ["ours", "given"])
def test_at_once_where_the_trainer_is_known(tmp_path: Path, keeper: Keeper, how: str, error: BaseException) -> None:
    before = global_state()
    made, callback, model = failing(tmp_path, error, how, sinks=[keeper])
    modules = module_state(model)
    with pytest.raises(type(error)) as caught:
        made.train()
    assert caught.value is error
    assert not callback.session.running
    assert keeper.closed == [error]
    assert global_state()["seams"] == before["seams"]
    assert module_state(model) == modules
    assert not model._forward_pre_hooks
    assert first_layer(tmp_path) == {step: model.largest(step) for step in range(3)}, "with the step that failed"


def test_what_the_failed_step_had_gathered_reaches_the_integrations(tmp_path: Path) -> None:
    """They are open, since no event has told them of an end; it stands where the step would have stood."""
    model = Net()
    model.fail_at = {2: ValueError("a bad batch")}
    args = arguments(tmp_path, report_to="tensorboard")
    made = trainer(args, PrecisionDebugTrainerCallback(statistics()), model=model, kind=Trainer)
    with pytest.raises(ValueError, match="a bad batch"):
        made.train()
    (events,) = tmp_path.rglob("events.out.tfevents*")
    found = board_scalars(events.parent)["te.net.0/activation/max"]
    assert found == {step + 1: model.largest(step) for step in range(3)}


@pytest.mark.parametrize("where", ["dataloader", "optimizer", "callback"])
def test_at_once_wherever_it_failed(tmp_path: Path, where: str) -> None:
    class Fails(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            if where == "callback":
                raise OSError("no space left")

    made = trainer(arguments(tmp_path), Fails(), kind=Trainer)
    callback = PrecisionDebugTrainerCallback(statistics())
    made.add_callback(callback)
    if where == "dataloader":
        made.train_dataset.__class__ = type("Broken", (type(made.train_dataset),), {"__getitem__": _fail})
    if where == "optimizer":
        made.create_optimizer()
        made.optimizer.register_step_pre_hook(_fail)  # type: ignore[union-attr]
    with pytest.raises(OSError, match="no space left"):
        made.train()
    assert not callback.session.running


def _fail(*_: Any, **__: Any) -> None:
    raise OSError("no space left")


# ---------------------------------------------------------------------- where the trainer is not known


def abandoned(folder: Path, **options: Any) -> tuple[Any, Any, Net]:
    """After a failed training of the unmodified Trainer, whose session is still open."""
    made, callback, model = failing(folder, ValueError("a bad batch"), "not known", **options)
    with pytest.raises(ValueError, match="a bad batch"):
        made.train()
    assert callback.session.running
    return made, callback, model


def users_loop(model: Net) -> list[torch.Tensor]:
    """What a user does with the model afterwards."""
    outputs = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for step in range(3):
        output = model.train()(sample(step)[None], torch.tensor([step]))
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        outputs.append(output["logits"].detach())
    return outputs


def a_part_alone(model: Net) -> list[torch.Tensor]:
    output = model.net(sample(0)[None])
    output.sum().backward()
    return [output.detach()]


def evaluation(model: Net) -> list[torch.Tensor]:
    with torch.no_grad():
        return [model.eval()(sample(0)[None])["logits"]]


@pytest.mark.parametrize("use", [users_loop, evaluation, a_part_alone])
def test_a_users_own_use_of_the_model_runs_as_without_a_session(
    tmp_path: Path, keeper: Keeper, use: Callable[[Net], list[torch.Tensor]]
) -> None:
    """Also features that change precision do not act any more: the outputs are those of an untouched model."""
    fake = feature("FakeQuant", ["net.1"], gemms=["fprop"], tensors=["weight"], quant_format="FP8E5M2")
    config = {**statistics(), "fake": fake}
    model = Net()
    model.fail_at = {2: ValueError("a bad batch")}
    callback = PrecisionDebugTrainerCallback(config, sinks=[keeper])
    with pytest.raises(ValueError, match="a bad batch"):
        trainer(arguments(tmp_path), callback, model=model).train()
    untouched = Net()
    untouched.load_state_dict(model.state_dict())
    model.zero_grad()
    outputs = use(model)
    assert all(torch.equal(a, b) for a, b in zip(outputs, use(untouched), strict=True))
    if use is a_part_alone:
        assert callback.session.running
        callback.close()
    assert not callback.session.running
    assert keeper.iterations == [0, 1, 2]
    assert len(keeper.closed) == 1
    assert first_layer(tmp_path) == {step: model.largest(step) for step in range(3)}
    assert not model._forward_pre_hooks


@pytest.mark.parametrize("how", ["in except", "later"])
def test_closing_by_hand_says_what_ended_the_training(tmp_path: Path, keeper: Keeper, how: str) -> None:
    made, callback, _ = failing(tmp_path, ValueError("a bad batch"), "not known", sinks=[keeper])
    try:
        made.train()
    except ValueError:
        if how == "in except":
            callback.close()
    if how == "later":
        callback.close()
    (error,) = keeper.closed
    assert type(error).__name__ == ("ValueError" if how == "in except" else "SessionError")
    assert not callback.session.running
    (segment,) = open_run(tmp_path).segments
    assert segment.status == "failed"


def test_what_stops_the_training_itself_ends_the_session(tmp_path: Path, keeper: Keeper) -> None:
    """The unmodified Trainer tells nobody."""
    callback = PrecisionDebugTrainerCallback(statistics(), sinks=[keeper], require="fp8 >= 95%")
    with pytest.raises(PrecisionContractError):
        trainer(arguments(tmp_path), callback, model=Net()).train()
    assert not callback.session.running
    assert [type(error).__name__ for error in keeper.closed] == ["PrecisionContractError"]


def test_an_overflow_of_a_users_own_is_no_affair_of_the_training(tmp_path: Path) -> None:
    _, callback, model = abandoned(tmp_path, debug="activation_overflow")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    model.net(torch.full((1, SIZE), math.nan)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model.net(torch.full((1, SIZE), math.inf))
    assert callback.session.running
    callback.close()
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.slow
def test_another_training_of_the_same_model_is_another_training(tmp_path: Path, keeper: Keeper) -> None:
    """By another trainer, and by the same one without the callback."""
    for same in (False, True):
        made, callback, model = abandoned(tmp_path, sinks=[keeper])
        if same:
            made.remove_callback(callback)
        else:
            made = trainer(arguments(tmp_path), model=model)
        made.train()
        assert not callback.session.running
        assert keeper.iterations == [0, 1, 2]
        assert made.state.global_step == 4
        keeper.steps.clear()


def test_at_the_next_train_begin(tmp_path: Path, keeper: Keeper) -> None:
    made, callback, model = abandoned(tmp_path, sinks=[keeper])
    first = callback.session
    made.train()
    assert not first.running
    assert keeper.iterations == [0, 1, 2, 0, 1, 2, 3]
    assert [type(error).__name__ for error in keeper.closed] == ["SessionError", "NoneType"]
    assert first_layer(tmp_path) == {step: model.largest(step + 3) for step in range(4)}


def test_at_the_next_train_begin_of_another_callback(tmp_path: Path, keeper: Keeper) -> None:
    """As in a notebook, whose traceback keeps the failed trainer and its callback alive."""
    _, callback, _ = abandoned(tmp_path, sinks=[keeper])
    model = Net()
    trainer(arguments(tmp_path / "b"), PrecisionDebugTrainerCallback(statistics()), model=model).train()
    assert not callback.session.running
    assert len(keeper.closed) == 1
    assert first_layer(tmp_path / "b") == {step: model.largest(step) for step in range(4)}


def test_late_closing_tells_the_integrations_nothing(tmp_path: Path) -> None:
    """They may have been closed by then, or log another run; the statistics log has all."""
    model = Net()
    model.fail_at = {2: ValueError("a bad batch")}
    callback = PrecisionDebugTrainerCallback(statistics())
    made = trainer(arguments(tmp_path, report_to="tensorboard"), callback, model=model)
    with pytest.raises(ValueError, match="a bad batch"):
        made.train()
    evaluation(model)
    (events,) = tmp_path.rglob("events.out.tfevents*")
    assert sorted(board_scalars(events.parent)["te.net.0/activation/max"]) == [1, 2]
    assert sorted(first_layer(tmp_path)) == [0, 1, 2]


def test_when_the_callback_is_collected(tmp_path: Path, keeper: Keeper) -> None:
    made, callback, model = abandoned(tmp_path, sinks=[keeper])
    session, gone = callback.session, weakref.ref(callback)
    del made, callback
    gc.collect()
    assert gone() is None, "nothing that the callback made keeps it alive"
    assert not session.running
    assert keeper.iterations == [0, 1, 2]
    assert not model._forward_pre_hooks


SCRIPT = """
import sys
from pathlib import Path
from te_precision_callbacks import reference
reference.install()
from tests.conftest import Keeper, statistics
from tests.transformers.models import SIZE, Net, arguments, trainer
from te_precision_callbacks import PrecisionDebugTrainerCallback

class Prints(Keeper):
    def close(self, error):
        print("closed:", error)

model = Net()
model.fail_at = {2: ValueError("a bad batch")}
trainer(
    arguments(Path(sys.argv[1])), PrecisionDebugTrainerCallback(statistics(), sinks=[Prints()]), model=model
).train()
"""


@pytest.mark.processes
def test_at_exit(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [executable(whole=True), "-c", SCRIPT, str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert result.returncode == 1
    assert "ValueError: a bad batch" in result.stderr
    assert result.stdout.count("closed:") == 1
    assert sorted(first_layer(tmp_path)) == [0, 1, 2]


# ---------------------------------------------------------------------- more than one attempt


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ours", "given", "not known"])
def test_a_training_that_finds_its_batch_size_begins_anew(tmp_path: Path, keeper: Keeper, how: str) -> None:
    """Out of memory in the third batch of eight: the next attempt has batches of seven."""
    model = Net()
    model.fail_at = {2: RuntimeError("CUDA out of memory.")}
    made = trainer(
        arguments(tmp_path, auto_find_batch_size=True),
        model=model,
        kind=Trainer if how == "ours" else transformers.Trainer,
    )
    given = made if how == "given" else None
    callback = PrecisionDebugTrainerCallback(statistics(stats=["numel"]), trainer=given, sinks=[keeper])
    made.add_callback(callback)
    made.train()
    assert keeper.iterations == [0, 1, 2, 0, 1, 2, 3]
    numel = keeper.values("numel", "net.0")
    assert set(numel.values()) == {7 * 32}, "the values of the second attempt"
    assert len(keeper.closed) == 2
    assert keeper.closed[1] is None
    assert not callback.session.running


def test_a_given_trainer_gets_its_own_method_back(tmp_path: Path) -> None:
    made = trainer(arguments(tmp_path))
    callback = PrecisionDebugTrainerCallback(statistics(), trainer=made)
    made.add_callback(callback)
    made.train()
    assert "train" in vars(made)
    made.remove_callback(callback)
    del callback
    gc.collect()
    assert "train" not in vars(made)
    assert made.train().global_step == 4


def test_a_trainer_that_was_given_is_collected(tmp_path: Path) -> None:
    made = trainer(arguments(tmp_path))
    made.add_callback(PrecisionDebugTrainerCallback(statistics(), trainer=made))
    made.train()
    gone = weakref.ref(made)
    del made
    gc.collect()
    assert gone() is None


def test_a_trainer_that_was_given_can_be_pickled(tmp_path: Path) -> None:
    """As a hyperparameter search does; what comes back has the method of its class."""
    made = trainer(arguments(tmp_path), model=torch.nn.Linear(32, 32))
    made.add_callback(PrecisionDebugTrainerCallback(statistics(), trainer=made))
    again = pickle.loads(pickle.dumps(made))
    assert again.train.__func__ is transformers.Trainer.train
