"""``PrecisionSearch`` for Lightning: a search during ``trainer.fit``.

L.Trainer(callbacks=[PrecisionSearch(step=1000, low_share=0.85)]).fit(model)
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature

from te_precision_callbacks.base.replaced import Replacements
from te_precision_callbacks.search.at_step import SearchAtStep

__all__ = ["PrecisionSearch"]


class PrecisionSearch(SearchAtStep, Callback):
    """See :class:`~te_precision_callbacks.search.at_step.SearchAtStep`; needs automatic optimization.

    The metrics ``te_search/...`` go to all loggers. What ``training_step`` logs during the search does not.
    """

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.is_due(trainer.global_step):
            self._run(trainer, pl_module)
        self.keep(batch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._note_end(trainer.global_step)

    def _run(self, trainer: Trainer, module: LightningModule) -> None:
        takes_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)

        def closure(batch: Any) -> Any:
            output = trainer.strategy.training_step(batch, *[0] * takes_index)
            return output["loss"] if isinstance(output, Mapping) else output

        optimizer = trainer.optimizers[0] if len(trainer.optimizers) == 1 else None
        with contextlib.ExitStack() as stack:
            replaced = Replacements()
            stack.callback(replaced.restore)
            for name in ("log", "log_dict"):
                replaced.replace(module, name, lambda *arguments, **keywords: None)
            metrics = self.run(module, closure, optimizer)
        for logger in trainer.loggers:
            logger.log_metrics(metrics, trainer.global_step)
