"""Names of the profiler ranges that a session adds around layers and iterations, written and parsed here."""

from __future__ import annotations

import re
from collections.abc import Sequence

_RANGE = re.compile(r"te_precision\|(iteration|unended|layer\|forward|layer\|backward)\|(.*)", re.DOTALL)


def layer_range(layer: str, gemm: str = "", *, backward: bool = False) -> str:
    direction = "forward"
    if backward:
        direction = "backward"
    return f"te_precision|layer|{direction}|{gemm}|{layer}"


def iteration_range(iteration: int) -> str:
    return f"te_precision|iteration|{iteration}"


def unended_range(iteration: int) -> str:
    return f"te_precision|unended|{iteration}"


def parse_range(name: str) -> tuple[str, str]:
    """Parse the name of a range.

    Returns:
        ``iteration`` or ``unended`` and the number, or ``forward`` or ``backward`` and the GEMM and layer with a bar
        between them; two empty texts for another range.
    """
    match = _RANGE.fullmatch(name)
    if match is None:
        return "", ""
    kind = match[1].removeprefix("layer|")
    if match[2].isdigit() or kind in ("forward", "backward"):
        return (kind, match[2])
    return ("", "")


def module_of(layers: Sequence[str]) -> str:
    if len(layers) == 1:
        return layers[0]
    return layers[0].rpartition(".")[0] or layers[0]
