"""Temporary replacement of attributes."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Replaced:
    """Replaces attributes; ``yields`` keeps a wrapper that someone has put around a replacement."""

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
        vars(owner)[name] = value  # setattr of an OptimizedModule would set the attribute of what it wraps
