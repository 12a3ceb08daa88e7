"""Names of the profiler ranges that a session adds around layers and iterations, written and parsed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

_MARK = "te_precision|"
_ITERATION = f"{_MARK}iteration|"
_UNENDED = f"{_MARK}unended|"
_LAYER = f"{_MARK}layer|"


class LayerRange(NamedTuple):
    """A range around a layer or one of its GEMMs.

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
    """Return the name of the range around a debug iteration."""
    return f"{_ITERATION}{iteration}"


def read_iteration(name: str) -> int | None:
    """Return the iteration of a range, also of torch.profiler's ``ProfilerStep#3``; None for another range."""
    number = name.removeprefix(_ITERATION) if name.startswith(_ITERATION) else name.removeprefix("ProfilerStep#")
    return int(number) if number != name and number.isdigit() else None


def unended_range(iteration: int) -> str:
    """Return the name of the range that marks an iteration as incomplete."""
    return f"{_UNENDED}{iteration}"


def read_unended(name: str) -> int | None:
    """Return the iteration that a range marks as incomplete; None for another range."""
    return int(name.removeprefix(_UNENDED)) if name.startswith(_UNENDED) else None


def read_layer(name: str) -> LayerRange | None:
    """Parse the range of a layer; None for another range."""
    if not name.startswith(_LAYER):
        return None
    direction, gemm, layer = name[len(_LAYER) :].split("|", 2)
    return LayerRange(layer, gemm, direction == "backward")


def module_of(layers: Sequence[str]) -> str:
    """Return the module of one or several layers: ``mlp`` of ``mlp.fc1`` and ``mlp.fc2``."""
    if len(layers) == 1:
        return layers[0]
    return layers[0].rpartition(".")[0] or layers[0]
