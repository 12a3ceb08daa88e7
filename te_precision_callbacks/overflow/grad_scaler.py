"""Listens to torch's GradScaler, which skips steps without calling an optimizer hook.

A scaler has no hooks, so ``scale``, ``unscale_`` and ``step`` of its class, and of subclasses that redefine them, are
wrapped while there is a listener. Read from torch 2.6 and 2.13 (``torch/amp/grad_scaler.py``,
``torch/distributed/fsdp/sharded_grad_scaler.py``): all scalers inherit ``step``, which skips the optimizer's step if
``unscale_`` has found an inf or nan, but always runs the step of an optimizer that skips by itself (fused ones).

The listeners are the only state of overflow detection at module level.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

from torch.amp.grad_scaler import GradScaler

from te_precision_callbacks.base.replaced import Replaced
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.overflow.journal import Journal


class Listener(Protocol):
    @property
    def journal(self) -> Journal | None:
        """The journal of a detector, else None."""

    def before_scaled_step(self, optimizer: Any) -> None:
        """Called before a scaler unscales an optimizer's gradients, or decides whether the optimizer steps."""


_listeners: list[weakref.ref[Listener]] = []
_seams = Replaced(yields=True)


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
        _seams.put_back()


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
    """Collects the optimizers stepped by a scaler, from :meth:`begin` to :meth:`remove`."""

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
        new, self._new = self._new, []
        return [optimizer for place in new if (optimizer := place()) is not None]
