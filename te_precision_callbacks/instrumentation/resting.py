"""The precision of layers in the steps in which nothing of the session runs in them.

The precision is read from the state that the last forward of a step has left in a module: whether it ran FP8, its
quantizers, and the type of its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.coverage.precision_audit import (
    LayerOperand,
    PrecisionAudit,
    formats_of_fused_path,
    of_fprop,
)
from te_precision_callbacks.coverage.precision_history import Format
from te_precision_callbacks.layers.forwards import ForwardClassifier
from te_precision_callbacks.layers.turns import Turns


class RestingLayers:
    """Looks at resting modules at the end of a step, and arms those whose precision is unknown.

    Args:
        classify: knows whether a front door says when it evaluates.
        audit: gets the precision in which a module ran.
        ask_again: arms a module for its next forward.
    """

    def __init__(
        self, classify: ForwardClassifier, audit: PrecisionAudit, ask_again: Callable[[torch.nn.Module], None]
    ) -> None:
        self._classify = classify
        self._audit = audit
        self._ask_again = ask_again
        self.watch({}, {}, ())

    def watch(
        self,
        modules: Mapping[int, torch.nn.Module],
        layers: Mapping[int, tuple[str, ...]],
        refused: Collection[int],
    ) -> None:
        """Begin afresh.

        Args:
            modules: id -> module.
            layers: id -> the names of its layers.
            refused: the ids of modules that must not take the debug path; may grow.
        """
        self._modules = modules
        self._layers = layers
        self._refused = refused
        self._last_state: dict[int, _State] = {}
        self._ran: Mapping[int, Collection[bool]] = {}
        self._new: list[torch.nn.Module] = []
        self._trained_in_fp8: dict[int, bool] = {}
        self._seen_in: dict[int, _State] = {}
        self._trainable: dict[int, tuple[bool, ...]] = {}
        self._turns = Turns(list(modules.values()))
        self._suspicions: dict[int, _Suspicion] = {}
        self._dropped: dict[int, list[Mapping[LayerOperand, Format]]] = {}

    def note_training(self, module: torch.nn.Module, *, idle: bool) -> None:
        """Note that a module is asked in a forward of training.

        Args:
            module: the module.
            idle: whether no feature acts in it, so that it runs as in a step in which it rests.
        """
        self._trained_in_fp8[id(module)] = bool(module.fp8)
        state = _state_of(module) if idle else None
        if state is None:
            self._seen_in.pop(id(module), None)
        else:
            self._seen_in[id(module)] = state

    def add(self, module: torch.nn.Module) -> None:
        """Note that a module rests from the next step on."""
        self._new.append(module)

    def take_new(self, armed: Collection[int]) -> list[torch.nn.Module]:
        """The modules that rested for the first time in the step that has ended.

        Args:
            armed: the ids of the modules that did not rest in the step.
        """
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
        """Look for changes of precision in a step that has ended.

        The modules that have their turn are looked at; all are as soon as one of those has changed. A step in which
        nothing is due thus costs the same for every model.

        Args:
            armed: the ids of the modules that did not rest in the step.
            new: the modules that rested for the first time in it.
            ran: id of a module -> whether its forwards of training ran in low precision, where these are known.
            all_at_once: whether all modules are looked at.
            excluded: whether those that are in high precision since the step are in ``te.autocast(enabled=False)``.
        """
        self._audit.leave(iteration)
        looked: Iterable[torch.nn.Module] = self._turns.take(len(armed))
        self._follow_trainable(looked)
        self._follow_suspicions()
        for module in new:
            self._enter(module)
        if new:
            self._audit.leave(iteration)
        self._ran = ran
        for module in self._moved(new, armed):
            self._look_at_state(module, iteration, excluded=excluded)
        if all_at_once or self._moved(looked, armed):
            for module in self._moved(self._modules.values(), armed):
                self._look_at_state(module, iteration, excluded=excluded)

    def _moved(self, looked: Iterable[torch.nn.Module], armed: Collection[int]) -> list[torch.nn.Module]:
        """The modules that rested, and that a forward has left in another state than when they were looked at."""
        states = self._last_state
        return [
            module
            for module in looked
            if not _is_in_state(module.__dict__, states.get(id(module)))
            and id(module) not in armed
            and module.__dict__["activation_dtype"] is not None
        ]

    def _enter(self, module: Any) -> None:
        """Record the precision of a module in its first step without a feature: FP8 or not, as in its last step with
        one."""
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

    def _look_at_state(self, module: torch.nn.Module, iteration: int, *, excluded: bool) -> None:
        """Notice that a resting module has run in a precision that the audit does not have.

        This is read from the state that the module's last forward has left. That forward may have been an evaluation
        that was not announced, so the precision is recorded only if the module is known to have trained. Otherwise the
        layer is asked in the next steps.
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
            # A forward before the last one has made FP8 quantizers, like the first forward of a reentrant checkpoint
            # that is recomputed outside autocast.
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
            self._ask_again(module)

    def _follow_trainable(self, looked: Iterable[torch.nn.Module]) -> None:
        """Ask all modules again if parameters of one were frozen or unfrozen, since this decides which GEMMs a
        backward runs."""
        for module in looked:
            now = _trainable(module)
            if self._trainable.setdefault(id(module), now) != now:
                for each in self._modules.values():
                    self._trainable[id(each)] = _trainable(each)
                    self._ask_again(each)

    def _follow_suspicions(self) -> None:
        """Keep asking the modules with suspected formats, until these occur in training."""
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
                self._ask_again(suspicion.module)

    def _has_trained(self, module: torch.nn.Module) -> bool:
        """Whether a module's last forward was a training forward, as far as this can be known afterwards."""
        ran = self._ran.get(id(module))
        if ran:
            return bool(module.fp8) in ran
        if not self._classify.eval_mode_counts and not self._classify.was_paused:
            return True  # the front door says when it evaluates
        quantizers: Any = module.quantizers
        # Transformer Engine asks for columnwise data, which wgrad reads, in forwards with gradients.
        return bool(module.training and module.fp8 and quantizers["scaling_fwd"][0].columnwise_usage)


@dataclass
class _Suspicion:
    """Formats in which a module may have run in an iteration, and how many more steps the module is asked."""

    module: torch.nn.Module
    formats: Mapping[LayerOperand, Format]
    iteration: int
    is_new: bool
    steps_left: int = 10


class _State(NamedTuple):
    """The state that decides the formats of a module's GEMMs, as left by its last forward."""

    fp8: bool
    quantizers: Any
    recipe: Any
    activation_dtype: torch.dtype


def _state_of(module: torch.nn.Module) -> _State | None:
    """None before the first forward."""
    attributes = module.__dict__
    if attributes["activation_dtype"] is None:
        return None
    quantizers, recipe = attributes["quantizers"]["scaling_fwd"], attributes["fp8_meta"].get("recipe")
    return _State(attributes["fp8"], quantizers, recipe, attributes["activation_dtype"])


def _trainable(module: torch.nn.Module) -> tuple[bool, ...]:
    return tuple([parameter is not None and parameter.requires_grad for parameter in module._parameters.values()])


def _is_in_state(attributes: Mapping[str, Any], state: _State | None) -> bool:
    """Whether a module is still in a state."""
    return (
        state is not None
        and attributes["fp8"] is state.fp8
        and attributes["activation_dtype"] is state.activation_dtype
        and attributes["quantizers"]["scaling_fwd"] is state.quantizers
        and (not state.fp8 or attributes["fp8_meta"]["recipe"] is state.recipe)
    )
