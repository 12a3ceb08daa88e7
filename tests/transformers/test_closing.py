"""Each way in which a session is closed after a training that failed: the Trainer raises no event then."""

import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import transformers

from te_precision_callbacks import PrecisionDebugTrainerCallback
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import PrecisionContractError
from te_precision_callbacks.transformers import Trainer
from tests.conftest import Keeper, global_state, module_state, statistics
from tests.forked import executable
from tests.lightning.models import board_scalars, largest_inputs
from tests.reference import processes
from tests.transformers.models import Net, arguments, trainer

ERRORS = (ValueError("a bad batch"), KeyboardInterrupt(), SystemExit(3))


def failing(folder: Path, error: BaseException, kind: Any, **options: Any) -> tuple[Any, Any, Net]:
    """A trainer whose third training forward raises, the callback, and the model."""
    model = Net()
    model.fail_at = {2: error}
    callback = PrecisionDebugTrainerCallback(statistics(), **options)
    return trainer(arguments(folder, report_to="tensorboard"), callback, model=model, kind=kind), callback, model


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_our_trainer_closes_at_once(tmp_path: Path, keeper: Keeper, error: BaseException) -> None:
    before = global_state()
    made, callback, model = failing(tmp_path, error, Trainer, sinks=[keeper])
    modules = module_state(model)
    with pytest.raises(type(error)) as caught:
        made.train()
    assert caught.value is error
    assert not callback.session.running
    assert keeper.closed == [error]
    assert global_state()["seams"] == before["seams"]
    assert module_state(model) == modules
    assert largest_inputs(tmp_path) == {step: model.largest(step) for step in range(3)}, "with the step that failed"
    # The integrations are open, since no event has told them of an end.
    (events,) = tmp_path.rglob("events.out.tfevents*")
    result = board_scalars(events.parent)["te.net.0/activation/max"]
    assert result == {step + 1: model.largest(step) for step in range(3)}, "where the step would have stood"


# ---------------------------------------------------------------------- where the trainer is not known


def abandoned(folder: Path, **options: Any) -> tuple[Any, Any, Net]:
    made, callback, model = failing(folder, ValueError("a bad batch"), transformers.Trainer, **options)
    with pytest.raises(ValueError, match="a bad batch"):
        made.train()
    assert callback.session.running
    return made, callback, model


@pytest.mark.parametrize("how", ["in except", "later"])
def test_closing_by_hand_says_what_ended_the_training(tmp_path: Path, keeper: Keeper, how: str) -> None:
    made, callback, _ = failing(tmp_path, ValueError("a bad batch"), transformers.Trainer, sinks=[keeper])
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


def test_at_the_next_train_begin_of_another_callback(tmp_path: Path, keeper: Keeper) -> None:
    """As in a notebook, whose traceback keeps the failed trainer and its callback alive."""
    _, callback, _ = abandoned(tmp_path, sinks=[keeper])
    model = Net()
    trainer(arguments(tmp_path / "b"), PrecisionDebugTrainerCallback(statistics()), model=model).train()
    assert not callback.session.running
    assert len(keeper.closed) == 1
    assert largest_inputs(tmp_path / "b") == {step: model.largest(step) for step in range(4)}


def test_when_the_callback_is_collected(tmp_path: Path, keeper: Keeper) -> None:
    made, callback, _ = abandoned(tmp_path, sinks=[keeper])
    session, gone = callback.session, weakref.ref(callback)
    del made, callback
    gc.collect()
    assert gone() is None, "nothing that the callback made keeps it alive"
    assert not session.running
    assert keeper.iterations == [0, 1, 2]


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
    result = processes.run([executable(whole=True), "-c", SCRIPT, str(tmp_path)])
    assert result.returncode == 1
    assert "ValueError: a bad batch" in result.stderr
    assert result.stdout.count("closed:") == 1
    assert sorted(largest_inputs(tmp_path)) == [0, 1, 2]


# ---------------------------------------------------------------------- more than one attempt


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Trainer, transformers.Trainer])
def test_a_training_that_finds_its_batch_size_begins_anew(tmp_path: Path, keeper: Keeper, kind: Any) -> None:
    """Out of memory in the third batch of eight: the next attempt has batches of seven."""
    model = Net()
    model.fail_at = {2: RuntimeError("CUDA out of memory.")}
    callback = PrecisionDebugTrainerCallback(statistics(stats=["numel"]), sinks=[keeper])
    trainer(arguments(tmp_path, auto_find_batch_size=True), callback, model=model, kind=kind).train()
    assert keeper.iterations == [0, 1, 2, 0, 1, 2, 3]
    numel = keeper.values("numel", "net.0")
    assert set(numel.values()) == {7 * 32}, "the values of the second attempt"
    assert len(keeper.closed) == 2
    assert keeper.closed[1] is None
    assert not callback.session.running
