"""A dispatch mode that reports torch's operators without affecting training.

An operator runs exactly once, whatever happens in the watch. Exceptions of operators pass through. Read from torch
2.13: ``TorchDispatchMode.ignore_compile_internals``, which lets ``torch.compile`` compile under the mode;
``supports_higher_order_operators``, without which an operator such as ``flex_attention`` raises; and
``_get_current_dispatch_mode_stack``, ``_get_current_dispatch_mode``, ``_pop_mode_temporarily`` and
``torch._C._len_torch_dispatch_stack``. The backward engine uses the modes of the calling thread in its own threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    _pop_mode_temporarily,
)

from te_precision_callbacks.layers.forwards import outside_of_dynamo

if TYPE_CHECKING:
    from te_precision_callbacks.coverage.model_watch import ModelWatch


class SeeingMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Reports each operator to the watch of a model.

    Args:
        watcher: the watch.
        is_over: whether the watch wants no more calls.
        only: the operators to report; None for all.
    """

    supports_higher_order_operators = True

    def __init__(self, watcher: ModelWatch, is_over: Callable[[], bool], *, only: Iterable[str] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watcher = watcher
        self._is_over = is_over
        self._only = None if only is None else frozenset(only)

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __torch_dispatch__(
        self, operator: Any, types: Iterable[type], arguments: Sequence[Any] = (), keywords: Any = None
    ) -> Any:
        name = self._enter(operator, types, arguments)
        if name is NotImplemented:
            return NotImplemented  # a DTensor's runs operators on its shards, which are reported
        result = operator(*arguments, **(keywords or {}))
        if name is not None:
            self._leave(name, arguments, result)
        return result

    @outside_of_dynamo
    def _leave(self, name: str, arguments: Sequence[Any], result: Any) -> None:
        try:
            self.watcher.after(name, arguments, result)
        except Exception as error:
            self.watcher.fail(error)

    @outside_of_dynamo
    def _enter(self, operator: Any, types: Iterable[type], arguments: Sequence[Any]) -> Any:
        """The name of an operator to report; None if it only runs, NotImplemented if others do its work."""
        if self._is_over():
            return None
        try:
            kinds = {kind.__name__ for kind in types}
            of_shards = "DTensor" in kinds
            name = NotImplemented if of_shards else _name_of(operator)
            if "FakeTensor" in kinds or (self._only is not None and name not in self._only):
                return NotImplemented if of_shards else None  # by a FakeTensor, a DTensor learns the shape of a result
            if self._only is None:
                by_values = _goes_by_values(operator, arguments)
                self.watcher.before(arguments, of_shards=of_shards, by_values=by_values)
        except Exception as error:
            self.watcher.fail(error)
            return None
        return name


def is_seen_by(watcher: ModelWatch) -> bool:
    """Return whether a watch receives all operators of this thread."""
    modes = _get_current_dispatch_mode_stack()
    return any(isinstance(mode, SeeingMode) and mode.watcher is watcher and mode._only is None for mode in modes)


modes_are_active: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""The number of dispatch modes of this thread. Not a Python function, since it is called before each GEMM."""


@contextmanager
def unseen() -> Iterator[None]:
    """Report no operator of this thread, unless the script has entered a mode later."""
    if isinstance(_get_current_dispatch_mode(), SeeingMode):
        with _pop_mode_temporarily():
            yield
    else:
        yield


def _goes_by_values(operator: Any, arguments: Sequence[Any]) -> bool:
    if torch.Tag.dynamic_output_shape not in getattr(operator, "tags", ()):
        return False
    if operator is not torch.ops.aten.index.Tensor:
        return True
    return any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in arguments[1])


def _name_of(operator: Any) -> str:
    if isinstance(operator, torch._ops.HigherOrderOperator):
        return f"higher_order::{operator._name}"
    name: str = operator._schema.name
    return name
