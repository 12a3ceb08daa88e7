"""Observes torch's clipping of the gradient norm, also where a script or trainer has imported it by name.

Read from torch 2.6 to 2.13, ``nn/utils/clip_grad.py``: ``clip_grad_norm_`` calls ``_clip_grads_with_norm_``, which
is public as ``clip_grads_with_norm_``.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch.nn.utils import clip_grad

from te_precision_callbacks.base.devices import is_capturing
from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.base.replaced import Replacements
from te_precision_callbacks.statistics.names import CLIPPED_NORM, CLIPPING_LIMIT


class ClippingWatch:
    """Keeps the gradient norm and the limit of a step's largest clipping, until :meth:`take`.

    Attributes:
        norm: the norm that was taken last; None if that step had no clipping.

    Args:
        before_clipping: called with the parameters before their gradients are scaled.
    """

    def __init__(self, before_clipping: Callable[[list[torch.Tensor]], None], failures: ObservationFailures) -> None:
        self._before = before_clipping
        self._failures = failures
        self.norm: torch.Tensor | None = None
        self._scalars: dict[str, Any] = {}
        self._clipped = 0
        self._replaced = Replacements(keeps_later=True)

    def begin(self) -> None:
        if self._replaced:
            return
        for owner, name in ((clip_grad, "_clip_grads_with_norm_"), (torch.nn.utils, "clip_grads_with_norm_")):
            if hasattr(owner, name):
                self._replaced.wrap(owner, name, self._observed)

    def remove(self) -> None:
        self._replaced.restore()
        self._scalars = {}

    def take(self) -> Mapping[str, Any]:
        scalars = self._scalars
        self.norm = scalars.get(CLIPPED_NORM)
        self._scalars = {}
        self._clipped = 0
        return scalars

    def _observed(self, original: Callable[..., Any]) -> Callable[..., Any]:
        weak_note = weakref.WeakMethod(self._note)

        @functools.wraps(original)
        def clip(parameters: Any, max_norm: float, total_norm: torch.Tensor, *args: Any, **keywords: Any) -> Any:
            if not torch.compiler.is_compiling() and not is_capturing():
                parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
                note = weak_note()
                if note is not None:
                    note(parameters, max_norm, total_norm)
            return original(parameters, max_norm, total_norm, *args, **keywords)

        return clip

    @torch.no_grad()
    def _note(self, parameters: Iterable[torch.Tensor], limit: Any, norm: Any) -> None:
        with self._failures.guard("observing", "the clipping of gradients"):
            clipped = [parameter for parameter in parameters if parameter.grad is not None]
            self._before(clipped)
            if len(clipped) > self._clipped and type(norm) is torch.Tensor:  # the norm of DTensors needs a collective
                self._clipped = len(clipped)
                self._scalars = {CLIPPED_NORM: norm.detach().clone(), CLIPPING_LIMIT: limit}
