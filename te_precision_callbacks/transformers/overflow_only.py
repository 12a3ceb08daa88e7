"""``--debug activation_overflow`` on its own, without a session and without Transformer Engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from transformers import TrainerControl, TrainerState, TrainingArguments

from te_precision_callbacks.accelerate import scales_loss
from te_precision_callbacks.transformers.closing import DebugCallback, find_training, refuse_data_parallel

if TYPE_CHECKING:
    from te_precision_callbacks.overflow import DebugActivationOverflow


class ActivationOverflowCallback(DebugCallback):
    """Watches the model for inf and nan during ``train()`` of :class:`te_precision_callbacks.transformers.Trainer`."""

    def __init__(self) -> None:
        self._watch: DebugActivationOverflow | None = None

    def on_train_begin(  # type: ignore[override]  # the events of a Trainer have model=
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        *,
        model: torch.nn.Module,
        **keywords: Any,
    ) -> None:
        """Hook the model, after ``accelerator.prepare`` has replaced layers."""
        from te_precision_callbacks.overflow import DebugActivationOverflow

        self.close()
        refuse_data_parallel(args)
        self._watch = DebugActivationOverflow(model, distributed=True)
        if (training := find_training()) is not None:
            self._watch.loss_scaled = scales_loss(training.trainer.accelerator)

    def on_train_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **keywords: Any
    ) -> None:
        self.close()

    def close(self, error: BaseException | None = None) -> None:
        watch, self._watch = self._watch, None
        if watch is not None:
            watch.close(error)
