"""Temporary replacement of attributes, and callbacks before a method of one object."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

AnyFunction = Callable[..., Any]

MISSING = object()


class Replacements:
    """Replaces attributes until :meth:`restore`; ``keeps_later`` keeps attributes that were replaced again since."""

    def __init__(self, *, keeps_later: bool = False) -> None:
        self._keeps_later = keeps_later
        self._saved: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        return bool(self._saved)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        self._saved.append((owner, name, vars(owner).get(name, MISSING), value))
        set_attribute(owner, name, value)

    def wrap(self, owner: Any, name: str, wrapper: Callable[[AnyFunction], AnyFunction]) -> None:
        self.replace(owner, name, wrapper(getattr(owner, name)))

    def restore(self) -> None:
        while self._saved:
            owner, name, original, value = self._saved.pop()
            if not self._keeps_later or vars(owner).get(name) is value:
                set_attribute(owner, name, original)


def set_attribute(owner: Any, name: str, value: Any) -> None:
    """Set an attribute of an object or a class itself; delete it for MISSING."""
    if isinstance(owner, type):
        if value is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    elif value is MISSING:
        vars(owner).pop(name, None)
    else:
        vars(owner)[name] = value  # setattr of an OptimizedModule would set the attribute of the wrapped module


class BeforeCalls:
    """Calls a callback before each call of an object's method, with the same arguments, until :meth:`remove`.

    Args:
        owner: the object; only its ``__dict__`` is changed, not its class.
        before_call: a bound method, which is weakly referenced.
    """

    def __init__(self, owner: Any, name: str, before_call: Callable[..., None]) -> None:
        self.owner = owner
        self._name = name
        self._own = getattr(owner, name)
        self._before = weakref.WeakMethod(before_call)
        functools.update_wrapper(self, self._own, updated=())  # not __dict__: _own may be another BeforeCalls
        self._saved = Replacements(keeps_later=True)
        self._saved.replace(owner, name, self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        before_call = self._before()
        if before_call is not None:
            before_call(*args, **keywords)
        return self._own(*args, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self._name)

    def remove(self) -> None:
        self._saved.restore()
