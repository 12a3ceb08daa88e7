"""Finds the options of a feature for a tensor of a GEMM; the only place where inner keys override outer ones.

    whole = Nested.of({"margin": 1, "gemms_struct": [{"gemm": "fprop", "tensors": ["weight"], "margin": 2}]})
    ((gemm, of_gemm),) = whole.chosen("gemm")      # "fprop"
    ((tensor, nested),) = of_gemm.chosen("tensor")  # "weight"
    nested.merged()["margin"]                       # 2
    nested.path("margin")                           # ("gemms_struct", 0, "margin")

A feature's options are a mapping whose lists hold mappings: ``tensors_struct``, and ``gemms_struct``, which may hold
``tensors_struct`` again. Read from nvidia-dlfw-inspect 0.2.2, ``base.py``, and Transformer Engine 2.20.2,
``debug/features/api.py``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from te_precision_callbacks.config.problems import KeyPath

_TENSORS = frozenset({"tensors", "tensors_struct"})


@dataclass(frozen=True)
class Nested:
    """The options for a tensor or a GEMM, with the levels around them.

    Attributes:
        levels: the path of each level in the feature's options, and the options there; outermost first.
    """

    levels: tuple[tuple[KeyPath, Mapping[str, Any]], ...]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> Nested:
        """A feature's options as a whole."""
        return cls((((), options),))

    @property
    def here(self) -> KeyPath:
        """The path of the innermost level."""
        return self.levels[-1][0]

    def path(self, key: str) -> KeyPath:
        """The path of the effective value of a key; the path of the innermost level if no level has the key."""
        given = (path for path, level in reversed(self.levels) if key in level)
        return next(((*path, key) for path in given), self.here)

    def merged(self) -> dict[str, Any]:
        """The effective options: for each key the innermost value; a level that chooses tensors replaces an outer
        choice."""
        found: dict[str, Any] = {}
        for _, level in self.levels:
            outer = found if _TENSORS.isdisjoint(level) else {k: v for k, v in found.items() if k not in _TENSORS}
            found = {**outer, **level}
        return found

    def chosen(self, what: Literal["tensor", "gemm"]) -> Iterator[tuple[str | None, Nested]]:
        """Each name in ``<what>s`` or in the items of ``<what>s_struct``, of the innermost level that has either.

        If no level has either, the options apply to all names: yields one None.
        """
        for path, level in reversed(self.levels):
            names, items = level.get(f"{what}s"), level.get(f"{what}s_struct")
            for index, item in enumerate(items or ()):
                yield item.get(what), Nested((*self.levels, ((*path, f"{what}s_struct", index), item)))
            if items:
                return
            if names is not None:
                yield from ((name, self) for name in ([names] if isinstance(names, str) else names))
                return
        yield None, self
