"""The modules that the session acts on.

A module is *due* when a feature may act on it: Transformer Engine keeps the next iteration in its
``next_iter_when_debug_should_be_run``.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.instrumentation.upstream import reset_schedule
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.te.modules import is_compiled_operator

LEAVES_GRAPHS = "te_precision_leaves_graphs"
"""Set in compiled ``te.Linear`` modules with features that need the debug path, which graphs do not have."""

_NEVER = float("inf")


class WatchedModules:
    """The modules that the session acts on, and which of them are due.

    Attributes:
        refused: ids of modules that the session does not act on.
        fused: id of a module observed on its fused path -> steps on the debug path, to change its precision.
        due: id of a module with a feature that may act in this iteration -> the module.
    """

    def __init__(self, is_debug_iter: Callable[[Any], bool]) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self.layers: dict[int, tuple[str, ...]] = {}
        self.names: dict[int, str] = {}
        self.fused: dict[int, tuple[Schedule, ...]] = {}
        self.due: dict[int, torch.nn.Module] = {}
        self._is_debug_iter = is_debug_iter
        self.refused: set[int] = set()
        self._next: float = 0  # the next iteration in which a module is due

    def watch(
        self, modules: Sequence[NamedModule], refused: Iterable[int], fused: Mapping[int, tuple[Schedule, ...]]
    ) -> None:
        """Set the modules, after :meth:`release`; see :meth:`ForwardHooks.watch`."""
        self.modules = {id(named.module): named.module for named in modules}
        self.layers = {id(named.module): named.names for named in modules}
        self.names = {id(named.module): named.name for named in modules}
        self.fused = dict(fused)
        self.refused = set(refused).intersection(self.modules)
        for key in self.refused:
            self.exclude(self.modules[key])
        self.query_all()

    def leave_graphs(self, acting: Mapping[int, Sequence[str]]) -> None:
        """Set :data:`LEAVES_GRAPHS`; ``acting``: id of a module -> its layers with features."""
        for key, layers in acting.items():
            on_fused_path = key in self.fused and not self.fused[key]
            if layers and not on_fused_path and key not in self.refused and is_compiled_operator(self.modules[key]):
                self.modules[key].__dict__[LEAVES_GRAPHS] = True

    def is_always_fused(self, module: torch.nn.Module) -> bool:
        return self.fused.get(id(module)) == ()

    def is_on_fused_path(self, module: torch.nn.Module, iteration: int) -> bool:
        changed = self.fused.get(id(module))
        if not changed:
            return changed is not None
        return not any(schedule.at(iteration)[0] for schedule in changed)

    def release(self) -> None:
        for module in self.modules.values():
            module.__dict__.pop("is_debug_iter", None)
            module.__dict__.pop(LEAVES_GRAPHS, None)
        self.due = {}
        self.modules = {}

    def query_all(self) -> None:
        """Query the features of all modules in their next forwards."""
        self.due = {key: module for key, module in self.modules.items() if key not in self.refused}
        for module in self.due.values():
            reset_schedule(module)
            self._answer(module)

    def query_none(self) -> None:
        due = self.due
        self.due = {}
        for module in due.values():
            self._answer(module)

    def begin(self, iteration: int) -> None:
        """Find the modules that are due in an iteration; without a look at each, if none can be."""
        if not self.due and iteration < self._next:
            return
        former_due = self.due
        self.due = {}
        self._next = _NEVER
        for key, module in self.modules.items():
            step = module.__dict__["next_iter_when_debug_should_be_run"]
            is_due = step is not None and step <= iteration and key not in self.refused
            if is_due:
                self.due[key] = module
            elif step is not None:
                self._next = min(step, self._next)
            if is_due is not (key in former_due):
                self._answer(module)

    def watch_again(self, module: torch.nn.Module, changed_steps: tuple[Schedule, ...] | None) -> None:
        """Watch a module again after :meth:`exclude`.

        Args:
            changed_steps: its previous value in ``fused``; None if it takes the debug path.
        """
        self.refused.discard(id(module))
        if changed_steps is not None:
            self.fused[id(module)] = changed_steps
        reset_schedule(module)
        self.due[id(module)] = module
        self._answer(module)

    def exclude(self, module: torch.nn.Module) -> None:
        self.refused.add(id(module))
        self.fused.pop(id(module), None)
        self.due.pop(id(module), None)
        module.__dict__.pop(LEAVES_GRAPHS, None)
        self._answer(module)

    def _answer(self, module: torch.nn.Module) -> None:
        """Set a module's ``is_debug_iter``, except where ``torch.compile`` would compile again for each."""
        if not is_compiled_operator(module):
            is_asked = id(module) in self.due and not self.is_always_fused(module)
            # operator.is_ answers False without a Python call
            answer = (self._is_debug_iter, module) if is_asked else (operator.is_, module, None)
            module.__dict__["is_debug_iter"] = _ModuleIsDebugIter(*answer)


class _ModuleIsDebugIter(functools.partial):  # type: ignore[type-arg]
    """A watched module's ``is_debug_iter``, as fast as a method. A copy of the module is not watched."""

    def __deepcopy__(self, memo: dict[int, Any]) -> functools.partial[bool]:
        return functools.partial(_class_is_debug_iter, copy.deepcopy(self.args[0], memo))


def _class_is_debug_iter(module: Any) -> bool:
    return bool(type(module).is_debug_iter(module))
