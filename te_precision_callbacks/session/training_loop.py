"""Observes the training loop: optimizer steps, missing and extra calls of ``step()``, and the loss."""

from __future__ import annotations

import itertools
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.optimizers import after_closure
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.replaced import BeforeCalls
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.session.collecting import TrainerScalars
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.sinks.step_records import Event

logger = logging.getLogger(__name__)

_ALIKE = 3
"""Number of consecutive optimizer steps with equal extra iterations that cause a warning."""

_AGAIN = "step() is called again after each step of the optimizer"
_IN_MICRO_BATCHES = "step() is called after each micro-batch"

MOST_OPTIMIZER_STEPS = 10
"""Steps of an optimizer within a debug iteration after which the loop has probably forgotten to call ``step()``."""

_REMEDIES: Mapping[str, str] = {
    "lightning": "Lightning did not count these steps. In manual optimization, step the optimizers from"
    " self.optimizers(), or pass step_on='batch' to the callback.",
    "fabric": "Set up the optimizer with fabric.setup(model, optimizer) or fabric.setup_optimizers(optimizer). With"
    " step_on='batch', call fabric.call('on_train_batch_end') after each batch.",
    "accelerate": "Call debugger.step() after each batch, and step the optimizer that accelerator.prepare() returned.",
    "transformers": "The training did not raise the event on_step_end after these steps.",
}
_REMEDY = "Call session.step() after each optimizer step."


def is_in_evaluation(modules: Sequence[NamedModule]) -> bool:
    """Return whether all modules are in evaluation mode, and one of them trains; a frozen base does not."""
    if any(named.module.training for named in modules):
        return False
    parameters = itertools.chain.from_iterable(named.module.parameters(recurse=False) for named in modules)
    return any(parameter.requires_grad for parameter in parameters)


def has_gradients(parameters: Iterable[torch.nn.Parameter]) -> bool:
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if any(gradient.layout != torch.strided for gradient in gradients) or is_capturing():
        return bool(gradients)
    flags_of: dict[torch.device, list[torch.Tensor]] = {}
    for gradient in gradients:
        own = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # DTensor: this rank's part
        flags_of.setdefault(own.device, []).append(own.any())
    return any(bool(torch.stack(flags).any()) for flags in flags_of.values())


OptimizerMethod = Callable[[torch.optim.Optimizer], None]


def hook_optimizers(before: OptimizerMethod, after: OptimizerMethod) -> list[RemovableHandle]:
    """Call methods before and after each step of any optimizer; the hooks hold weak references to them.

    The backward of a step with a closure, as in Lightning, runs in the step: ``before`` is called after its first one.
    """
    before_step, after_step = weakref.WeakMethod(before), weakref.WeakMethod(after)

    @outside_of_dynamo
    def call_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        waiting = [optimizer]

        def act() -> None:
            bound = before_step()
            if bound is not None and waiting:
                bound(waiting.pop())

        wrapped = after_closure(args, keywords, act)
        if wrapped is None:
            act()
        return wrapped

    @outside_of_dynamo
    def call_after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if (bound := after_step()) is not None:
            bound(optimizer)

    return [register_optimizer_step_pre_hook(call_before), register_optimizer_step_post_hook(call_after)]


