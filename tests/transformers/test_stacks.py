"""What the Hugging Face Trainer does around a training: it compiles the model, and searches hyperparameters."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers
from torch._dynamo.utils import counters

from te_precision_callbacks.runs import list_runs, open_run
from te_precision_callbacks.session import running_session
from te_precision_callbacks.transformers import PrecisionDebugTrainerCallback
from tests.conftest import Keeper, statistics
from tests.transformers.models import Net, arguments, trainer

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
