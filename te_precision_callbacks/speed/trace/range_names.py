"""The names of the ranges that a session puts around layers while a profile is due: they are written and read here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MARK = "te_precision|"
_ITERATION = f"{_MARK}iteration|"
_UNENDED = f"{_MARK}unended|"
_LAYER = f"{_MARK}layer|"


class LayerRange(NamedTuple):
    """What a range says.

    Attributes:
        layer: the layer, or the module whose layers run.
        gemm: the GEMM; empty around the whole layer.
        backward: whether it is around a backward.
    """

    layer: str
    gemm: str = ""
    backward: bool = False

    @property
    def name(self) -> str:
        """The name of the range."""
        return f"{_LAYER}{'backward' if self.backward else 'forward'}|{self.gemm}|{self.layer}"


def iteration_range(iteration: int) -> str:
    """The name of the range around a debug iteration."""
    return f"{_ITERATION}{iteration}"


def read_iteration(name: str) -> int | None:
    """The iteration of a range around one, also of ``ProfilerStep#3`` of torch.profiler; None for another range."""
    number = name.removeprefix(_ITERATION) if name.startswith(_ITERATION) else name.removeprefix("ProfilerStep#")
    return int(number) if number != name and number.isdigit() else None


def unended_range(iteration: int) -> str:
    """The name of a range behind that of an iteration which the run has left before its end."""
    return f"{_UNENDED}{iteration}"


def read_unended(name: str) -> int | None:
    """The iteration of which a range says that it has not ended; None for another range."""
    return int(name.removeprefix(_UNENDED)) if name.startswith(_UNENDED) else None


def read_layer(name: str) -> LayerRange | None:
    """What the range of a layer says; None for another range."""
    if not name.startswith(_LAYER):
        return None
    direction, gemm, layer = name[len(_LAYER) :].split("|", 2)
    return LayerRange(layer, gemm, direction == "backward")


def module_of(layers: Sequence[str]) -> str:
    """The module of one or several layers: ``mlp`` of ``mlp.fc1`` and ``mlp.fc2``."""
    if len(layers) == 1:
        return layers[0]
    return layers[0].rpartition(".")[0] or layers[0]
