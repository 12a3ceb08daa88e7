"""Sends a step's statistics to the trainer's reporting integrations (``report_to``), and to no other callback.

An integration is a callback of one of the classes in transformers' ``INTEGRATION_TO_CALLBACK``. Its own ``on_log`` is
called, so steps and processes are the same as for the trainer's own metrics. Most integrations put ``train/`` in front
of every name, which would add thousands of charts to the group of the loss. Statistics keep their names:
``te.<layer>/...``.
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
    """A reporting integration failed on a step's statistics."""


class TrainerEvent(NamedTuple):
    args: TrainingArguments
    state: TrainerState
    control: TrainerControl
    keywords: Mapping[str, Any]


class Reporting:
    """The sinks of a training on the main process, one for each reporting integration of a trainer.

    Integrations that are not open any more get no statistics.
    """

    def __init__(self, handler: CallbackHandler, event: TrainerEvent, select: MetricSelection) -> None:
        classes: tuple[type[TrainerCallback], ...] = tuple(INTEGRATION_TO_CALLBACK.values())  # those registered by now
        integrations = [callback for callback in handler.callbacks if isinstance(callback, classes)]
        self.is_open = True
        self.event = event
        self.sinks = [_IntegrationSink(integration, self, select) for integration in integrations]


class _OwnName(str):
    """A metric's name that stays unchanged when an integration puts ``train/`` in front of it.

    transformers 5.23.0, ``integrations/integration_utils.py: rewrite_logs`` has ``"train/" + name``: the reflected
    addition of a subclass of str takes precedence over str's own. An integration that renames in another way can still
    do so.
    """

    def __radd__(self, other: str) -> str:
        return str(self)


class _IntegrationSink(LoggerSink):
    def __init__(self, integration: TrainerCallback, reporting: Reporting, select: MetricSelection) -> None:
        super().__init__(select)
        self._integration = integration
        self._reporting = reporting
        self._known: set[str] = set()

    def log(self, metrics: dict[str, float], histograms: Mapping[str, Sequence[float]], step: int) -> None:
        """Log at the step of the trainer's own metrics; does nothing after the training."""
        if not self._reporting.is_open:
            return
        try:
            self._log(self._reporting.event, metrics, step)
            for name, counts in histograms.items():
                _log_histogram(self._integration, name, counts, step)
        except Exception as error:
            name = type(self._integration).__name__
            raise ReportingError(f"{name} could not log statistics: {type(error).__name__}: {error}") from error

    def _log(self, event: TrainerEvent, metrics: dict[str, float], step: int) -> None:
        integration = self._integration
        if isinstance(integration, MLflowCallback):
            metrics = names_for_mlflow(metrics)
        if metrics:
            state = _at_step(event.state, step)
            named = {_OwnName(name): value for name, value in metrics.items()}
            integration.on_log(event.args, state, event.control, logs=named, **event.keywords)
        if isinstance(integration, MLflowCallback) and not metrics.keys() <= self._known:
            # The integration logs from other threads. In a store of local files each makes the folders of the names;
            # where two make the same one, MLflow 3.17 loses the step of one of them.
            self._known |= metrics.keys()
            integration._ml_flow.flush_async_logging()


def _at_step(state: TrainerState, step: int) -> TrainerState:
    """Return the state at the end of a step; another state if that step could not be completed."""
    if state.global_step == step:
        return state
    state = copy.copy(state)
    state.global_step = step
    return state


def _log_histogram(integration: TrainerCallback, name: str, counts: Sequence[float], step: int) -> None:
    if isinstance(integration, TensorBoardCallback) and integration.tb_writer is not None:
        add_to_tensorboard(integration.tb_writer, name, counts, step)
    elif isinstance(integration, WandbCallback):
        # As the integration logs: the run's own step counts calls, and the x axis is this one.
        integration._wandb.log({name: wandb_histogram(counts), "train/global_step": step})
