"""Triggers a look before each step of the model's optimizers, even if a GradScaler skips the step."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_precision_callbacks.base.optimizers import after_closure
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.overflow.grad_scaler import listen
from te_precision_callbacks.overflow.hooks import ModelHooks
from te_precision_callbacks.overflow.journal import Journal
from te_precision_callbacks.overflow.looking import Looking

logger = logging.getLogger(__name__)

_FOREIGN_STEPS = 10
"""Steps of other optimizers after which to warn, if no optimizer of the model has stepped."""


class Steps:
    """Listens to the steps of all optimizers of the process, and to scalers."""

    def __init__(self, hooks: ModelHooks, journal: Journal, looking: Looking) -> None:
        self._hooks = hooks
        self.journal = journal
        self._looking = looking
        self._foreign_steps = 0
        # A collected detector leaves this hook in place, doing nothing: torch may be running such hooks just then.
        self._step_hook = register_optimizer_step_pre_hook(_before_step_of(weakref.ref(self)))
        self._scaler_hook = listen(self)

    def remove(self) -> None:
        self._step_hook.remove()
        self._scaler_hook()

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Look before an optimizer of the model steps; return new arguments for ``step`` if it gets a closure."""
        if self.journal.closed:
            return None
        if not self._is_ours(optimizer):
            self._count_foreign_step()
            return None
        # The looks before a scaler's step come first; an optimizer that gets a scaler skips the step itself.
        scales = any(isinstance(value, GradScaler) for value in (*args[1:], *keywords.values()))
        self._looking.look(may_be_skipped=scales)
        return after_closure(args, keywords, lambda: self._looking.look(may_be_skipped=False))

    def before_scaled_step(self, optimizer: Any) -> None:
        if not self.journal.closed and self._is_ours(optimizer):
            self._looking.look()

    def _is_ours(self, optimizer: Any) -> bool:
        try:
            return self._hooks.steps(optimizer)
        except Exception as error:
            self.journal.fail(error)
            return True  # other ranks may wait for this one in their look

    def _count_foreign_step(self) -> None:
        """Warn once that there are no looks, if no optimizer of the model has ever stepped."""
        if self._looking.has_looked or not self.journal.due:
            return
        self._foreign_steps += 1
        if self._foreign_steps >= _FOREIGN_STEPS and self.journal.notices.first("foreign steps"):
            logger.warning(
                "Activation overflow: optimizers that hold no parameter of the model have made %d steps without a"
                " look before them. Optimizers that step copies of the parameters (DeepSpeed ZeRO,"
                " Megatron's distributed optimizer) cannot be recognized: call look() of the detector before each of"
                " their steps.",
                _FOREIGN_STEPS,
            )


def _before_step_of(steps: weakref.ref[Steps]) -> Any:
    """Return the hook of all optimizers of the process, which does not keep the detector and the model alive."""

    @outside_of_dynamo
    def before_step(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> Any:
        alive = steps()
        return None if alive is None else alive.before_step(optimizer, args, keywords)

    return before_step
