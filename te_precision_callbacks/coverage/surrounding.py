"""What stands around the call of one module, and not around those of its copies."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class CallOfOneModule:
    """The ``_compiled_call_impl`` of a module; a copy of the module has none."""

    def __init__(self, call: Callable[..., Any]) -> None:
        functools.update_wrapper(self, call)
        self._call = call

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._call(*arguments, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()


class TrainingStepOfOneModule(CallOfOneModule):
    """The ``training_step`` of a module; a copy of the module has its class's."""

    def __init__(self, call: Callable[..., Any], module: Any) -> None:
        super().__init__(call)
        self._module = module

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial, (_training_step_of_its_class, self._module)


def _training_step_of_its_class(module: Any, *arguments: Any, **keywords: Any) -> Any:
    return type(module).training_step(module, *arguments, **keywords)
