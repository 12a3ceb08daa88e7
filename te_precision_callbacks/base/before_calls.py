"""A callback before a method of one object, such as an accelerator's ``backward``, which has no hooks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

from te_precision_callbacks.base.replaced import Replaced


class BeforeCalls:
    """Call a method before each call of another object's method, with the same arguments, until it is removed.

    Args:
        owner: gets the replacement in its ``__dict__``; other objects of its class keep their method.
        before: a bound method; its object is not kept alive.
    """

    def __init__(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        self.owner = owner
        self._name = name
        self._own = getattr(owner, name)
        self._before = weakref.WeakMethod(before)
        functools.update_wrapper(self, self._own, updated=())  # it may be another BeforeCalls, with the same attributes
        self._replaced = Replaced(yields=True)
        self._replaced.replace(owner, name, self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        before = self._before()
        if before is not None:
            before(*args, **keywords)
        return self._own(*args, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self._name)

    def remove(self) -> None:
        self._replaced.put_back()
