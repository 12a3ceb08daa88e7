"""Triggers a check before each step of the model's optimizers, even if torch's GradScaler skips the step.

A scaler has no hooks, so ``scale``, ``unscale_`` and ``step`` of its class and subclasses are wrapped while there is a
listener, the only state of overflow detection at module level. Read from torch 2.6 and 2.13 (``torch/amp/
grad_scaler.py``, ``torch/distributed/fsdp/sharded_grad_scaler.py``): all scalers inherit ``step``, which skips the
optimizer's step if ``unscale_`` has found an inf or nan, but always runs fused optimizers, which skip by themselves.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler
from torch.optim.optimizer import register_optimizer_step_pre_hook

from te_precision_callbacks.base.optimizers import after_closure
from te_precision_callbacks.base.replaced import Replacements
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.overflow.checker import OverflowChecker
from te_precision_callbacks.overflow.hooks import ModelHooks
from te_precision_callbacks.overflow.journal import Journal

logger = logging.getLogger(__name__)

_FOREIGN_STEPS = 10
"""Steps of other optimizers after which to warn, if no optimizer of the model has stepped."""


class Listener(Protocol):
    @property
    def journal(self) -> Journal | None:
        """The journal, if the listener is a detector."""

    def before_scaled_step(self, optimizer: Any) -> None:
        """Called before a scaler unscales an optimizer's gradients or steps the optimizer."""


_listeners: list[weakref.ref[Listener]] = []
_seams = Replacements(keeps_later=True)


def listen(listener: Listener) -> Callable[[], object]:
    """Add a listener by weak reference; the returned function removes it."""
    if not _listeners:
        _wrap()
    place = weakref.ref(listener)
    _listeners.append(place)
    return weakref.finalize(listener, _remove, place)


def journals() -> list[Journal]:
    return [listener.journal for listener in _alive() if listener.journal is not None]


def _alive() -> list[Listener]:
    return [listener for place in tuple(_listeners) if (listener := place()) is not None]


def _remove(place: weakref.ref[Listener]) -> None:
    _listeners.remove(place)
    if not _listeners:
        _seams.restore()


@outside_of_dynamo
def _note_loss_scale(scaler: Any) -> None:
    if scaler.is_enabled():
        show = getattr(scaler, "_get_scale_async", None)  # get_scale() waits for the device
        scale = None if show is None else show()
        for journal in journals():
            journal.note_loss_scale(scale)


@outside_of_dynamo
def _notify_of_step(scaler: Any, optimizer: Any) -> None:
    if scaler.is_enabled():
        for listener in _alive():
            listener.before_scaled_step(optimizer)


def _scale(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def scale(scaler: Any, *args: Any, **keywords: Any) -> Any:
        scaled = own(scaler, *args, **keywords)
        _note_loss_scale(scaler)
        return scaled

    return scale


def _step(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def step(scaler: Any, optimizer: Any, *args: Any, **keywords: Any) -> Any:
        _notify_of_step(scaler, optimizer)
        return own(scaler, optimizer, *args, **keywords)

    return step


_WRAPPERS = {"scale": _scale, "unscale_": _step, "step": _step}


def _scalers(kind: type[GradScaler] = GradScaler) -> Iterator[type[GradScaler]]:
    yield kind
    for derived in kind.__subclasses__():
        yield from _scalers(derived)


def _wrap() -> None:
    for kind in dict.fromkeys(_scalers()):
        for name, wrapper in _WRAPPERS.items():
            own = vars(kind).get(name)
            if own is not None:
                _seams.replace(kind, name, wrapper(own))


class ScaledOptimizers:
    def __init__(self) -> None:
        self.journal = None
        self._new: list[weakref.ref[Any]] = []
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._end: Callable[[], object] | None = None

    def begin(self) -> None:
        if self._end is None:
            self._end = listen(self)

    def remove(self) -> None:
        if self._end is not None:
            self._end()

    def before_scaled_step(self, optimizer: Any) -> None:
        if optimizer not in self._known:
            self._known.add(optimizer)
            self._new.append(weakref.ref(optimizer))

    def take(self) -> list[Any]:
        new = self._new
        self._new = []
        return [optimizer for place in new if (optimizer := place()) is not None]


class Steps:
    """Checks before each step of an optimizer of the model, also with a GradScaler, which may skip the step.

    Attributes:
        journal: events since the last check.
    """

    def __init__(self, hooks: ModelHooks, journal: Journal, checker: OverflowChecker) -> None:
        self._hooks = hooks
        self.journal = journal
        self._checker = checker
        self._foreign_steps = 0
        # The hook of a collected detector stays and does nothing, since torch may be iterating over its hooks.
        self._step_hook = register_optimizer_step_pre_hook(_before_step_of(weakref.ref(self)))
        self._scaler_hook = listen(self)

    def remove(self) -> None:
        self._step_hook.remove()
        self._scaler_hook()

    def before_step(
        self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], keywords: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Check before an optimizer of the model steps; returns new arguments for ``step`` with a wrapped closure."""
        if self.journal.closed:
            return None
        if not self._is_ours(optimizer):
            self._count_foreign_step()
            return None
        # The checks before a scaler's step come first; an optimizer that gets a scaler skips the step itself.
        scales = any(isinstance(value, GradScaler) for value in (*args[1:], *keywords.values()))
        self._checker.check(may_be_skipped=scales)
        return after_closure(args, keywords, lambda: self._checker.check(may_be_skipped=False))

    def before_scaled_step(self, optimizer: Any) -> None:
        if not self.journal.closed and self._is_ours(optimizer):
            self._checker.check()

    def _is_ours(self, optimizer: Any) -> bool:
        try:
            return self._hooks.steps(optimizer)
        except Exception as error:
            self.journal.fail(error)
            return True  # other ranks may be waiting in their check

    def _count_foreign_step(self) -> None:
        if self._checker.has_looked or not self.journal.due:
            return
        self._foreign_steps += 1
        if self._foreign_steps >= _FOREIGN_STEPS and self.journal.notices.first("foreign steps"):
            logger.warning(
                "Activation overflow: optimizers without parameters of the model made %d unchecked steps. If they"
                " update copies of the parameters (DeepSpeed ZeRO, Megatron's distributed optimizer), call"
                " detector.check() before each of their steps.",
                _FOREIGN_STEPS,
            )


def _before_step_of(steps: weakref.ref[Steps]) -> Any:
    """Return the hook of all optimizers of the process, which does not keep the detector and the model alive."""

    @outside_of_dynamo
    def before_step(optimizer: torch.optim.Optimizer, args: Any, keywords: Any) -> Any:
        alive = steps()
        if alive is None:
            return None
        return alive.before_step(optimizer, args, keywords)

    return before_step
