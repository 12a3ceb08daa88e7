"""Tracks the precision of resting layers.

Read from the state that a step's last forward left in a module: FP8 or not, its quantizers, and the dtype of its
activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.coverage.gemm_precision import Format
from te_precision_callbacks.coverage.precision_audit import (
    LayerOperand,
    PrecisionAudit,
    formats_of_fused_path,
    of_fprop,
)
from te_precision_callbacks.layers.forwards import ForwardClassifier
from te_precision_callbacks.layers.round_robin import RoundRobin


class RestingLayers:
    """Checks resting modules at the end of a step; arms those with unknown precision."""

    def __init__(
        self, classify: ForwardClassifier, audit: PrecisionAudit, query_again: Callable[[torch.nn.Module], None]
    ) -> None:
        self._classify = classify
        self._audit = audit
        self._query_again = query_again
        self.watch({}, {}, ())

    def watch(
        self,
        modules: Mapping[int, torch.nn.Module],
        layers: Mapping[int, tuple[str, ...]],
        refused: Collection[int],
    ) -> None:
        """Reset, and set the modules and their layers' names by id; ``refused`` may grow."""
        self._modules = modules
        self._layers = layers
        self._refused = refused
        self._last_state: dict[int, _State] = {}
        self._ran: Mapping[int, Collection[bool]] = {}
        self._new: list[torch.nn.Module] = []
        self._trained_in_fp8: dict[int, bool] = {}
        self._seen_in: dict[int, _State] = {}
        self._trainable: dict[int, tuple[bool, ...]] = {}
        self._turns = RoundRobin(list(modules.values()))
        self._suspicions: dict[int, _Suspicion] = {}
        self._dropped: dict[int, list[Mapping[LayerOperand, Format]]] = {}

    def note_training(self, module: torch.nn.Module, *, idle: bool) -> None:
        """Note a training forward of an armed module; ``idle`` if no feature acts in it, so it runs as if resting."""
        self._trained_in_fp8[id(module)] = bool(module.fp8)
        state = _state_of(module) if idle else None
        if state is None:
            self._seen_in.pop(id(module), None)
        else:
            self._seen_in[id(module)] = state

    def add(self, module: torch.nn.Module) -> None:
        """It rests from the next step on."""
        self._new.append(module)

    def take_new(self, armed: Collection[int]) -> list[torch.nn.Module]:
        """Return the modules that rested for the first time in the last step, when ``armed`` did not rest."""
        new, self._new = self._new, []
        return [module for module in new if id(module) not in armed]

    def follow(
        self,
        iteration: int,
        armed: Collection[int],
        new: Collection[torch.nn.Module],
        ran: Mapping[int, Collection[bool]],
        *,
        all_at_once: bool,
        excluded: bool,
    ) -> None:
        """Check for precision changes in the last step.

        A few modules are checked round robin, and all once one has changed, so an idle step costs the same for every
        model.

        Args:
            ran: module id -> whether its training forwards ran in low precision, if known.
            excluded: whether modules now in high precision are in ``te.autocast(enabled=False)``.
        """
        self._audit.leave(iteration)
        checked: Iterable[torch.nn.Module] = self._turns.take(len(armed))
        self._follow_trainable(checked)
        self._follow_suspicions()
        for module in new:
            self._enter(module)
        if new:
            self._audit.leave(iteration)
        self._ran = ran
        for module in self._moved(new, armed):
            self._check_state(module, iteration, excluded=excluded)
        if all_at_once or self._moved(checked, armed):
            for module in self._moved(self._modules.values(), armed):
                self._check_state(module, iteration, excluded=excluded)

    def _moved(self, checked: Iterable[torch.nn.Module], armed: Collection[int]) -> list[torch.nn.Module]:
        states = self._last_state
        return [
            module
            for module in checked
            if not _is_in_state(module.__dict__, states.get(id(module)))
            and id(module) not in armed
            and module.__dict__["activation_dtype"] is not None
        ]

    def _enter(self, module: Any) -> None:
        """Record the precision of a module in its first resting step: FP8 or not, as in its last armed step."""
        key, state = id(module), _state_of(module)
        fp8 = self._trained_in_fp8.get(key)
        self._last_state.pop(key, None)
        if fp8 is None or state is None:
            return
        if state.fp8 == fp8:
            self._last_state[key] = state
        if _is_in_state(module.__dict__, self._seen_in.get(key)):
            return
        formats = formats_of_fused_path(module, self._layers[key], fp8=fp8)
        if not self._audit.holds(formats):
            self._audit.plan(self._audit.of_gemms_that_run(formats))

    def _check_state(self, module: torch.nn.Module, iteration: int, *, excluded: bool) -> None:
        """Record a resting module's precision that the audit lacks.

        The last forward may have been an unannounced evaluation, so a module not known to have trained is armed in the
        next steps instead.
        """
        key = id(module)
        last, state = self._last_state.get(key), _state_of(module)
        if state is None:
            return
        self._last_state[key] = state
        formats = formats_of_fused_path(module, self._layers[key], fp8=bool(module.fp8))
        trained = self._has_trained(module)
        if self._audit.holds(formats):
            if module.fp8 or last is None or last.quantizers is state.quantizers:
                return
            # An earlier forward created FP8 quantizers, such as the first forward of a reentrant checkpoint that is
            # recomputed outside autocast.
            formats, trained = of_fprop(formats_of_fused_path(module, self._layers[key], fp8=True)), False
            if self._audit.has_met(formats):
                return
        if formats in self._dropped.get(key, ()):
            return
        is_new = not self._audit.has_met(formats)
        if trained or key in self._refused:
            self._audit.plan(self._audit.of_gemms_that_run(formats), excluded=excluded)
        else:
            self._audit.doubt(formats, iteration, excluded=excluded)
        if key not in self._refused and (is_new or not trained):
            self._suspicions[key] = _Suspicion(module, formats, iteration, is_new)
            self._query_again(module)

    def _follow_trainable(self, checked: Iterable[torch.nn.Module]) -> None:
        """Arm all modules if parameters of one were frozen or unfrozen, which changes the GEMMs of a backward."""
        for module in checked:
            now = _trainable(module)
            if self._trainable.setdefault(id(module), now) != now:
                for each in self._modules.values():
                    self._trainable[id(each)] = _trainable(each)
                    self._query_again(each)

    def _follow_suspicions(self) -> None:
        """Keep modules with suspected formats armed until the formats occur in training."""
        for key, suspicion in list(self._suspicions.items()):
            suspicion.steps_left -= 1
            if self._audit.holds(suspicion.formats) or (suspicion.is_new and self._audit.has_met(suspicion.formats)):
                del self._suspicions[key]
                if key not in self._dropped:
                    self._audit.trust(suspicion.formats, suspicion.iteration)
            elif suspicion.steps_left == 0:
                del self._suspicions[key]
                self._dropped.setdefault(key, []).append(suspicion.formats)
            else:
                self._query_again(suspicion.module)

    def _has_trained(self, module: torch.nn.Module) -> bool:
        """Return whether a module's last forward was a training forward, as far as its state shows."""
        ran = self._ran.get(id(module))
        if ran:
            return bool(module.fp8) in ran
        if not self._classify.eval_mode_counts and not self._classify.was_paused:
            return True  # the integration announces evaluations
        quantizers: Any = module.quantizers
        # TE requests columnwise data, which wgrad reads, in forwards with gradients.
        return bool(module.training and module.fp8 and quantizers["scaling_fwd"][0].columnwise_usage)