class LoopChecks:
    """Counts optimizer steps between calls of ``step()``, and warns once of a loop with missing or extra calls.

    Attributes:
        optimizer_steps: number of steps of the optimizer with the most steps, equal on ranks that train together; -1
            without a step, as on a rank without parameters.
    """

    def __init__(self, context: RunContext, model: ObservedModel) -> None:
        self.has_stepped = False
        self._in_evaluation = False
        self.optimizer_steps = -1
        self._context = context
        self._notices = context.notices
        self._model = model
        self._all_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._between: list[str] = []
        self._gaps: deque[tuple[str, ...]] = deque(maxlen=_ALIKE)

    @property
    def has_trained(self) -> bool:
        return any(self._model.is_trained_by(optimizer) for optimizer in list(self._steps))

    def end_step(self, *, in_regions: bool) -> None:
        if self._in_evaluation and self.has_trained and self._notices.first("evaluation"):
            text = "the optimizer steps, but all Transformer Engine layers are in evaluation mode"
            self._context.events.append(Event("evaluation_mode", text, self._context.iteration, "warning"))
            if own_rank() == 0:
                logger.warning(
                    "In step %d %s: call model.train() before the training. Ignore this warning if that is intended.",
                    self._context.iteration,
                    text,
                )
        self._in_evaluation = False
        if self._context.results.integration == "session" and own_rank() == 0:  # integrations call step() themselves
            self._check_further_steps(in_regions=in_regions)
        self.has_stepped = True
        self._steps.clear()

    def _check_further_steps(self, *, in_regions: bool) -> None:
        """Warn if each optimizer step has equal extra iterations, all of them empty or all with a backward."""
        products = self._model.hooks.products
        has_backward = products.has_added
        products.has_added = False
        if not self._steps:
            ran = "forward" if in_regions else "nothing"
            self._between.append("backward" if has_backward else ran)
            return
        self._gaps.append(tuple(self._between))
        self._between.clear()
        gap = self._gaps[-1]
        if list(self._gaps) != [gap] * _ALIKE or len(set(gap)) != 1 or gap[0] == "forward":
            return
        if self._notices.first("further steps"):
            is_mistake = gap[0] == "nothing"
            count = len(gap) + 1
            text = (
                f"{_AGAIN if is_mistake else _IN_MICRO_BATCHES}: {count} debug iterations per optimizer step, so"
                f" schedules run {count} times too fast. Call step() once after each optimizer step."
            )
            if is_mistake:
                self._context.note_unobserved(text)
            logger.warning(
                "%s%s",
                text,
                "" if is_mistake else " Ignore this warning if each micro-batch is to be a debug iteration.",
            )

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        ever = self._all_steps.get(optimizer, 0) + 1
        self._all_steps[optimizer] = ever
        self.optimizer_steps = max(self.optimizer_steps, ever)
        self._in_evaluation |= is_in_evaluation(self._model.layers.modules)
        count = self._steps.get(optimizer, 0) + 1
        self._steps[optimizer] = count
        if count == MOST_OPTIMIZER_STEPS:
            self._warn_of_forgotten_step(
                optimizer, count, "Ignore this warning if that many steps per debug iteration are intended."
            )

    def end(self, error: BaseException | None) -> None:
        """Warn at the end of a run that never called ``step()`` although an optimizer stepped several times.

        If no optimizer has stepped either, record that in the verdict.
        """
        if not self.has_stepped:
            integration = self._context.results.integration
            if not (error or self._steps) and self._context.results.table.order[0] and integration != "watch":
                self._context.note_unobserved(
                    "no step was counted, so all that ran belongs to debug iteration"
                    f" {self._context.iteration}. {_REMEDIES.get(integration, _REMEDY)}"
                )
            for optimizer, count in list(self._steps.items()):
                if count > 1:
                    self._warn_of_forgotten_step(optimizer, count, "")

    def _warn_of_forgotten_step(self, optimizer: torch.optim.Optimizer, count: int, ignored: str) -> None:
        if own_rank() == 0 and self._model.is_trained_by(optimizer) and self._notices.first("forgotten"):
            text = (
                f"{type(optimizer).__name__} stepped {count} times without a session step(), so all these steps count"
                f" as debug iteration {self._context.iteration}."
                f" {_REMEDIES.get(self._context.results.integration, _REMEDY)}"
            )
            self._context.note_unobserved(text)
            logger.warning("%s", f"{text} {ignored}".rstrip())


class BackwardLoss:
    """Records the loss that is passed to an object's ``backward``; it stays on its device."""

    def __init__(self, failures: ObservationFailures, scalars: TrainerScalars) -> None:
        self._failures = failures
        self._scalars = scalars
        self._name = ""
        self._is_total = False
        self._sum: torch.Tensor | None = None
        self._count = 0
        self._last: tuple[int, int, torch.Tensor] | None = None
        self._script_logs = False
        self._hook: BeforeCalls | None = None

    def follow(self, owner: Any, name: str, *, total: bool) -> None:
        """Begin, unless another object is followed; see :meth:`InspectSession.follow`."""
        if self._hook is None:
            self._name = name
            self._is_total = total
            self._hook = BeforeCalls(owner, "backward", self._note)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def note_logged(self, scalars: Mapping[str, Any]) -> None:
        self._script_logs |= self._name in scalars

    def end_step(self, iteration: int, logging_step: int) -> None:
        """End a step; record the loss of the step before, since a script may log its own loss after ``step()``."""
        self.record()
        if self._sum is not None:
            loss = self._sum if self._is_total else self._sum / self._count
            self._last = iteration, logging_step, loss
        self._sum = None
        self._count = 0

    def record(self) -> None:
        """Record the loss of the last step, if the script does not log its loss."""
        if self._last is not None and not self._script_logs:
            iteration, logging_step, loss = self._last
            self._scalars.add(iteration, logging_step, {self._name: loss})
        self._last = None

    @outside_of_dynamo
    def _note(self, *losses: Any, **keywords: Any) -> None:
        # accelerator.backward(loss), fabric.backward(tensor, *args, model=None)
        loss = losses[0] if losses else keywords.get("loss", keywords.get("tensor"))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex() or is_capturing():
            return
        with self._failures.guard("reading", "the loss of backward()"):
            value = loss.detach().reshape(()).to(torch.float32, copy=True)
            self._sum = value if self._sum is None else self._sum + value.to(self._sum.device, non_blocking=True)
            self._count += 1
