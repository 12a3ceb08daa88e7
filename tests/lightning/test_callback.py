"""The Lightning callback in real fits: iterations, checkpoints, resumes, and the rules' findings in them."""

import contextlib
import math
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
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.plugins import TransformerEnginePrecision
from transformer_engine.common import recipe as recipes
from transformer_engine.debug.pytorch.debug_state import TEDebugState

from te_precision_callbacks import PrecisionDebugCallback
from te_precision_callbacks.diagnosis import diagnose
from te_precision_callbacks.diagnosis.engine import PrecisionFindingError
from te_precision_callbacks.overflow import ActivationOverflowError
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import ResumeAuditError
from tests.capability import any_capability, stand_for
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
from tests.session.test_resume_audit import DELAYED, MISSING, RECIPES, findings, warned


def fit(root: Path, batches: int = 6, model: Any = None, **keywords: Any) -> dict[int, float]:
    callback = PrecisionDebugCallback(statistics(), log_dir=root / "debug")
    trainer(root, callbacks=[callback], **keywords).fit(model or Plain(), loader(batches))
    return largest_inputs(root / "debug")


def test_an_accumulation_is_one_iteration(tmp_path: Path) -> None:
    expected = {0: largest(0, 1, 2, 3), 1: largest(4, 5, 6, 7), 2: largest(8, 9)}
    assert fit(tmp_path, batches=10, accumulate_grad_batches=4) == expected


class AtTheBatch(Plain):
    """Logs its metrics at the number of the batch, as in docs/lightning.md."""

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
    [(True, {}, 7), (False, {"step_on": "batch"}, 7), (False, {"start_step": 100}, 100)],
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
    # The forward of the step that failed is written too.
    assert largest_inputs(tmp_path / "debug") == {step: largest(step) for step in range(4)}
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
@pytest.mark.extended
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


# ---------------------------------------------------------------------- debug="activation_overflow"


class Overflowing(Plain):
    """Calls its layers itself, never its own forward; the first layer overflows in one batch."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at
        self.before: dict[str, torch.Tensor] = {}

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx == self.at:
            self.before = {name: value.detach().clone() for name, value in self.named_parameters()}
            with torch.no_grad():
                self.net[0].bias.fill_(torch.inf)
        return self.net(batch).pow(2).mean()


def test_the_fit_ends_with_the_module_and_the_batch(tmp_path: Path) -> None:
    callback = PrecisionDebugCallback(statistics(), debug="activation_overflow")
    model = Overflowing(at=4)
    with pytest.raises(ActivationOverflowError) as caught:
        trainer(tmp_path, callbacks=[callback], accumulate_grad_batches=2).fit(model, loader(8))
    error = caught.value
    assert (error.path, error.class_name, error.role, error.batch) == ("net.0", "Linear", "output", 4)
    assert error.report.splitlines()[0] == "< [4] net.0: Linear: output has infs"
    for name, value in model.named_parameters():
        if name != "net.0.bias":
            assert torch.equal(value, model.before[name]), "the optimizer has not stepped"
    assert not callback.session.running
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_healthy_fit_with_validation_ends_without_a_hook_on_the_model(tmp_path: Path) -> None:
    callback = PrecisionDebugCallback(statistics(), debug=["activation_overflow", "te_precision"])
    model = Plain()
    fitted = trainer(tmp_path, callbacks=[callback], val_check_interval=2)
    fitted.fit(model, loader(6), loader(2))
    assert fitted.global_step == 6
    assert callback.session.overflow is None
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_a_finding_of_inf_and_nan_ends_the_fit_before_the_step_of_the_optimizer(tmp_path: Path) -> None:
    """The backward runs inside of that step."""
    callback = PrecisionDebugCallback(statistics(), on_finding={"nonfinite": "stop"})
    model = Overflowing(at=4)
    with pytest.raises(PrecisionFindingError) as caught:
        trainer(tmp_path, callbacks=[callback]).fit(model, loader(8))
    (finding,) = caught.value.findings
    assert (finding.layers, finding.since) == (("net.1",), 4)
    for name, value in model.named_parameters():
        assert name == "net.0.bias" or torch.equal(value, model.before[name])
    assert not callback.session.running


class Scaled(Overflowing):
    """Its loss is large enough for the first scales to be too much; its first bias overflows in one batch."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return super().training_step(batch, batch_idx) * 2.0**20


