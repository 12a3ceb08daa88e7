"""Precision debugging for Lightning: :class:`PrecisionDebugCallback`, one callback."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from typing_extensions import Unpack

from te_precision_callbacks.base.errors import MissingExtraError
from te_precision_callbacks.base.lazy import lazy_names
from te_precision_callbacks.base.replaced import BeforeCalls
from te_precision_callbacks.config.loading import ConfigSource
from te_precision_callbacks.options import SessionKeywords, SessionOptions, StepOn, read_step_on, spelled_out
from te_precision_callbacks.session import InspectSession, SessionError
from te_precision_callbacks.sinks import MetricSelection
from te_precision_callbacks.sinks.metrics import (
    LoggerSink,
    add_to_tensorboard,
    names_for_mlflow,
    overall_name,
    wandb_histogram,
)

try:
    from lightning.fabric.loggers.logger import Logger
    from lightning.fabric.loggers.tensorboard import TensorBoardLogger
    from lightning.fabric.plugins.precision import DeepSpeedPrecision as FabricDeepSpeed
    from lightning.pytorch import Callback, LightningModule, Trainer
    from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
    from lightning.pytorch.plugins.precision import DeepSpeedPrecision, TransformerEnginePrecision
except ImportError as error:
    raise MissingExtraError("te_precision_callbacks.lightning", "lightning") from error

__all__ = ["PrecisionDebugCallback"]
__getattr__, __dir__ = lazy_names(__name__)

logger = logging.getLogger(__name__)


class PrecisionDebugCallback(Callback):
    """Runs Transformer Engine's precision debugging during ``trainer.fit``.

    Rank 0 logs to every logger of the trainer, at the step of the batch's own metrics, or with ``step_on="batch"`` at
    the batch number (docs/lightning.md#each-batch-as-an-iteration):

    - ``te.<layer>/<tensor>/<statistic>`` for each statistic of the config, such as
      ``te.model.layers.0.layernorm_mlp.fc1/activation/max``. Units are the tensor's; a name that ends in ``%`` is in
      percent (in MLflow with ``_pct`` for ``%``).
    - metrics of the whole model, such as ``te/worst_underflows%``: see :mod:`te_precision_callbacks.sinks.metrics`.

    Written below ``log_dir``: ``nvdlfw_inspect_logs`` (which features acted where, per rank) and
    ``nvdlfw_inspect_statistics_logs`` (every statistic, from rank 0).

    Sanity checks, validation, test and predict are not observed; features that change precision act in validation as in
    training. After an exception or Ctrl-C the session is closed, and the statistics since the last step are written.
    With ``debug="activation_overflow"`` the fit ends with an ``ActivationOverflowError`` where an activation or a
    gradient becomes inf or nan.

    Args:
        config: a path, a mapping, a loaded config, or None for statistics on every Transformer Engine layer.
        step_on: the length of a debug iteration: ``"optimizer_step"`` (all batches of an accumulation) or ``"batch"``.
        **keywords: see :class:`te_precision_callbacks.options.SessionOptions`.

    Raises:
        ConfigError: the config cannot be used. Problems that need the model (a section that matches no layer) are
            raised at the start of the fit.
        OptionError: an unknown option, or an invalid value.
        TransformerEngineUnavailableError: at the start of the fit, Transformer Engine cannot be imported.

    Example::

        callback = PrecisionDebugCallback("config.yaml", log_dir="debug")
        L.Trainer(callbacks=[callback]).fit(model)
        print(callback.session.precision)
    """

    @spelled_out
    def __init__(
        self,
        config: ConfigSource = None,
        *,
        step_on: StepOn = "optimizer_step",
        **keywords: Unpack[SessionKeywords],
    ) -> None:
        self._step_on = read_step_on(step_on)
        self._options = SessionOptions.from_keywords(config, **keywords)
        self._session: InspectSession | None = None
        self._restored_iteration: int | None = None
        self._last_global_step = 0
        self._step_of_batch: int | None = None
        self._numbers = StepScalars()
        self._saving: BeforeCalls | None = None
        self._checkpoint = ""

    @property
    def session(self) -> InspectSession:
        """Session of the current or last fit.

        Raises:
            SessionError: no fit has run in this process. With ``ddp_spawn`` and similar strategies, sessions run in
                other processes, with results in ``log_dir``.
        """
        if self._session is None:
            raise SessionError(
                "The callback has no session yet: trainer.fit() starts it. With strategies such as ddp_spawn,"
                " sessions run in other processes: see 'te-precision show LOG_DIR'."
            )
        return self._session

    def __getstate__(self) -> dict[str, Any]:
        """Drop the session, and the model's methods that a trainer attaches to a callback, since a trainer that spawns
        processes pickles the callback.
        """
        attributes = {name: value for name, value in self.__dict__.items() if name not in ("log", "log_dict")}
        return {**attributes, "_session": None, "_saving": None}

    # ------------------------------------------------------------------ start

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Start the session, before configure_model or a precision plugin builds modules."""
        if stage != "fit":
            return
        self._stop(trainer, SessionError("Another fit started."))  # another callback's on_exception raised
        self._restored_iteration = None
        self._step_of_batch = None
        self._numbers = StepScalars()
        converts = isinstance(trainer.precision_plugin, TransformerEnginePrecision)
        expected = "Lightning's precision plugin is TransformerEnginePrecision" if converts else ""
        select = MetricSelection(self._options.prefix, self._options.log_filter)
        self._session = InspectSession.from_options(self._options)
        self._session.start(
            log_dir=Path(trainer.log_dir or trainer.default_root_dir),
            sinks=[LightningLoggerSink(receiver, select) for receiver in trainer.loggers if trainer.is_global_zero],
            integration="lightning",
            eval_mode_counts=False,  # the trainer announces evaluations
        )
        self._session.expect_low_precision(expected)
        self._saving = BeforeCalls(trainer, "save_checkpoint", self._before_saving)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach the model again, with layers created by a precision plugin."""
        session = self.session
        if self._restored_iteration is not None:
            session.iteration = self._restored_iteration
        session.attach(pl_module)
        if session.overflow is not None:
            session.overflow.loss_scaled = scales_loss(trainer.precision_plugin)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Set the step of a resumed fit, since the trainer restores its counts only at the first batch."""
        if self.session.overflow is not None:
            self.session.overflow.begin_batch()
        first = self._step_of_batch is None
        loop = trainer.fit_loop
        self._step_of_batch = (
            loop.total_batch_idx if self._step_on == "batch" else loop.epoch_loop._batches_that_stepped
        )
        if not first:
            return
        if self._restored_iteration is None and self._options.start_step is None:
            self.session.iteration = self._step_of_batch
        elif self._restored_iteration is not None and trainer.global_step > self._last_global_step:
            # The checkpoint was written after the optimizer's step, before this callback counted it.
            self.session.iteration = self._restored_iteration + 1
        self._last_global_step = trainer.global_step

    # ------------------------------------------------------------------ step

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Any) -> None:
        """Record the learning rate before a scheduler changes it."""
        self._numbers.note_step(trainer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        # Counted once for any number of optimizers, while global_step counts the step of each.
        stepped = trainer.global_step != self._last_global_step
        self._last_global_step = trainer.global_step
        self._numbers.note(trainer, outputs)
        if stepped or self._step_on == "batch":
            self.session.log(self._numbers.take(trainer), self._step_of_batch)
            self.session.step(self._step_of_batch)
            # For Lightning's callbacks, such as EarlyStopping; the loggers already have it.
            name = overall_name(self._options.prefix, "findings")
            self._numbers.own.add(name)
            pl_module.log(name, float(self.session.problem_count), logger=False)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Pause observation during validation and sanity checks."""
        if self._session is not None:
            self._session.observing = False

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._session is not None:
            self._session.observing = True
            if not trainer.sanity_checking:
                self._session.log(self._numbers.new_metrics(trainer), self._step_of_batch)

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """Debug iteration and fingerprints of the low-precision state of all ranks, for the checkpoint."""
        if self._session is None:
            return {}
        return {
            **self._session.state_dict(file=self._checkpoint),
            "step_on": self._step_on,
            "global_step": self._last_global_step,
        }

    def _before_saving(self, filepath: Any, *_: Any, **__: Any) -> None:
        self._checkpoint = str(filepath)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the debug iteration from a checkpoint, and audit the resume.

        An iteration counted with a different ``step_on`` is ignored.
        """
        saved = {key: value for key, value in state_dict.items() if key != "iteration"}
        if self._session is not None and self._session.running:
            self._session.load_state_dict(saved)
        if state_dict.get("step_on") == self._step_on and self._options.start_step is None:
            self._restored_iteration = int(state_dict["iteration"])
            self._last_global_step = int(state_dict["global_step"])

    # ------------------------------------------------------------------ end

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._stop(trainer, None)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """End the session, since the trainer does not call teardown hooks after an exception."""
        self._stop(trainer, exception)

    def _stop(self, trainer: Trainer, error: BaseException | None) -> None:
        if self._saving is not None:
            self._saving.remove()
            self._saving = None
        if self._session is not None:
            self._session.stop(error, self._step_of_batch)  # the trainer also counts batches between two steps


class StepScalars:
    """Collects a step's loss, learning rate and loss scale, and the module's metrics.

    Attributes:
        own: names that are not the module's metrics.
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []
        self._of_step: dict[str, Any] = {}
        self.own: set[str] = set()
        self._seen: dict[str, torch.Tensor] = {}

    def note(self, trainer: Trainer, outputs: Any) -> None:
        """Add a batch's loss, already divided by the number of accumulated batches."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, torch.Tensor) and loss.numel() == 1:
            self._losses.append(loss.detach().float().reshape(()) * trainer.accumulate_grad_batches)

    def note_step(self, trainer: Trainer) -> None:
        """Record the settings of the first optimizer step in a batch; others are ignored."""
        self._of_step = self._of_step or _step_settings(trainer)

    def take(self, trainer: Trainer) -> dict[str, Any]:
        """Return the scalars of the ending step; they take precedence over the module's metrics."""
        loss = {"loss": torch.stack(self._losses).mean()} if self._losses else {}
        callback_values = {**loss, **(self._of_step or _step_settings(trainer))}
        self._losses = []
        self._of_step = {}
        self.own |= callback_values.keys()
        return {**callback_values, **self.new_metrics(trainer)}

    def new_metrics(self, trainer: Trainer) -> dict[str, Any]:
        """Return metrics logged since the last call; Lightning keeps older values in the same memory."""
        metrics = {name: value for name, value in trainer.callback_metrics.items() if name not in self.own}
        seen = {name: value.data_ptr() for name, value in self._seen.items()}
        new = {name: value for name, value in metrics.items() if value.data_ptr() != seen.get(name)}
        self._seen = metrics
        return new


def _step_settings(trainer: Trainer) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    groups = chain(*(optimizer.param_groups for optimizer in trainer.optimizers))
    rates = [group["lr"] for group in groups if "lr" in group]
    if rates:
        # Schedulers update a tensor in place.
        settings["lr"] = rates[0].clone() if isinstance(rates[0], torch.Tensor) else rates[0]
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    if scaler is not None and scaler.is_enabled():
        settings["loss_scale"] = scaler.get_scale()
    return settings


def scales_loss(plugin: Any) -> bool:
    """Return whether DeepSpeed scales the loss for float16. torch's GradScaler is detected when it scales."""
    return isinstance(plugin, (DeepSpeedPrecision, FabricDeepSpeed)) and plugin.precision.startswith("16")


class LightningLoggerSink(LoggerSink):
    """Sends a step's metrics to a logger of a trainer or of Fabric, in one call."""

    def __init__(self, receiver: Logger, select: MetricSelection) -> None:
        super().__init__(select)
        self._receiver = receiver

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Sequence[float]], step: int) -> None:
        if metrics:
            named = names_for_mlflow(metrics) if isinstance(self._receiver, MLFlowLogger) else metrics
            self._receiver.log_metrics(named, step=step)
        for name, counts in histograms.items():
            if isinstance(self._receiver, TensorBoardLogger):
                add_to_tensorboard(self._receiver.experiment, name, counts, step)
            elif isinstance(self._receiver, WandbLogger):
                self._receiver.experiment.log({name: wandb_histogram(counts), "trainer/global_step": step})
