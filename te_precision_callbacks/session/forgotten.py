"""Warns of a training loop that forgets ``step()`` or ``model.train()``, or calls ``step()`` more than once for a step
of the optimizer: iterations would be too few, evaluations, or too many."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.ranks import own_rank
from te_precision_callbacks.instrumentation.answers import MOST_FORWARDS
from te_precision_callbacks.layers.folding import in_sentence
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.session.loop import Loop

logger = logging.getLogger(__name__)

_ALIKE = 3
"""The optimizer steps in a row with the same number of further iterations after which a warning comes."""

_AGAIN = "step() is called again after each step of the optimizer"
_IN_MICRO_BATCHES = "step() is called after each micro-batch"

MOST_OPTIMIZER_STEPS = 10
"""The number of steps of one optimizer in one debug iteration at which the loop has probably forgotten to step."""

_REMEDIES: Mapping[str, str] = {
    "lightning": "Lightning has not counted these steps. In manual optimization, step the optimizers that"
    " self.optimizers() returns, or give the callback step_on='batch'.",
    "fabric": "Set the optimizer up with fabric.setup(model, optimizer) or fabric.setup_optimizers(optimizer). With"
    " step_on='batch', call fabric.call('on_train_batch_end') after each batch.",
    "accelerate": "Call debugger.step() after each batch, and step the optimizer that accelerator.prepare() has"
    " returned.",
    "transformers": "The training has not raised the event on_step_end after these steps.",
}
_REMEDY = "Call step() of the session after each step of the optimizer."


def is_in_evaluation(modules: Sequence[NamedModule]) -> bool:
    """Whether all modules are in evaluation mode; False where there are none."""
    return bool(modules) and not any(named.module.training for named in modules)


class ForgottenSteps:
    """Counts what runs between two calls of ``step()``, and warns once.

    Args:
        notices: the messages of the run that have been logged once.
        loop: the front door's facts about the training loop.
        is_of_model: whether an optimizer steps a parameter of the session's model.
        parameters: gives the parameters of the model.
        iteration: gives the debug iteration.

    Attributes:
        has_stepped: whether a step has ended.
    """

    def __init__(
        self,
        notices: Notices,
        loop: Loop,
        is_of_model: Callable[[torch.optim.Optimizer], bool],
        parameters: Callable[[], Iterable[torch.nn.Parameter]],
        iteration: Callable[[], int],
    ) -> None:
        self.has_stepped = False
        self._notices = notices
        self._loop = loop
        self._is_of_model = is_of_model
        self._parameters = parameters
        self._iteration = iteration
        self._steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()
        self._watched: weakref.ref[torch.nn.Parameter] | None = None
        self._gradient: object = None
        self._between: list[str] = []
        self._gaps: deque[tuple[str, ...]] = deque(maxlen=_ALIKE)

    @property
    def has_trained(self) -> bool:
        """Whether an optimizer of the model has stepped since the last ``step()``."""
        return any(self._is_of_model(optimizer) for optimizer in list(self._steps))

    def end_step(self, modules: Sequence[NamedModule], *, in_regions: bool) -> None:
        """Note that a debug iteration has ended; warn after the first one if the model is trained in evaluation mode.

        Args:
            modules: the modules that are observed.
            in_regions: whether the iteration has entered a region of ``te.autocast``.
        """
        if not self.has_stepped and is_in_evaluation(modules) and self.has_trained and own_rank() == 0:
            logger.warning(
                "The optimizer has stepped, but all observed layers are in evaluation mode (%s). Their forwards count"
                " as evaluations, so nothing is observed and no product is counted. Call model.train() before the"
                " training, or ignore this warning if the layers are meant to stay so.",
                in_sentence(*(named.name for named in modules), most=2),
            )
        if not (self._loop.trainer_steps or self._loop.counts_batches) and own_rank() == 0:
            self._check_further_steps(in_regions=in_regions)
        self.has_stepped = True
        self._steps.clear()

    def _check_further_steps(self, *, in_regions: bool) -> None:
        """Warn if each step of the optimizer has as many iterations that hold nothing, or a backward alone."""
        has_gradient = self._has_new_gradient(search=not self._steps)
        if not self._steps:
            self._between.append("backward" if has_gradient else "forward" if in_regions else "nothing")
            return
        self._gaps.append(tuple(self._between))
        self._between.clear()
        gap = self._gaps[-1]
        if list(self._gaps) != [gap] * _ALIKE or len(set(gap)) != 1 or gap[0] == "forward":
            return
        if self._notices.first("further steps"):
            nothing = gap[0] == "nothing"
            logger.warning(
                "%s: %d debug iterations for each step of the optimizer, so iterations and schedules count %d times as"
                " fast. Call it once, after the optimizer's step.%s",
                _AGAIN if nothing else _IN_MICRO_BATCHES,
                len(gap) + 1,
                len(gap) + 1,
                "" if nothing else " Ignore this warning if a micro-batch is to be an iteration.",
            )

    def _has_new_gradient(self, *, search: bool) -> bool:
        """Whether a gradient of the model has changed since the last call, by one of its parameters."""
        watched = None if self._watched is None else self._watched()
        if watched is None and search:
            watched = next((each for each in self._parameters() if each.grad is not None), None)
            self._watched = None if watched is None else weakref.ref(watched)
        before, gradient = self._gradient, None if watched is None else watched.grad
        self._gradient = None if gradient is None else (id(gradient), gradient._version)
        return gradient is not None and self._gradient != before

    def note(self, optimizer: torch.optim.Optimizer) -> None:
        """Count a step of an optimizer, and warn at the tenth."""
        count = self._steps[optimizer] = self._steps.get(optimizer, 0) + 1
        if count == MOST_OPTIMIZER_STEPS:
            self._say(optimizer, count, "Ignore this warning if one debug iteration is to hold so many of them.")

    def end(self) -> None:
        """Warn at the end of a run without any step, if an optimizer has stepped more than once."""
        if not self.has_stepped:
            for optimizer, count in list(self._steps.items()):
                if count > 1:
                    self._say(optimizer, count, "")

    def note_forwards(self, name: str) -> None:
        """Note that a module, which has this name, has run :data:`MOST_FORWARDS` training forwards."""
        if not self._loop.trainer_steps and own_rank() == 0 and self._notices.first("forgotten"):
            logger.warning(
                "%s has run %d forwards in training without a step(). A debug iteration lasts from step() to step(),"
                " called after each step of the optimizer: without it every forward belongs to iteration %d, and no"
                " statistics are logged. Ignore this warning if one optimizer step accumulates so many micro-batches.",
                name,
                MOST_FORWARDS,
                self._iteration(),
            )

    def _say(self, optimizer: torch.optim.Optimizer, count: int, ignored: str) -> None:
        if own_rank() == 0 and self._is_of_model(optimizer) and self._notices.first("forgotten"):
            logger.warning(
                "%s has stepped %d times without a step() of precision debugging, so all of that belongs to debug"
                " iteration %d. %s%s",
                type(optimizer).__name__,
                count,
                self._iteration(),
                _REMEDIES.get(self._loop.front_door, _REMEDY),
                f" {ignored}" if ignored else "",
            )