@pytest.mark.parametrize("at", [-1, 6])
def test_the_gradients_of_a_scaled_loss_are_the_scalers_affair(tmp_path: Path, at: int) -> None:
    """And an overflow of the forward, which makes the scaler skip the step, is not."""
    callback = PrecisionDebugCallback(statistics(), debug="activation_overflow")
    plugin = L.pytorch.plugins.MixedPrecision("bf16-mixed", "cpu")
    fitted = trainer(tmp_path, callbacks=[callback], plugins=[plugin])
    plugin.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**120, growth_interval=1000)
    ends = contextlib.nullcontext() if at < 0 else pytest.raises(ActivationOverflowError, match=r"\[6\] net.0: Linear")
    with ends:
        fitted.fit(Scaled(at), loader(24))
    assert plugin.scaler.get_scale() <= 2.0**115


# ---------------------------------------------------------------------- the audit of a resume


class InFp8(Plain):
    def __init__(self, recipe: recipes.Recipe, *, quantized: bool = False) -> None:
        with te.quantized_model_init(enabled=quantized, recipe=recipe):
            super().__init__(lr=1e-4)
        self.recipe = recipe
        self.strict_loading = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with te.autocast(recipe=self.recipe):
            return super().training_step(batch, batch_idx)


def save(folder: Path, model: InFp8) -> Path:
    callback = PrecisionDebugCallback(statistics(), log_dir=folder / "first")
    made = trainer(folder, callbacks=[callback], max_steps=2)
    made.fit(model, loader(4, size=32))
    made.save_checkpoint(folder / "saved.ckpt")
    return folder / "saved.ckpt"


def resume(folder: Path, model: InFp8, checkpoint: Path) -> PrecisionDebugCallback:
    callback = PrecisionDebugCallback(statistics(), log_dir=folder / "second", strict=True)
    fitted = trainer(folder, callbacks=[callback], max_steps=4, max_epochs=2)
    fitted.fit(model, loader(4, size=32), ckpt_path=checkpoint)
    return callback


@pytest.mark.usefixtures("trusted_checkpoints")
@pytest.mark.parametrize(("name", "quantized"), [("delayed", False), ("nvfp4", True)])
def test_a_good_resume_is_silent(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, quantized: bool) -> None:
    recipe, capability = RECIPES[name]
    with any_capability():
        stand_for(capability)
        checkpoint = save(tmp_path, InFp8(recipe, quantized=quantized))
        callback = resume(tmp_path, InFp8(recipe, quantized=quantized), checkpoint)
    assert findings(callback.session.resume_report) == []
    assert callback.session.iteration == 4
    assert warned(caplog) == []


@pytest.mark.usefixtures("trusted_checkpoints")
def test_strict_ends_the_fit_before_the_parameters_change(tmp_path: Path) -> None:
    checkpoint, model = save(tmp_path, InFp8(DELAYED)), InFp8(DELAYED)
    content = torch.load(checkpoint)
    weights = content["state_dict"]
    content["state_dict"] = {key: value for key, value in weights.items() if not key.endswith("_extra_state")}
    torch.save(content, checkpoint)
    with pytest.raises(ResumeAuditError, match=MISSING):
        resume(tmp_path, model, checkpoint)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, content["state_dict"][name]), name


# ---------------------------------------------------------------------- findings of the rules


STEPS, BREAKS_AT = 12, 6


