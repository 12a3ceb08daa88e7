"""Sends a step's statistics to the trainer's reporting integrations (``report_to``), and to no other callback.

An integration is a callback of a class in transformers' ``INTEGRATION_TO_CALLBACK``. Its ``on_log`` is called, so steps
and processes are the same as for the trainer's metrics. Most integrations prefix every name with ``train/``, which
would add thousands of charts to the group of the loss; statistics keep their names, ``te.<layer>/...``.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import (
    INTEGRATION_TO_CALLBACK,
    MLflowCallback,
    TensorBoardCallback,
    WandbCallback,
)
from transformers.trainer_callback import CallbackHandler

from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.sinks import MetricSelection
from te_precision_callbacks.sinks.metrics import (
    LoggerSink,
    add_to_tensorboard,
    names_for_mlflow,
    wandb_histogram,
)


class ReportingError(PrecisionDebugError, RuntimeError):
    """A reporting integration failed to log a step's statistics."""


class TrainerEvent(NamedTuple):
    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    keywords: Mapping[str, Any]


class Reporting:
    """The sinks of a training on the main process, one for each reporting integration of a trainer.

    Closed integrations do not receive statistics.
    """

    def __init__(self, handler: CallbackHandler, event: TrainerEvent, select: MetricSelection) -> None:
        classes: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())
        integrations = [callback for callback in handler.callbacks if isinstance(callback, classes)]
        self.is_open = True
        self.event = event
        self.sinks = [_IntegrationSink(integration, self, select) for integration in integrations]


class _OwnName(str):
    """A metric's name that ignores the prefix ``train/`` of an integration.

    transformers 5.23.0, ``integrations/integration_utils.py: rewrite_logs``, computes ``"train/" + name``; ``__radd__``
    of a subclass of str takes precedence. Other ways of renaming still work.
    """

    def __radd__(self, other: str) -> str:
        return str(self)


class _IntegrationSink(LoggerSink):
    """Sends metrics to an integration of the Trainer, such as TensorBoard or W&B."""

    def __init__(self, integration: TrainerCallback, reporting: Reporting, select: MetricSelection) -> None:
        super().__init__(select)
        self._integration = integration
        self._reporting = reporting
        self._known: set[str] = set()

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Sequence[float]], step: int) -> None:
        """Log at the step of the trainer's metrics; a no-op after the training."""
        if not self._reporting.is_open:
            return
        event = self._reporting.event
        integration = self._integration
        try:
            if isinstance(integration, MLflowCallback):
                metrics = names_for_mlflow(metrics)
            if metrics:
                state = event.state
                if state.global_step != step:  # the current step was not completed
                    state = copy.copy(state)
                    state.global_step = step
                named = {_OwnName(name): value for name, value in metrics.items()}
                integration.on_log(event.args, state, event.control, logs=named, **event.keywords)
            if isinstance(integration, MLflowCallback) and not metrics.keys() <= self._known:
                # The integration logs from several threads, which create a folder for each name in a store of local
                # files. If two threads create the same folder, MLflow 3.17 loses the step of one.
                self._known |= metrics.keys()
                integration._ml_flow.flush_async_logging()
            for name, counts in histograms.items():
                if isinstance(integration, TensorBoardCallback) and integration.tb_writer is not None:
                    add_to_tensorboard(integration.tb_writer, name, counts, step)
                elif isinstance(integration, WandbCallback):
                    # Like the integration: wandb's step counts calls, and train/global_step is the x axis.
                    integration._wandb.log({name: wandb_histogram(counts), "train/global_step": step})
        except Exception as error:
            name = type(integration).__name__
            raise ReportingError(f"{name} could not log statistics: {type(error).__name__}: {error}") from error
