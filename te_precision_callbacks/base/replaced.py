"""Temporary replacement of attributes, and callbacks before a method of one object."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

_MISSING = object()


class Replaced:
    """Replaces attributes until :meth:`put_back`; ``yields`` keeps attributes that were replaced again since."""

    def __init__(self, *, yields: bool = False) -> None:
        self._yields = yields
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._replaced)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._replaced.append((owner, name, vars(owner).get(name, _MISSING), value))
        _set(owner, name, value)

    def put_back(self) -> None:
        while self._replaced:
            owner, name, before, value = self._replaced.pop()
            if not self._yields or vars(owner).get(name) is value:
                _set(owner, name, before)


def _set(owner: Any, name: str, value: Any) -> None:
    if isinstance(owner, type):
        if value is _MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is _MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value  # setattr of an OptimizedModule would set the attribute of the wrapped module


class BeforeCalls:
    """Calls a callback before each call of an object's method, with the same arguments, until :meth:`remove`.

    Args:
        owner: the object; only its ``__dict__`` is changed, not its class.
        before: a bound method, which is weakly referenced.
    """

    def __init__(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        self.owner = owner
        self._name = name
        self._own = getattr(owner, name)
        self._before = weakref.WeakMethod(before)
        functools.update_wrapper(self, self._own, updated=())  # not __dict__: _own may be another BeforeCalls
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
