"""``PrecisionSearch`` for the Hugging Face Trainer: a search during ``trainer.train``.

transformers.Trainer(model, args, train_dataset=data, callbacks=[PrecisionSearch(step=1000, low_share=0.85)]).train()
"""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from te_precision_callbacks.base.replaced import BeforeCalls
from te_precision_callbacks.search.at_step import SearchAtStep
from te_precision_callbacks.transformers.callback import find_training

__all__ = ["PrecisionSearch"]


class PrecisionSearch(SearchAtStep, TrainerCallback):
    """See :class:`~te_precision_callbacks.search.at_step.SearchAtStep`. The Trainer logs ``te_search/...``."""

    _trainer: Trainer | None = None
    _calls: BeforeCalls | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        training = find_training()
        if training is not None:
            self._trainer = training.trainer
            self._calls = BeforeCalls(self._trainer, "training_step", self._keep)

    def on_step_begin(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        trainer = self._trainer
        if trainer is None or not self.is_due(state.global_step):
            return

        def closure(inputs: Any) -> Any:
            with trainer.compute_loss_context_manager():
                return trainer.compute_loss(trainer.model_wrapped, trainer._prepare_inputs(dict(inputs)))

        optimizer: Any = trainer.optimizer
        metrics = self.run(trainer.model, closure, getattr(optimizer, "optimizer", optimizer))
        if metrics:
            trainer.log(metrics)

    def on_train_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> None:
        if self._calls is not None:
            self._calls.remove()
        self._note_end(state.global_step)
        self._calls = self._trainer = None

    def _keep(self, model: Any, inputs: Any, *rest: Any, **keywords: Any) -> None:
        self.keep(dict(inputs))
