"""Listens to a method of one object, such as an accelerator's ``backward``, which has no hooks."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any


class BeforeCalls:
    """Calls a method before each call of another object's method, with the same arguments, until it is removed.

    Args:
        owner: the object whose method is replaced, in its ``__dict__``. Other objects of its class keep theirs.
        name: the method's name.
        before: a bound method; its object is not kept alive.

    Attributes:
        owner: as above.
    """

    def __init__(self, owner: Any, name: str, before: Callable[..., None]) -> None:
        self.owner = owner
        self._name = name
        self._found = vars(owner).get(name)
        self._own = getattr(owner, name)
        self._before = weakref.WeakMethod(before)
        functools.update_wrapper(self, self._own, updated=())  # it may be another BeforeCalls, with the same attributes
        setattr(owner, name, self)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        before = self._before()
        if before is not None:
            before(*args, **keywords)
        return self._own(*args, **keywords)

    def __reduce__(self) -> tuple[Any, ...]:
        """A copy or pickle of the object has the original method."""
        return getattr, (self.owner, self._name)

    def remove(self) -> None:
        """Put the original method back; what somebody else has put there since stays."""
        if vars(self.owner).get(self._name) is not self:
            return
        if self._found is None:
            delattr(self.owner, self._name)
        else:
            setattr(self.owner, self._name, self._found)
