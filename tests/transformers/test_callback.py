"""The callback in trainings of the unmodified Trainer."""

import copy
import pickle
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from accelerate.state import AcceleratorState
from torch._dynamo.utils import counters

from te_precision_callbacks import ConfigError, PrecisionDebugTrainerCallback
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.runs import list_runs, open_run
from te_precision_callbacks.session import SessionError, running_session
from tests.conftest import Keeper, module_state, statistics
from tests.lightning.models import largest_inputs, sample
from tests.transformers.models import Net, arguments, trainer


def train(folder: Path, config: Any = None, model: Any = None, **keywords: Any) -> Net:
    model = model or Net()
    callback = PrecisionDebugTrainerCallback(config or statistics())
    trainer(arguments(folder, **keywords), callback, model=model).train()
    return model


def test_an_accumulation_is_one_iteration(tmp_path: Path) -> None:
    """Also the shorter one at the end of an epoch of eight batches."""
    model = train(tmp_path, gradient_accumulation_steps=3, max_steps=3)
    expected = {0: model.largest(0, 1, 2), 1: model.largest(3, 4, 5), 2: model.largest(6, 7)}
    assert largest_inputs(tmp_path) == expected


@pytest.mark.parametrize(("start_step", "begin"), [(None, 2), (100, 100)])
def test_a_resumed_training_goes_on_with_its_iterations(tmp_path: Path, start_step: int | None, begin: int) -> None:
    keywords: dict[str, Any] = {"gradient_accumulation_steps": 2, "save_strategy": "steps", "save_steps": 2}
    train(tmp_path / "a", max_steps=2, **keywords)
    model = Net()
    callback = PrecisionDebugTrainerCallback(statistics(), log_dir=tmp_path / "log", start_step=start_step)
    made = trainer(arguments(tmp_path / "b", max_steps=4, **keywords), callback, model=model)
    made.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-2"))
    assert largest_inputs(tmp_path / "log") == {begin: model.largest(0, 1), begin + 1: model.largest(2, 3)}


@pytest.mark.parametrize("resumed", [False, True])
def test_the_loss_of_a_training_without_a_step_is_none(tmp_path: Path, resumed: bool) -> None:
    """The Trainer logs a train_loss of 0."""
    checkpoint = None
    if resumed:  # at the end of its only epoch
        train(tmp_path / "a", max_steps=-1, num_train_epochs=1, save_strategy="epoch")
        checkpoint = str(tmp_path / "a" / "checkpoint-8")
    epochs: dict[str, Any] = {"max_steps": -1, "num_train_epochs": int(resumed)}
    callback = PrecisionDebugTrainerCallback(statistics(), log_dir=tmp_path / "log")
    made = trainer(arguments(tmp_path / "b", **epochs), callback, model=Net())
    made.train(resume_from_checkpoint=checkpoint)
    assert made.state.log_history[-1]["train_loss"] == 0
    assert not callback.session.findings.judged
    assert not list_runs(tmp_path / "log")