@dataclass
class _Suspicion:
    """Formats that a module may have used in an iteration, and the number of further steps to arm it."""

    module: torch.nn.Module
    formats: Mapping[LayerOperand, Format]
    iteration: int
    is_new: bool
    steps_left: int = 10


class _State(NamedTuple):
    fp8: bool
    quantizers: Any
    recipe: Any
    activation_dtype: torch.dtype


def _state_of(module: torch.nn.Module) -> _State | None:
    """Return None before the first forward."""
    attributes = module.__dict__
    if attributes["activation_dtype"] is None:
        return None
    quantizers, recipe = attributes["quantizers"]["scaling_fwd"], attributes["fp8_meta"].get("recipe")
    return _State(attributes["fp8"], quantizers, recipe, attributes["activation_dtype"])


def _trainable(module: torch.nn.Module) -> tuple[bool, ...]:
    return tuple([parameter is not None and parameter.requires_grad for parameter in module._parameters.values()])


def _is_in_state(attributes: Mapping[str, Any], state: _State | None) -> bool:
    return (
        state is not None
        and attributes["fp8"] is state.fp8
        and attributes["activation_dtype"] is state.activation_dtype
        and attributes["quantizers"]["scaling_fwd"] is state.quantizers
        and (not state.fp8 or attributes["fp8_meta"]["recipe"] is state.recipe)
    )
