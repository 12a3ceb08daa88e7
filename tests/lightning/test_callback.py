"""The Lightning callback in real fits."""

import pickle
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
import transformer_engine.pytorch as te
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import TransformerEnginePrecision
from transformer_engine.debug.pytorch.debug_state import TEDebugState

from te_precision_callbacks import PrecisionDebugCallback
from tests.conftest import Keeper, feature, global_state, module_state, statistics
from tests.lightning.models import (
    Plain,
    Torch,
    TwoOptimizers,
    board_scalars,
    csv_scalars,
    largest,
    largest_inputs,
    loader,
    logged_lines,
    trainer,
)


def fit(root: Path, batches: int = 6, model: Any = None, **keywords: Any) -> dict[int, float]:
    callback = PrecisionDebugCallback(statistics(), log_dir=root / "debug")
    trainer(root, callbacks=[callback], **keywords).fit(model or Plain(), loader(batches))
    return largest_inputs(root / "debug")


def test_an_accumulation_is_one_iteration(tmp_path: Path) -> None:
    expected = {0: largest(0, 1, 2, 3), 1: largest(4, 5, 6, 7), 2: largest(8, 9)}
    assert fit(tmp_path, batches=10, accumulate_grad_batches=4) == expected


class AtTheBatch(Plain):
    """Logs its metrics at the number of the batch, as docs/lightning.md says."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("step", float(self.trainer.fit_loop.total_batch_idx))
        return super().training_step(batch, batch_idx)


def test_every_batch_may_be_an_iteration(tmp_path: Path) -> None:
    board = TensorBoardLogger(tmp_path, name="board", version="")
    callback = PrecisionDebugCallback(statistics(), step_on="batch", log_dir=tmp_path / "debug")
    trainer(tmp_path, callbacks=[callback], accumulate_grad_batches=4, logger=board).fit(AtTheBatch(), loader(6))
    expected = {step: largest(step) for step in range(6)}
    assert largest_inputs(tmp_path / "debug") == expected
    logged = board_scalars(tmp_path / "board")
    assert logged["te.net.0/activation/max"] == pytest.approx(expected)
    assert logged["batch_idx"] == {3: 3, 5: 5}, "each optimizer step is logged once, at its last batch"


@pytest.mark.parametrize(
    ("model", "accumulate", "every"), [(Plain, 4, 4), (lambda: TwoOptimizers(every=3), 1, 3)], ids=["4 of 4", "1 of 3"]
)
def test_numbers_stand_at_the_step_of_the_batchs_own_metrics(
    tmp_path: Path, model: Any, accumulate: int, every: int
) -> None:
    """In every logger, the number of the statistics log, where ``self.log`` of the batch that stepped stands."""
    loggers = [TensorBoardLogger(tmp_path, name="board", version=""), CSVLogger(tmp_path, name="csv", version="")]
    callback = PrecisionDebugCallback(statistics(), log_dir=tmp_path / "debug")
    fitted = trainer(tmp_path, accumulate_grad_batches=accumulate, logger=loggers, callbacks=[callback])
    fitted.fit(model(), loader(12))
    lines = logged_lines(tmp_path / "debug")
    assert lines
    for scalars, exact in ((board_scalars(tmp_path / "board"), np.float32), (csv_scalars(tmp_path / "csv"), float)):
        steps = {batch: step for step, batch in scalars["batch_idx"].items()}
        for (name, iteration), value in lines.items():
            layer, tensor, statistic = name.split("_", 2)
            metrics = scalars[f"te.{layer}/{tensor}/{statistic}"]
            closing_batch = (iteration + 1) * every - 1
            assert exact(metrics[steps[closing_batch]]) == exact(value), (name, iteration)
            assert len(metrics) == 12 // every


def test_layers_that_lightning_replaced_are_found(tmp_path: Path) -> None:
    board = CSVLogger(tmp_path, name="csv", version="")
    callback = PrecisionDebugCallback(statistics(tensors=["activation", "weight", "gradient"]))
    plugin = TransformerEnginePrecision(weights_dtype=torch.float32)
    trainer(tmp_path, callbacks=[callback], plugins=[plugin], logger=board).fit(model := Torch(), loader(3, size=16))
    assert isinstance(model.head, te.Linear)
    assert [layer.name for layer in callback.session.layers] == ["body.1", "head"]
    weights = {entry.operands["weight"] for entry in callback.session.precision if "weight" in entry.operands}
    assert weights == {"FP8 E4M3"}
    # Beside the file of the logger; of each step, layer and tensor max and l1_norm.
    assert len(logged_lines(tmp_path / "csv")) == 3 * 2 * 3 * 2


def test_modules_of_configure_model_are_built_inside_the_session(tmp_path: Path) -> None:
    class Late(Plain):
        def configure_model(self) -> None:
            assert TEDebugState.debug_enabled, "the session exists before the first module of configure_model"
            self.net = torch.nn.Sequential(te.Linear(32, 32))

    assert sorted(fit(tmp_path, batches=2, model=Late())) == [0, 1]


def test_only_training_is_observed(tmp_path: Path) -> None:
    """Sanity checks, validation in between (100 times larger), test and predict, even with gradients."""

    class ValidatesWithGradients(Plain):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            with torch.enable_grad():
                super().validation_step(batch, batch_idx)

    model, callback = ValidatesWithGradients(), PrecisionDebugCallback(statistics(), log_dir=tmp_path)
    fitted = trainer(tmp_path, callbacks=[callback], val_check_interval=2, inference_mode=False)
    fitted.fit(model, loader(6), loader(2))
    fitted.test(model, loader(2), verbose=False)
    fitted.validate(model, loader(2), verbose=False)
    fitted.predict(model, loader(2))
    assert largest_inputs(tmp_path) == {step: largest(step) for step in range(6)}


def test_validation_after_a_fit_is_without_features(tmp_path: Path) -> None:
    config = {"fake": feature("FakeQuant", ["net.0"], gemms=["fprop"], tensors=["activation"], quant_format="FP8E5M2")}
    before, model = global_state(), Plain(lr=0.0)
    callback = PrecisionDebugCallback(config, log_dir=tmp_path / "debug")
    fitted = trainer(tmp_path, callbacks=[callback], num_sanity_val_steps=0)
    fitted.fit(model, loader(2), loader(1))
    fitted.validate(model, loader(1), verbose=False)
    in_fit, *after = model.validation_outputs
    assert not any(torch.equal(in_fit, output) for output in after)
    assert {**global_state(), "te state": None} == {**before, "te state": None}


class Saves(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if trainer.global_step == 7:
            trainer.save_checkpoint(Path(trainer.default_root_dir, "saved.ckpt"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("saves_first", "options", "begins"),
    [(True, {}, 7), (False, {}, 7), (False, {"step_on": "batch"}, 7), (False, {"start_step": 100}, 100)],
)
def test_resuming_continues_the_iteration(
    tmp_path: Path, saves_first: bool, options: dict[str, Any], begins: int
) -> None:
    """The checkpoint is written in on_train_batch_end before or after this callback has counted the batch."""
    callback = PrecisionDebugCallback(statistics(), log_dir=tmp_path / "first")
    trainer(tmp_path, callbacks=[Saves(), callback] if saves_first else [callback, Saves()]).fit(Plain(), loader(7))
    board = TensorBoardLogger(tmp_path, name="board", version="")
    again = PrecisionDebugCallback(statistics(), log_dir=tmp_path / "second", **options)
    resumed = trainer(tmp_path, callbacks=[again], logger=board, max_epochs=2)
    resumed.fit(Plain(), loader(7), ckpt_path=tmp_path / "saved.ckpt")
    assert sorted(largest_inputs(tmp_path / "second")) == list(range(begins, begins + 7))
    assert sorted(board_scalars(tmp_path / "board")["te.net.0/activation/max"]) == list(range(7, 14))


def test_a_callback_that_was_used_can_be_pickled(tmp_path: Path) -> None:
    callback = PrecisionDebugCallback(statistics(), log_dir=tmp_path)
    trainer(tmp_path, callbacks=[callback]).fit(Plain(), loader(1))
    again = pickle.loads(pickle.dumps(callback))
    trainer(tmp_path, callbacks=[again]).fit(Plain(), loader(2))
    assert again.session.iteration == 2


@pytest.fixture
def handlers_of_signals() -> Iterator[None]:
    """A fit that fails leaves Lightning's handlers, which the tests of other modules would find."""
    before = [(number, signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM)]
    yield
    for number, handler in before:
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers_of_signals")
@pytest.mark.parametrize("error", [ValueError("bad batch"), KeyboardInterrupt()])
def test_a_fit_that_fails_closes_the_session(tmp_path: Path, error: BaseException) -> None:
    model, before, keeper = Plain(), global_state(), Keeper()
    modules = module_state(model)
    model.fail_at = {3: error}
    callback = PrecisionDebugCallback(statistics(), log_dir=tmp_path / "debug", sinks=[keeper])
    with pytest.raises(SystemExit if isinstance(error, KeyboardInterrupt) else ValueError):
        trainer(tmp_path, callbacks=[callback]).fit(model, loader(6))
    assert keeper.closed == [error]
    assert module_state(model) == modules
    assert {**global_state(), "te state": None} == {**before, "te state": None}
    written = largest_inputs(tmp_path / "debug")
    assert written == {step: largest(step) for step in range(4)}, "the forward of the step that failed is written too"
    model.fail_at = {}
    assert sorted(fit(tmp_path / "good", model=model)) == list(range(6))