def test_evaluation_is_not_observed(tmp_path: Path, keeper: Keeper) -> None:
    """Before the first step, in between steps, in predict() and generate(); its inputs are a hundred times larger."""

    class Predicts(transformers.TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            made.predict(made.eval_dataset)  # type: ignore[arg-type]

        def on_step_end(self, *_: Any, **__: Any) -> None:
            model.train()(100 * sample(0)[None])  # as a callback may, also in training mode

    model = Net()
    callback = PrecisionDebugTrainerCallback(statistics(), sinks=[keeper])
    args = arguments(tmp_path, eval_strategy="steps", eval_steps=1, eval_on_start=True, gradient_accumulation_steps=2)
    made = trainer(args, Predicts(), callback, model=model)
    made.train()
    made.evaluate()
    expected = {step: model.largest(2 * step, 2 * step + 1) for step in range(4)}
    assert keeper.values("max", "net.0") == expected
    assert max(expected.values()) < 10


def test_a_second_training_has_a_session_of_its_own(tmp_path: Path, keeper: Keeper) -> None:
    callback = PrecisionDebugTrainerCallback(statistics(), sinks=[keeper])
    model = Net()
    before = module_state(model)
    made = trainer(arguments(tmp_path, max_steps=2), callback, model=model)
    made.train()
    first = callback.session
    made.train()
    assert callback.session is not first
    assert keeper.iterations == [0, 1, 0, 1]
    assert keeper.closed == [None, None]
    assert module_state(model) == before
    assert not model._forward_pre_hooks


# ---------------------------------------------------------------------- who calls


def test_without_a_handler_there_is_one_warning_and_the_statistics_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    callback, model = PrecisionDebugTrainerCallback(statistics()), Net()
    args, state, control = arguments(tmp_path), transformers.TrainerState(), transformers.TrainerControl()
    callback.on_train_begin(args, state, control, model=model)
    for step in range(2):
        callback.on_step_begin(args, state, control, model=model)
        model(torch.stack([sample(step)]), torch.tensor([step]))["loss"].backward()
        state.global_step += 1
        callback.on_step_end(args, state, control, model=model)
    callback.on_train_end(args, state, control, model=model)
    assert largest_inputs(tmp_path) == {step: sample(step).max().item() for step in range(2)}
    assert caplog.text.count("was not called by") == 1


# ---------------------------------------------------------------------- bad input


def test_a_bad_config_is_an_error_before_the_first_step(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no_such"):
        PrecisionDebugTrainerCallback(tmp_path / "no_such.yaml")
    with pytest.raises(OptionError, match="log_dri"):
        PrecisionDebugTrainerCallback(log_dri="x")  # type: ignore[call-arg]
    model = Net()
    before = module_state(model)
    with pytest.raises(ConfigError, match="matches none of the 2 layers"):
        train(tmp_path, statistics(layers=["fc7"]), model)
    assert model.trained_on == []
    assert module_state(model) == before
    assert not model._forward_pre_hooks


def test_a_model_without_te_layers_trains_with_a_warning_that_says_how_to_get_some(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Plain(Net):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Sequential(torch.nn.Linear(32, 32))

    made = trainer(arguments(tmp_path), PrecisionDebugTrainerCallback(), model=Plain())
    made.train()
    assert made.state.global_step == 4
    (text,) = (record.getMessage() for record in caplog.records if "no Transformer Engine layer" in record.getMessage())
    assert "accelerate launch --config_file" in text
    variables = dict(re.findall(r"(ACCELERATE_\w+)=(\w+)", text))
    assert len(variables) == 2
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    AcceleratorState._reset_state(reset_partial_state=True)
    callback = PrecisionDebugTrainerCallback(log_dir=tmp_path / "fp8")
    trainer(arguments(tmp_path), callback, model=Plain()).train()
    assert callback.session is not None
    assert {product.family for product in callback.session.coverage()} == {"te"}


def test_a_callback_can_be_pickled_and_a_model_copied_while_it_trains(tmp_path: Path) -> None:
    class Copies(transformers.TrainerCallback):
        def on_step_end(self, *_: Any, model: Any, **__: Any) -> None:
            self.model = copy.deepcopy(model)
            self.callback = pickle.loads(pickle.dumps(callback))

    callback, copies = PrecisionDebugTrainerCallback(statistics()), Copies()
    trainer(arguments(tmp_path, max_steps=1), copies, callback).train()
    copies.model.train()(sample(0)[None])
    trainer(arguments(tmp_path / "copy", max_steps=1), copies.callback).train()
    assert sorted(largest_inputs(tmp_path / "copy")) == [0]


def test_a_second_callback_of_a_trainer_does_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (PrecisionDebugTrainerCallback(statistics()) for _ in range(2))
    trainer(arguments(tmp_path, max_steps=1), first, second).train()
    assert caplog.text.count("This callback does nothing. Give one callback all options.") == 1
    assert first.session.iteration == 1
    with pytest.raises(SessionError, match="no session yet"):
        _ = second.session


# ---------------------------------------------------------------------- compiled models, searches


CONFIG = statistics(tensors=["activation", "gradient"])


def net() -> Net:
    """The Trainer hands a trial to a function that takes an argument."""
    return Net()


def test_a_compiled_model_has_the_numbers_of_the_model(tmp_path: Path) -> None:
    results = {}
    for compiles in (False, True):
        torch._dynamo.reset()
        counters.clear()
        keeper = Keeper()
        how = {"torch_compile": True, "torch_compile_backend": "eager"} if compiles else {}
        args = arguments(tmp_path, max_steps=3, **how)
        callback = PrecisionDebugTrainerCallback(CONFIG, sinks=[keeper], log_dir=tmp_path / f"debug {compiles}")
        trainer(args, callback, model=net()).train()
        assert bool(counters["frames"]["ok"]) == compiles
        assert callback.session.coverage().macs()
        results[compiles] = [[(r.layer, r.tensor, r.statistic, r.value) for r in records] for records in keeper.steps]
    assert len(results[True]) == 3
    assert all(results[True])
    assert results[True] == results[False]


def test_each_trial_of_a_search_is_a_run(tmp_path: Path) -> None:
    optuna = pytest.importorskip("optuna")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    keeper = Keeper()
    callback = PrecisionDebugTrainerCallback(CONFIG, sinks=[keeper], log_dir=tmp_path / "debug")
    made = transformers.Trainer(
        model_init=net,
        args=arguments(tmp_path, max_steps=2, eval_strategy="steps", eval_steps=2),
        train_dataset=trainer(arguments(tmp_path)).train_dataset,
        eval_dataset=trainer(arguments(tmp_path)).eval_dataset,
        callbacks=[callback],
    )
    best = made.hyperparameter_search(
        hp_space=lambda trial: {"learning_rate": trial.suggest_float("learning_rate", 0.01, 0.1)},
        compute_objective=lambda metrics: metrics["eval_loss"],
        n_trials=2,
        backend="optuna",
    )
    assert "learning_rate" in best.hyperparameters
    assert keeper.iterations == [0, 1, 0, 1]
    runs = list_runs(tmp_path / "debug")
    assert [len(open_run(tmp_path / "debug" / "precision_records" / run).steps) for run in runs] == [2, 2]
    assert running_session() is None
