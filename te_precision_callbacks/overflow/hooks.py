"""The watched modules of a model, and the hooks on them."""

from __future__ import annotations

import fnmatch
import functools
import logging
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from te_precision_callbacks.base.notices import Notices
from te_precision_callbacks.base.optimizers import held_ids
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.layers.forwards import outside_of_dynamo
from te_precision_callbacks.layers.naming import ModuleTree, compiled_call, is_wrapper, module_paths, parameters_of
from te_precision_callbacks.overflow.errors import OverflowDetectorError

logger = logging.getLogger(__name__)


def watched_modules(
    roots: Sequence[tuple[str, torch.nn.Module]],
) -> Iterator[tuple[str, torch.nn.Module]]:
    """Yield each watched module once, with its path, parents first.

    Wrappers, and their parts of paths, are skipped. Modules inside a compiled module are not watched.
    """
    known: set[int] = set()
    for prefix, root in roots:
        for path, module in module_paths(root, prefix, opaque=is_compiled):
            if id(module) not in known and (is_compiled(module) or not is_wrapper(module)):
                known.add(id(module))
                yield path, module


def is_compiled(module: torch.nn.Module) -> bool:
    if isinstance(module, torch.jit.ScriptModule) or compiled_call(module) is not None:
        return True
    return "OptimizedModule" in class_names(module)


def class_name(module: torch.nn.Module) -> str:
    module = getattr(module, "_orig_mod", module)
    names = class_names(module)
    if "FSDPModule" in names[:-1]:
        return names[names.index("FSDPModule") + 1]
    return names[0]


class WatchedModule:
    """A watched module; the calls of a root count batches."""

    __slots__ = ("__weakref__", "class_name", "handles", "is_root", "module", "path")

    def __init__(self, path: str, module: torch.nn.Module, *, is_root: bool) -> None:
        self.path = path
        self.class_name = class_name(module)
        self.module = module
        self.is_root = is_root
        self.handles: list[RemovableHandle] = []

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()


class _OverflowHook:
    """A hook of one module, which calls a method of the receiver; in a copy of the module it is a no-op."""

    __slots__ = ("_watched", "call")

    def __init__(self, call: Any, watched: WatchedModule) -> None:
        self.call = call
        self._watched = watched

    @outside_of_dynamo
    def __call__(self, module: torch.nn.Module, inputs: tuple[Any, ...], last: Any) -> None:
        self.call(self._watched, inputs, last)

    def __reduce__(self) -> tuple[object, ...]:
        return functools.partial, (ignore_call,)


def ignore_call(*args: Any) -> None:
    """The hook in a copy of a watched module."""


