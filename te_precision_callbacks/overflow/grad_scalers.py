"""Torch's GradScaler: calls before it steps an optimizer, and the scale of the losses.

A scaler has no hooks, so ``unscale_`` and ``step`` of its class and direct subclasses are wrapped while there is a
listener. Read from torch 2.6 and 2.13 (``torch/amp/grad_scaler.py``,
``torch/distributed/fsdp/sharded_grad_scaler.py``): all scalers inherit ``step``, which skips the optimizer's step if
``unscale_`` has found an inf or nan, but always runs fused optimizers, which skip by themselves.
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

from torch.amp.grad_scaler import GradScaler

from te_precision_callbacks.base.replaced import Replacements

_listeners: list[weakref.WeakMethod[Callable[[Any], None]]] = []
_wrapped = Replacements(keeps_later=True)


def call_before_scaled_steps(before_step: Callable[[Any], None]) -> Callable[[], None]:
    """Call a method with an optimizer before an enabled scaler unscales its gradients, or steps it.

    Returns a function that ends it.

    Args:
        before_step: a bound method, which is weakly referenced.
    """
    if not _listeners:
        for kind in (GradScaler, *GradScaler.__subclasses__()):
            for name in {"unscale_", "step"} & vars(kind).keys():
                _wrapped.replace(kind, name, _after_listeners(vars(kind)[name]))
    listener = weakref.WeakMethod(before_step, _remove)
    _listeners.append(listener)
    return functools.partial(_remove, listener)


def largest_loss_scale() -> float | None:
    """Return the largest scale of the scalers that have scaled a loss; None without any. Waits for the device."""
    scalers = (candidate for candidate in gc.get_objects() if issubclass(type(candidate), GradScaler))
    scales = (scaler.get_scale() for scaler in scalers if scaler.is_enabled() and scaler._scale is not None)
    return max(scales, default=None)


def _after_listeners(scaler_step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(scaler_step)
    def method(scaler: Any, optimizer: Any, *arguments: Any, **keywords: Any) -> Any:
        if scaler.is_enabled():
            for listener in tuple(_listeners):
                if (before_step := listener()) is not None:
                    before_step(optimizer)
        return scaler_step(scaler, optimizer, *arguments, **keywords)

    return method


def _remove(listener: weakref.WeakMethod[Callable[[Any], None]]) -> None:
    if listener in _listeners:
        _listeners.remove(listener)
    if not _listeners:
        _wrapped.restore()