class Breaks(Plain):
    """Its activations are NaN from a step on, which leaves the loss and the weights as they are."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        if batch_idx >= BREAKS_AT:
            with te.autocast(enabled=False):
                self.net[0](batch * float("nan"))
        return super().training_step(batch, batch_idx)


def fit_that_breaks(folder: Path, keeping: L.Callback, **keywords: Any) -> PrecisionDebugCallback:
    precision = PrecisionDebugCallback(statistics(stats=["nonfinite_num"]), log_dir=folder / "logs", **keywords)
    fitted = trainer(folder, callbacks=[keeping, precision], max_steps=STEPS, enable_checkpointing=True)
    fitted.fit(Breaks(), loader(STEPS))
    return precision


@pytest.mark.parametrize("keep", [8, 2])
def test_a_finding_names_no_deleted_checkpoint(tmp_path: Path, keep: int) -> None:
    saving = ModelCheckpoint(tmp_path / "saved", monitor="step", mode="max", save_top_k=keep, every_n_train_steps=1)
    precision = fit_that_breaks(tmp_path, saving)
    (finding,) = precision.session.findings.wrong
    assert finding.last_good == BREAKS_AT - 1
    assert finding.checkpoint == (BREAKS_AT - 1 if keep == 8 else None)
    assert diagnose(tmp_path / "logs") == precision.session.findings


# ---------------------------------------------------------------------- numbers that the module logs


LOST = 4


class Logs(Plain):
    """Logs the norm of its gradient, which is nan from a step on, and its loss under another name."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return loss

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)
        self.log("grad_norm", norm if self.global_step < LOST else norm * math.nan)


@pytest.mark.parametrize("has_logger", [True, False])
def test_a_gradient_norm_that_the_module_logs_is_checked(tmp_path: Path, has_logger: bool) -> None:
    callback = PrecisionDebugCallback(log_dir=tmp_path / "debug")
    board = CSVLogger(tmp_path, name="csv", version="") if has_logger else False
    trainer(tmp_path, callbacks=[callback], logger=board, log_every_n_steps=50).fit(Logs(), loader(8))
    verdict = callback.session.findings
    assert [(item.rule, item.severity, item.since, item.until) for item in verdict.wrong] == [
        ("nonfinite", "error", LOST, 7)
    ]
    assert callback.session.problem_count == len(verdict.wrong) == 1
    assert diagnose(tmp_path / "debug") == verdict
    rows = open_run(tmp_path / "debug").scalars.to_pylist()
    for name in ("grad_norm", "loss", "train_loss_step"):
        assert [row["iteration"] for row in rows if row["name"] == name] == list(range(8)), name
    assert "te/findings" not in {row["name"] for row in rows}, "it is a result, no number of the trainer"


class Spoils(Plain):
    """nan in a gradient, after the backward, which runs inside of the optimizer's step."""

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_step == LOST:
            gradient = self.net[1].weight.grad
            assert gradient is not None
            gradient[0, 0] = math.nan


def test_a_gradient_is_checked_after_its_backward(tmp_path: Path) -> None:
    callback = PrecisionDebugCallback(log_dir=tmp_path / "debug")
    trainer(tmp_path, callbacks=[callback]).fit(Spoils(), loader(8))
    (finding,) = (finding for finding in callback.session.findings if finding.title == "inf or nan in a tensor")
    assert finding.since == LOST
    assert str(finding).startswith("gradient of net.1: the gradient of net.1.weight has inf or nan")


class Starts(EarlyStopping):
    def __init__(self, **keywords: Any) -> None:
        super().__init__("te/findings", mode="min", patience=100, strict=True, **keywords)
        self.monitored: list[float] = []

    def on_train_batch_end(self, trainer: Any, *arguments: Any, **keywords: Any) -> None:
        self.monitored.append(float(trainer.callback_metrics["te/findings"]))


def test_early_stopping_monitors_the_findings_from_the_first_step_on(tmp_path: Path) -> None:
    stops = Starts(divergence_threshold=0.5)
    callback = PrecisionDebugCallback(log_dir=tmp_path / "debug")
    board = CSVLogger(tmp_path, name="csv", version="")
    fitted = trainer(tmp_path, callbacks=[callback, stops], logger=board, max_epochs=3, log_every_n_steps=1)
    fitted.fit(Logs(), loader(4))
    assert stops.monitored == [0.0] * LOST + [1.0] * 4
    assert fitted.current_epoch == 2, "stopped after the second epoch"
    assert csv_scalars(tmp_path / "csv")["te/findings"][0] == 0.0