class ModelHooks:
    """All hooks of a detector on a model. An earlier detector on one of its modules is closed."""

    def __init__(
        self,
        roots: Sequence[tuple[str, torch.nn.Module]],
        receiver: Any,
        *,
        notices: Notices,
    ) -> None:
        self._roots = roots
        self._receiver = receiver
        self._watched: dict[int, WatchedModule] = {}
        self._parameters: dict[int, tuple[torch.Tensor, RemovableHandle]] = {}
        # Optimizer -> the number of parameters in each group, and whether it steps the model.
        self._optimizers: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[list[int], bool]] = (
            weakref.WeakKeyDictionary()
        )
        self._notices = notices
        hooks: list[object] = []
        for _, module in watched_modules(roots):
            hooks += module._forward_pre_hooks.values()
        for former in {hook.call.__self__ for hook in hooks if isinstance(hook, _OverflowHook)}:
            logger.warning("Activation overflow: this detector replaces another one on the same model.")
            former.close(OverflowDetectorError("Another detector replaced this one."))
        self._tree: ModuleTree | None = None
        self.synchronize()

    def synchronize(self) -> None:
        if self._tree is not None and not self._tree.has_changed():
            return
        self._optimizers.clear()
        modules = {id(module): (path, module) for path, module in watched_modules(self._roots)}
        for key in [key for key in self._watched if key not in modules]:
            self._watched.pop(key).remove()
        first = next(iter(modules), None)
        for key, (path, module) in modules.items():
            known = self._watched.get(key)
            if known is None:
                self._watched[key] = self._watch(path, module, is_root=key == first)
            else:
                known.path = path
                known.is_root = key == first
        self._watch_parameters()
        self._tree = ModuleTree([root for _, root in self._roots])
        self._warn_of_compiled()

    def matches(self, pattern: str) -> bool:
        return any(fnmatch.fnmatchcase(watched.path, pattern) for watched in self._watched.values())

    def steps(self, optimizer: Any) -> bool:
        if not isinstance(optimizer, torch.optim.Optimizer):  # a wrapper may have any __eq__ and __hash__
            return self._holds_parameter_of(optimizer)
        sizes = [len(group["params"]) for group in optimizer.param_groups]
        known = self._optimizers.get(optimizer)
        if known is None or known[0] != sizes:
            known = sizes, self._holds_parameter_of(optimizer)
            self._optimizers[optimizer] = known
        return known[1]

    def remove(self) -> None:
        for watched in self._watched.values():
            watched.remove()
        for _, handle in self._parameters.values():
            handle.remove()
        self._watched.clear()
        self._parameters.clear()

    def _holds_parameter_of(self, optimizer: Any) -> bool:
        parameters = parameters_of([root for _, root in self._roots])
        return not set(held_ids(optimizer)).isdisjoint(map(id, parameters))

    def _watch(self, path: str, module: torch.nn.Module, *, is_root: bool) -> WatchedModule:
        watched = WatchedModule(path, module, is_root=is_root)
        if not isinstance(module, torch.jit.ScriptModule):  # does not accept hooks
            watched.handles = [
                module.register_forward_pre_hook(_OverflowHook(self._receiver.enter, watched), with_kwargs=True),
                # Also called after an exception, to register the end of the call.
                module.register_forward_hook(_OverflowHook(self._receiver.leave, watched), always_call=True),
            ]
        return watched

    def _watch_parameters(self) -> None:
        parameters: dict[int, tuple[WatchedModule, str, torch.nn.Parameter]] = {}
        for watched in self._watched.values():
            for name, parameter in watched.module.named_parameters(recurse=is_compiled(watched.module)):
                parameters.setdefault(id(parameter), (watched, name, parameter))
        for key in [key for key in self._parameters if key not in parameters]:
            self._parameters.pop(key)[1].remove()
        for key, (watched, name, parameter) in parameters.items():
            if key not in self._parameters and parameter.requires_grad and parameter.is_leaf:
                call = functools.partial(_parameter_gradient, weakref.ref(self._receiver), weakref.ref(watched), name)
                handle = parameter.register_post_accumulate_grad_hook(call)  # type: ignore[no-untyped-call]
                self._parameters[key] = parameter, handle

    def _warn_of_compiled(self) -> None:
        opaque = [watched for watched in self._watched.values() if is_compiled(watched.module)]
        if opaque and self._notices.first("compiled"):
            first = f"{opaque[0].path or 'the model'} ({opaque[0].class_name})"
            more = f" and {len(opaque) - 1} more modules are" if len(opaque) > 1 else " is"
            logger.warning(
                "Activation overflow: %s%s compiled, so the modules inside are not watched. To watch them, run"
                " without torch.compile and TorchScript.",
                first,
                more,
            )


def _parameter_gradient(
    receiver: weakref.ref[Any], watched: weakref.ref[WatchedModule], name: str, parameter: torch.Tensor
) -> None:
    """The hook of a parameter, with weak references: the cycle collector does not visit hooks of parameters."""
    calls = receiver()
    module = watched()
    if calls is not None and module is not None:
        calls.parameter_gradient(module, name, parameter)
