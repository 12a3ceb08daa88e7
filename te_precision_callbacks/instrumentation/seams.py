"""The seams of a run: attributes of Transformer Engine and torch that stand replaced while the run lasts."""

from __future__ import annotations

import inspect
from typing import Any

from te_precision_callbacks.base.errors import SessionError


class Seams:
    """Replaces attributes of classes and modules, and puts them back."""

    def __init__(self) -> None:
        self._saved: list[tuple[Any, str, Any]] = []

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until :meth:`put_back`."""
        self._saved.append((owner, name, inspect.getattr_static(owner, name)))
        setattr(owner, name, value)

    def put_back(self) -> None:
        """Set all attributes to what they were, the last one first."""
        while self._saved:
            owner, name, value = self._saved.pop()
            setattr(owner, name, value)


class YieldingSeams:
    """As :class:`Seams`, but what somebody has put around a replacement stays: it goes on to call what it stood for."""

    def __init__(self) -> None:
        self._replaced: list[tuple[Any, str, Any, Any]] = []

    def __bool__(self) -> bool:
        """Whether anything is replaced."""
        return bool(self._replaced)

    def replace(self, owner: Any, name: str, value: Any) -> None:
        """Set an attribute until :meth:`put_back`."""
        own = vars(owner).get(name)
        self._replaced.append((owner, name, own, value))
        setattr(owner, name, value)

    def put_back(self) -> None:
        """Set the attributes to what they were, the last one first."""
        while self._replaced:
            owner, name, own, value = self._replaced.pop()
            if vars(owner).get(name) is not value:
                continue
            if own is None:
                delattr(owner, name)
            else:
                setattr(owner, name, own)


def require(owner: Any, *names: str) -> None:
    """Raise an error if an object lacks an attribute on which the session relies.

    Raises:
        SessionError: it does.
    """
    missing = [name for name in names if not hasattr(owner, name)]
    if missing:
        raise SessionError(
            f"This Transformer Engine has no {', '.join(missing)} in {owner.__name__}, on which the session relies."
            " Install Transformer Engine 2.20, or a te-precision-callbacks made for your version."
        )
