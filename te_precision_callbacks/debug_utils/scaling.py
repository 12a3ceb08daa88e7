"""torch's GradScaler, whose skipped steps reach no hook of an optimizer.

A scaler has no hooks of its own, so ``scale``, ``unscale_`` and ``step`` of its class, and of those subclasses that
define them again, are wrapped while a detector is at work, and put back with the last one. Read from torch 2.6 and 2.13
(``torch/amp/grad_scaler.py``, ``torch/distributed/fsdp/sharded_grad_scaler.py``): ``step`` is inherited by all, leaves
the optimizer's step out where ``unscale_`` has found an inf or nan, and runs it in any case where the optimizer looks
after that itself (fused ones).
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
from torch.amp.grad_scaler import GradScaler

from te_precision_callbacks.forwards import outside_of_dynamo


class Listener(Protocol):
    """Who hears of a scaler that is enabled."""

    def loss_scaled_by(self, scale: torch.Tensor | None) -> None:
        """A loss was multiplied by ``scale``, one element on any device; None where the scaler does not show it."""

    def before_scaled_step(self, optimizer: Any) -> None:
        """The gradients of an optimizer are about to be looked at, unscaled, and stepped with or not."""


_listeners: dict[int, weakref.ref[Listener]] = {}
_keys = itertools.count()
_wrapped: list[tuple[type, str, Any, Any]] = []


class Listening:
    """A listener's place among those who hear of scalers; it does not keep the listener alive."""

    def __init__(self, listener: Listener) -> None:
        if not _listeners:
            _wrap()
        self._key = next(_keys)
        _listeners[self._key] = weakref.ref(listener)

    def remove(self) -> None:
        """Hear no more. Removing twice does nothing."""
        if _listeners.pop(self._key, None) is not None and not _listeners:
            _unwrap()


def _live() -> list[Listener]:
    return [listener for reference in list(_listeners.values()) if (listener := reference()) is not None]


@outside_of_dynamo
def _tell_of_scale(scaler: Any) -> None:
    if scaler.is_enabled():
        show = getattr(scaler, "_get_scale_async", None)  # get_scale() waits for the device
        scale = None if show is None else show()
        for listener in _live():
            listener.loss_scaled_by(scale)


@outside_of_dynamo
def _tell_of_step(scaler: Any, optimizer: Any) -> None:
    if scaler.is_enabled():
        for listener in _live():
            listener.before_scaled_step(optimizer)


def _scale(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def scale(scaler: Any, *args: Any, **keywords: Any) -> Any:
        scaled = own(scaler, *args, **keywords)
        _tell_of_scale(scaler)
        return scaled

    return scale


def _step(own: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(own)
    def step(scaler: Any, optimizer: Any, *args: Any, **keywords: Any) -> Any:
        _tell_of_step(scaler, optimizer)
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
                wrapped = wrapper(own)
                _wrapped.append((kind, name, own, wrapped))
                setattr(kind, name, wrapped)


def _unwrap() -> None:
    while _wrapped:
        kind, name, own, wrapped = _wrapped.pop()
        if vars(kind).get(name) is wrapped:  # otherwise somebody else has wrapped ours, which does nothing now
            setattr(kind, name, own)
