"""An environment variable, as a row of the tables beside this module."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

from te_precision_callbacks.base.environment.values import Fault

Influence = Literal["precision", "numerics", "none"]
"""What a variable changes.

``precision``: the format, the scale or the rounding of a tensor or a GEMM. ``numerics``: kernels or their order of
summation, so that the same formats give other last bits. ``none``: only what is logged, or how a run starts.
"""

Row = tuple[str, str, Callable[[str], Fault | None], str]
"""Name, default, fault and effect of a :class:`Variable`."""


class Variable(NamedTuple):
    """An environment variable.

    Attributes:
        name: its name.
        default: the value that is in force where it is not set; empty for none.
        fault: value -> what is wrong with it; None for a value that is read as it is meant.
        effect: what it does, in words.
        influence: what it changes.
        source: the file that reads it, as below ``site-packages``, or in the sources of a compiled library.
    """

    name: str
    default: str
    fault: Callable[[str], Fault | None]
    effect: str
    influence: Influence
    source: str


def variables(source: str, influence: Influence, *rows: Row) -> tuple[Variable, ...]:
    """The variables that one file reads."""
    return tuple(Variable(*row, influence, source) for row in rows)
