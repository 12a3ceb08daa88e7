"""The modules that the session acts on: armed, resting, or refused.

A module is *armed* in iterations with a feature that may act on it. Otherwise it *rests*: it runs Transformer Engine's
own methods, without calling the session.
"""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from te_precision_callbacks.base.failures import ObservationFailures
from te_precision_callbacks.coverage.model_watch import TrainingForward
from te_precision_callbacks.coverage.precision_audit import PrecisionAudit
from te_precision_callbacks.instrumentation.resting_layers import RestingLayers
from te_precision_callbacks.instrumentation.upstream import reset_schedule
from te_precision_callbacks.layers.forwards import ForwardClassifier
from te_precision_callbacks.layers.naming import NamedModule
from te_precision_callbacks.statistics.schedule import Schedule
from te_precision_callbacks.te.modules import is_compiled_operator

LEAVES_GRAPHS = "te_precision_leaves_graphs"
"""Set in compiled ``te.Linear`` modules with features that need the debug path, which graphs do not have."""


class WatchedModules:
    """Arms modules, and lets them rest.

    Attributes:
        refused: ids of modules that the session does not act on.
        fused: id of a module observed on its fused path -> steps on the debug path, to change its precision.
    """

    def __init__(
        self,
        is_debug_iter: Callable[[Any], bool],
        classify: ForwardClassifier,
        audit: PrecisionAudit,
        failures: ObservationFailures,
    ) -> None:
        self.modules: dict[int, torch.nn.Module] = {}
        self.layers: dict[int, tuple[str, ...]] = {}
        self.names: dict[int, str] = {}
        self.fused: dict[int, tuple[Schedule, ...]] = {}
        self.armed: dict[int, torch.nn.Module] = {}
        self.resting = RestingLayers(audit, self.query_again)
        self._audit = audit
        self._is_debug_iter = is_debug_iter
        self._failures = failures
        self.refused: set[int] = set()
        self._to_arm: dict[int, dict[int, torch.nn.Module]] = {}

    def watch(
        self, modules: Sequence[NamedModule], refused: Iterable[int], fused: Mapping[int, tuple[Schedule, ...]]
    ) -> None:
        """Set the modules after :meth:`release`, without arming them; see :meth:`ForwardHooks.watch`."""
        self.modules = {id(named.module): named.module for named in modules}
        self.layers = {id(named.module): named.names for named in modules}
        self.names = {id(named.module): named.name for named in modules}
        self.fused = dict(fused)
        self.refused = set(refused).intersection(self.modules)
        self.resting.watch(self.modules, self.layers, self.refused)
        for key in self.refused:
            self.exclude(self.modules[key])

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
        self.armed.clear()
        self._to_arm.clear()
        self.modules = {}

    def arm_all(self) -> None:
        self._to_arm.clear()
        for module in self.modules.values():
            self.query_again(module)

    def rest_all(self) -> None:
        for module in list(self.armed.values()):
            self._rest(module)

    def begin(
        self, iteration: int, ran: Mapping[int, set[TrainingForward]] | None, *, all_at_once: bool, excluded: bool
    ) -> None:
        """Arm the modules with a feature that may act in an iteration; the others rest.

        Args:
            ran: see :meth:`RestingLayers.check_resting`.
            excluded: see :attr:`AutocastRegions.excludes_more`.
        """
        ended_iteration = iteration - 1
        was_armed = frozenset(self.armed)
        new_at_rest = self.resting.take_new(was_armed)
        upcoming = {key: module.__dict__["next_iter_when_debug_should_be_run"] for key, module in self.armed.items()}
        idle = [key for key, step in upcoming.items() if step is None or step > iteration]
        mixed = self._audit.newly_mixed(ended_iteration) if idle else set()
        for key in idle:
            module = self.armed[key]
            if not mixed.isdisjoint(self.layers[key]):
                self.query_again(module)  # whether the next step is so too cannot be told at rest
                continue
            self._rest(module)
            step = upcoming[key]
            if step is not None:
                self._to_arm.setdefault(step, {})[key] = module
        for module in self._to_arm.pop(iteration, {}).values():
            self._arm(module)
        with self._failures.guard("checking the precision of", f"iteration {ended_iteration}"):
            self.resting.check_resting(
                ended_iteration, was_armed, new_at_rest, ran, all_at_once=all_at_once, excluded=excluded
            )

    def query_again(self, module: torch.nn.Module) -> None:
        """Arm a module unless it is refused, so that its features are queried in its next forward."""
        if id(module) not in self.refused:
            reset_schedule(module)
            self._arm(module)

    def watch_again(self, module: torch.nn.Module, changed_steps: tuple[Schedule, ...] | None) -> None:
        """Watch a module again after :meth:`exclude`.

        Args:
            changed_steps: its previous value in ``fused``; None if it takes the debug path.
        """
        self.refused.discard(id(module))
        if changed_steps is not None:
            self.fused[id(module)] = changed_steps
        self.query_again(module)

    def exclude(self, module: torch.nn.Module) -> None:
        self.refused.add(id(module))
        self.fused.pop(id(module), None)
        self.armed.pop(id(module), None)
        module.__dict__.pop(LEAVES_GRAPHS, None)
        self._answer(module, _always_false(module))

    def _arm(self, module: torch.nn.Module) -> None:
        self.armed[id(module)] = module
        is_debug_iter = _ModuleIsDebugIter(self._is_debug_iter, module)
        self._answer(module, _always_false(module) if self.is_always_fused(module) else is_debug_iter)

    def _rest(self, module: torch.nn.Module) -> None:
        del self.armed[id(module)]
        self.resting.add(module)
        self._answer(module, _always_false(module))

    @staticmethod
    def _answer(module: torch.nn.Module, is_debug_iter: functools.partial[bool]) -> None:
        """Set a module's ``is_debug_iter``, except where ``torch.compile`` would compile again for each."""
        if not is_compiled_operator(module):
            module.__dict__["is_debug_iter"] = is_debug_iter


class _ModuleIsDebugIter(functools.partial):  # type: ignore[type-arg]
    """A watched module's ``is_debug_iter``, as fast as a method. A copy of the module is not watched."""

    def __deepcopy__(self, memo: dict[int, Any]) -> functools.partial[bool]:
        return functools.partial(_class_is_debug_iter, copy.deepcopy(self.args[0], memo))


def _always_false(module: torch.nn.Module) -> _ModuleIsDebugIter:
    """``is_debug_iter`` of a module that stays on its fused path: always False, without a Python call."""
    return _ModuleIsDebugIter(operator.is_, module, None)


def _class_is_debug_iter(module: Any) -> bool:
    return bool(type(module).is_debug_iter(module))
