"""Observes the training loop: optimizer steps, missing and extra calls of ``step()``, and the loss."""

from __future__ import annotations

import itertools
import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.optimizers import after_closure
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.base.replaced import BeforeCalls
from te_precision_callbacks.base.scalars import is_on_host, is_scalar, to_floats
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.runs.summary import is_training_loss
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.sinks.step_records import Event, Scalars

logger = logging.getLogger(__name__)

_ALIKE = 3
"""Number of consecutive optimizer steps with equal extra iterations that cause a warning."""

_TURNS = 4
"""The changes from one optimizer to another, each after its own backward, above which they step in turn."""

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

_MOST_LOSSES = 10_000
"""Maximum number of losses that a rank keeps for rank 0 between two collection steps."""

_MOST_KEPT = 256
_LONGEST = 1.0
"""Number of scalars, and seconds, after which the trainer's scalars are copied to the host."""


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
    for gradient in gradients:
        local_gradient = gradient.to_local() if hasattr(gradient, "to_local") else gradient  # DTensor: this rank's part
        if local_gradient.any():
            return True
    return False


OptimizerMethod = Callable[[torch.optim.Optimizer], None]


def hook_optimizers(before_step: OptimizerMethod, after_step: OptimizerMethod) -> list[RemovableHandle]:
    """Call methods before and after each step of any optimizer.

    The backward of a step with a closure, as in Lightning, runs in the step: ``before_step`` follows the first one.
    """

    @outside_of_dynamo
    def call_before(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        waiting = [optimizer]

        def act() -> None:
            if waiting:
                before_step(waiting.pop())

        wrapped = after_closure(args, keywords, act)
        if wrapped is None:
            act()
        return wrapped

    @outside_of_dynamo
    def call_after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        after_step(optimizer)

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
        self._all_steps = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._steps = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._backwards = 0  # that were seen at the end of a step
        self._last_turn = 0, 0  # backwards, and the id of the optimizer that stepped first after them
        self._turns = 0
        self._between: list[str] = []
        self._gaps = deque[list[str]](maxlen=_ALIKE)

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
        backwards = self._model.hooks.products.backwards
        has_backward = backwards > self._backwards
        self._backwards = backwards
        if not self._steps:
            ran = "forward" if in_regions else "nothing"
            self._between.append("backward" if has_backward else ran)
            return
        gap = self._between
        self._between = []
        self._gaps.append(gap)
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
        turn = self._model.hooks.products.backwards, id(optimizer)
        if turn[0] > self._last_turn[0]:
            self._turns += turn[1] != self._last_turn[1]
            self._last_turn = turn
            self._context.results.takes_turns = self._turns > _TURNS
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


class Loss(NamedTuple):
    """A training loss that a rank sends to rank 0; the value is text, since JSON has no inf and nan."""

    rank: int
    iteration: int
    logging_step: int
    name: str
    value: str


class TrainerScalars:
    """Buffers the scalars of the training until they are copied to the host.

    The script and the trainer log them; the loss may also be passed to an object's ``backward``.

    Attributes:
        has_loss: whether a training loss was added.
        are_shared: whether ranks have exchanged losses.
        losses: training losses that rank 0 may not have: in a pipeline, only the last stage computes the loss.
    """

    def __init__(self, context: RunContext) -> None:
        self.has_loss = False
        self.are_shared = False
        self.losses = deque[Loss](maxlen=_MOST_LOSSES)
        self._context = context
        self._kept: dict[tuple[int, int], dict[str, Any]] = {}  # by iteration and logging step
        self._kept_since = 0.0
        self._loss_name = ""
        self._is_total = False
        self._loss_sum: torch.Tensor | None = None
        self._loss_count = 0
        self._last_loss: tuple[int, int, torch.Tensor] | None = None
        self._script_logs = False
        self._hook: BeforeCalls | None = None

    def add(self, iteration: int, logging_step: int, values: Mapping[str, Any]) -> None:
        if not self._kept:
            self._kept_since = time.monotonic()
        for name, value in values.items():
            if is_scalar(value):
                self.has_loss |= is_training_loss(str(name))
                step_values = self._kept.setdefault((iteration, logging_step), {})
                step_values[str(name)] = value.detach().clone() if isinstance(value, torch.Tensor) else value
            elif self._context.notices.first(f"scalar {name}"):
                shape = getattr(value, "shape", None)
                what = repr(value) if shape is None else f"a tensor of shape {tuple(shape)}"
                logger.warning("log(): %r must be a number or a one-element tensor, not %s. Skipped.", name, what)

    def exchange_losses(self) -> list[Scalars]:
        """Return the mean losses over the ranks that have one. All ranks must call this."""
        self.are_shared = True
        losses = list(self.losses)
        self.losses.clear()
        values_by_name = group_by_key(
            ((loss.iteration, loss.logging_step, loss.name), float(loss.value))
            for loss in self._context.ranks.pool(losses, "losses", Loss)
        )
        scalars = []
        for (iteration, logging_step, name), values in sorted(values_by_name.items()):
            scalars.append(Scalars(iteration, logging_step, {name: sum(values) / len(values)}))
        return scalars

    def take(self, *, at_once: bool) -> list[Scalars]:
        """Return the scalars since the last call.

        Scalars on a GPU are returned only now and then, since copying them in each step would wait for the device.

        Args:
            at_once: return them now.
        """
        logged = self._kept
        values = [value for step_values in logged.values() for value in step_values.values()]
        is_early = len(values) < _MOST_KEPT and time.monotonic() - self._kept_since < _LONGEST
        if is_early and not at_once and not all(map(is_on_host, values)):
            return []
        self._kept = {}
        scalars = []
        with self._context.failures.guard("reading", "the trainer metrics"):
            numbers = iter(to_floats(values))
            for (iteration, logging_step), step_values in logged.items():
                read = {name: next(numbers) for name in step_values}
                scalars.append(Scalars(iteration, logging_step, read))
                for name, number in () if self._context.ranks.leads else read.items():
                    if is_training_loss(name):
                        self.losses.append(Loss(own_rank(), iteration, logging_step, name, repr(number)))
        return scalars

    # ------------------------------------------------------------------ the loss of backward()

    def follow(self, owner: Any, name: str, *, total: bool) -> None:
        """Begin, unless another object is followed; see :meth:`InspectSession.follow`."""
        if self._hook is None:
            self._loss_name = name
            self._is_total = total
            self._hook = BeforeCalls(owner, "backward", self._note)

    def remove(self) -> None:
        if self._hook is not None:
            self._hook.remove()

    def log(self, iteration: int, logging_step: int, values: Mapping[str, Any]) -> None:
        """Add the scalars that the script logs."""
        self._script_logs |= self._loss_name in values
        self.add(iteration, logging_step, values)

    def end_step(self, iteration: int, logging_step: int) -> None:
        """End a step; record the loss of the step before, since a script may log its own loss after ``step()``."""
        self.record_loss()
        if self._loss_sum is not None:
            loss = self._loss_sum if self._is_total else self._loss_sum / self._loss_count
            self._last_loss = iteration, logging_step, loss
        self._loss_sum = None
        self._loss_count = 0

    def record_loss(self) -> None:
        """Record the loss of the last step, if the script does not log its loss."""
        if self._last_loss is not None and not self._script_logs:
            iteration, logging_step, loss = self._last_loss
            self.add(iteration, logging_step, {self._loss_name: loss})
        self._last_loss = None

    @outside_of_dynamo
    def _note(self, *losses: Any, **keywords: Any) -> None:
        # accelerator.backward(loss), fabric.backward(tensor, *args, model=None)
        loss = losses[0] if losses else keywords.get("loss", keywords.get("tensor"))
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or loss.is_complex() or is_capturing():
            return
        with self._context.failures.guard("reading", "the loss of backward()"):
            value = loss.detach().reshape(()).to(torch.float32, copy=True)
            self._loss_sum = (
                value if self._loss_sum is None else self._loss_sum + value.to(self._loss_sum.device, non_blocking=True)
            )
            self._loss_count += 1
