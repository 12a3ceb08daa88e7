"""Tracks the precision of resting layers (``watched.py``).

The precision follows from the state that the last forward of a step left in a module: FP8 or not, the quantizers, and
the dtype of the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch

from te_precision_callbacks.coverage.gemm_precision import Format
from te_precision_callbacks.coverage.model_watch import TrainingForward
from te_precision_callbacks.coverage.precision_audit import (
    LayerOperand,
    PrecisionAudit,
    formats_of_fused_path,
    select_fprop,
)
from te_precision_callbacks.layers.round_robin import RoundRobin
from te_precision_callbacks.te.state import last_forward


class RestingLayers:
    """Checks resting modules at the end of a step, and arms modules with a precision that was not seen before.

    Attributes:
        trained_in_fp8: id of a module -> whether its last training forward, while armed, ran in FP8.
        seen_in: the same -> the state that this forward has left; None if a feature acted, unlike in a resting module.
    """

    def __init__(self, audit: PrecisionAudit, query_again: Callable[[torch.nn.Module], None]) -> None:
        self._audit = audit
        self._query_again = query_again
        self.watch({}, {}, ())

    def watch(
        self,
        modules: Mapping[int, torch.nn.Module],
        layers: Mapping[int, tuple[str, ...]],
        refused: Collection[int],
    ) -> None:
        self._modules = modules
        self._layers = layers
        self._refused = refused
        self._last_state: dict[int, tuple[object, ...]] = {}
        self._ran: Mapping[int, set[TrainingForward]] | None = None
        self._new: list[torch.nn.Module] = []
        self.trained_in_fp8: dict[int, bool] = {}
        self.seen_in: dict[int, tuple[object, ...] | None] = {}
        self._trainable: dict[int, tuple[bool, ...]] = {}
        self._round_robin = RoundRobin(list(modules.values()))
        self._queried: dict[int, list[list[dict[LayerOperand, Format]]]] = {}

    def add(self, module: torch.nn.Module) -> None:
        self._new.append(module)

    def take_new(self, armed: Collection[int]) -> list[torch.nn.Module]:
        """Return the modules that rested for the first time in the last step, when ``armed`` were armed."""
        new = self._new
        self._new = []
        return [module for module in new if id(module) not in armed]

    def check_resting(
        self,
        iteration: int,
        armed: Collection[int],
        new: Collection[torch.nn.Module],
        ran: Mapping[int, set[TrainingForward]] | None,
        *,
        all_at_once: bool,
        excluded: bool,
    ) -> None:
        """Check for precision changes in the last step.

        A few modules are checked round robin, and all once one has changed, so an idle step costs the same for every
        model.

        Args:
            ran: module id -> its training forwards; None if unknown.
            excluded: whether modules now in high precision are in ``te.autocast(enabled=False)``.
        """
        self._audit.leave(iteration)
        checked: Iterable[torch.nn.Module] = self._round_robin.take(len(armed))
        self._check_trainable(checked)
        for module in new:
            self._record_first_rest(module)
        if new:
            self._audit.leave(iteration)
        self._ran = ran
        for module in self._changed_modules(new, armed):
            self._check_state(module, excluded=excluded)
        if all_at_once or self._changed_modules(checked, armed):
            for module in self._changed_modules(self._modules.values(), armed):
                self._check_state(module, excluded=excluded)

    def _changed_modules(self, checked: Iterable[torch.nn.Module], armed: Collection[int]) -> list[torch.nn.Module]:
        changed = []
        for module in checked:
            if id(module) not in armed:
                state = last_forward(module)
                if state is not None and state != self._last_state.get(id(module)):
                    changed.append(module)
        return changed

    def _record_first_rest(self, module: Any) -> None:
        """Record the precision of a module in its first resting step: FP8 or not, as in its last armed step."""
        key = id(module)
        state = last_forward(module)
        fp8 = self.trained_in_fp8.get(key)
        self._last_state.pop(key, None)
        if fp8 is None or state is None:
            return
        if module.fp8 == fp8:
            self._last_state[key] = state
        if state == self.seen_in.get(key):
            return
        formats = formats_of_fused_path(module, self._layers[key], fp8=fp8)
        if not self._audit.holds(formats):
            self._audit.plan(self._audit.select_running(formats))

    def _check_state(self, module: Any, *, excluded: bool) -> None:
        """Record a resting module's precision if it is new to the audit, and arm the module once per precision.

        The last forward may have been an evaluation, so only known training forwards count.
        """
        key = id(module)
        state = last_forward(module)
        if state is None:
            return
        self._last_state[key] = state
        ran = {(module.fp8, True)} if self._ran is None else self._ran.get(key, set())
        formats_by_forward = []
        for fp8, with_gradients in sorted(ran):
            formats = formats_of_fused_path(module, self._layers[key], fp8=fp8)
            formats_by_forward.append(formats if with_gradients else select_fprop(formats))
        if not any(with_gradients for _, with_gradients in ran) or all(map(self._audit.holds, formats_by_forward)):
            return
        for formats in formats_by_forward:
            self._audit.plan(self._audit.select_running(formats), excluded=excluded)
        if formats_by_forward not in self._queried.setdefault(key, []):
            self._queried[key].append(formats_by_forward)
            self._query_again(module)

    def _check_trainable(self, checked: Iterable[torch.nn.Module]) -> None:
        """Arm all modules if a parameter was frozen or unfrozen, which changes the GEMMs of a backward."""
        for module in checked:
            now = _trainable(module)
            if self._trainable.setdefault(id(module), now) != now:
                for other in self._modules.values():
                    self._trainable[id(other)] = _trainable(other)
                    self._query_again(other)


def _trainable(module: torch.nn.Module) -> tuple[bool, ...]:
    trainable: tuple[bool, ...] = ()
    for parameter in module._parameters.values():
        trainable += (parameter is not None and parameter.requires_grad,)
    return trainable