@pytest.mark.filterwarnings("ignore:Found 4 module")
def test_a_model_in_eval_mode_that_is_trained_is_observed(tmp_path: Path) -> None:
    """As a validation that failed leaves it, and as pretrained models come: Lightning keeps the mode."""
    assert sorted(fit(tmp_path, batches=2, model=Plain().eval())) == [0, 1]


def test_what_is_left_at_the_end_stands_at_the_step_of_its_batch(tmp_path: Path) -> None:
    table = CSVLogger(tmp_path, name="csv", version="")
    callback = PrecisionDebugCallback(statistics(), log_dir=tmp_path)
    trainer(tmp_path, callbacks=[callback], logger=table).fit(TwoOptimizers(every=3), loader(8))
    metrics = csv_scalars(tmp_path / "csv")["te.net.0/activation/max"]
    assert metrics == pytest.approx({2: largest(0, 1, 2), 5: largest(3, 4, 5), 7: largest(6, 7)})


@pytest.mark.usefixtures("handlers_of_signals")
def test_a_callback_that_fails_in_on_exception_does_not_disable_the_next_fit(tmp_path: Path) -> None:
    class Fails(L.Callback):
        def on_exception(self, *_: Any) -> None:
            raise RuntimeError("in on_exception")

    before, model = global_state(), Plain()
    callback = PrecisionDebugCallback(statistics(), log_dir=tmp_path)
    model.fail_at = {1: ValueError("bad batch")}
    with pytest.raises(RuntimeError, match="in on_exception"):
        trainer(tmp_path, callbacks=[Fails(), callback]).fit(model, loader(3))
    model.fail_at = {}
    trainer(tmp_path, callbacks=[callback]).fit(model, loader(3))
    assert sorted(largest_inputs(tmp_path)) == [0, 1, 2]
    assert {**global_state(), "te state": None} == {**before, "te state": None}
