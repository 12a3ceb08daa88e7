"""The precision of layers in the steps in which nothing of the session runs in them.

The formats follow from the training forwards of a step and the state that its last forward has left in a module: its
quantizers, its recipe, and the type of its activations.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

import torch

from te_precision_callbacks.coverage.model_watch import Ran
from te_precision_callbacks.coverage.precision_audit import PrecisionAudit, formats_of_fused_path, of_fprop
from te_precision_callbacks.layers.turns import Turns


class RestingLayers:
    """Checks resting modules at the end of a step, and arms those whose precision has changed.

    Args:
        audit: receives the precision in which a module ran.
        ask_again: arms a module for its next forward.
    """

    def __init__(self, audit: PrecisionAudit, ask_again: Callable[[torch.nn.Module], None]) -> None:
        self._audit = audit
        self._ask_again = ask_again
        self.watch({}, {})

    def watch(self, modules: Mapping[int, torch.nn.Module], layers: Mapping[int, tuple[str, ...]]) -> None:
        """Begin afresh.

        Args:
            modules: id -> module.
            layers: id -> the names of its layers.
        """
        self._modules = modules
        self._layers = layers
        self._last_state: dict[int, _State] = {}
        self._new: list[torch.nn.Module] = []
        self._trainable: dict[int, tuple[bool, ...]] = {}
        self._turns = Turns(list(modules.values()))

    def add(self, module: torch.nn.Module) -> None:
        """Note that a module rests from the next step on."""
        self._last_state.pop(id(module), None)
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
        ran: Mapping[int, Ran],
        *,
        all_at_once: bool,
        excluded: bool,
    ) -> None:
        """Record changes of precision in a step that has ended.

        The modules that have their turn are checked; all are as soon as one of those has changed. A step in which
        nothing is due thus costs the same for every model.

        Args:
            armed: the ids of the modules that did not rest in the step.
            new: the modules that rested for the first time in it.
            ran: id of a module -> its training forwards in the step.
            all_at_once: whether all modules are checked.
            excluded: whether those that are in high precision since the step are in ``te.autocast(enabled=False)``.
        """
        self._audit.leave(iteration)
        looked: Iterable[torch.nn.Module] = self._turns.take(len(armed))
        self._follow_trainable(looked)
        for module in self._moved(new, armed, ran):
            if id(module) in ran:
                self._record(module, ran, excluded=excluded)
            else:
                self._new.append(module)
        if all_at_once or self._moved(looked, armed, ran):
            for module in self._moved(self._modules.values(), armed, ran):
                if self._record(module, ran, excluded=excluded):
                    self._ask_again(module)

    def _moved(
        self, looked: Iterable[torch.nn.Module], armed: Collection[int], ran: Mapping[int, Ran]
    ) -> list[torch.nn.Module]:
        """The modules that rested, and have run otherwise than when they were checked last."""
        return [
            module
            for module in looked
            if not _is_in_state(module.__dict__, ran.get(id(module)), self._last_state.get(id(module)))
            and id(module) not in armed
            and module.__dict__["activation_dtype"] is not None
        ]

    def _record(self, module: Any, ran: Mapping[int, Ran], *, excluded: bool) -> bool:
        """Record the precision of a module's training forwards. Returns whether it is another one, or unknown."""
        attributes, forwards = module.__dict__, ran.get(id(module))
        quantizers, recipe = attributes["quantizers"]["scaling_fwd"], attributes["fp8_meta"].get("recipe")
        self._last_state[id(module)] = _State(forwards, quantizers, recipe, attributes["activation_dtype"])
        if forwards is None:
            return True  # an evaluation alone, or a forward that was not called as a module
        found = []
        for fp8, has_gradients in sorted(forwards):
            formats = formats_of_fused_path(module, self._layers[id(module)], fp8=fp8)
            found.append(formats if has_gradients else of_fprop(formats))
        if all(map(self._audit.holds, found)):
            return False
        for formats in found:
            self._audit.plan(self._audit.of_gemms_that_run(formats), excluded=excluded)
        return True

    def _follow_trainable(self, looked: Iterable[torch.nn.Module]) -> None:
        """Ask all modules again if parameters of one were frozen or unfrozen, since this decides which GEMMs a
        backward runs."""
        for module in looked:
            now = _trainable(module)
            if self._trainable.setdefault(id(module), now) != now:
                for each in self._modules.values():
                    self._trainable[id(each)] = _trainable(each)
                    self._ask_again(each)


class _State(NamedTuple):
    """The training forwards of a module in a step, and the state that decides the formats of its GEMMs."""

    ran: Ran | None
    quantizers: Any
    recipe: Any
    activation_dtype: torch.dtype


def _trainable(module: torch.nn.Module) -> tuple[bool, ...]:
    return tuple([parameter is not None and parameter.requires_grad for parameter in module._parameters.values()])


def _is_in_state(attributes: Mapping[str, Any], ran: Ran | None, state: _State | None) -> bool:
    """Whether a module is still in a state; a module that has not trained in a step keeps its last forwards."""
    return (
        state is not None
        and ran in (None, state.ran)
        and attributes["activation_dtype"] is state.activation_dtype
        and attributes["quantizers"]["scaling_fwd"] is state.quantizers
        and (not attributes["fp8"] or attributes["fp8_meta"]["recipe"] is state.recipe)
    )
