"""How large the tensors of two runs are beside each other: another batch size is no difference in any layer.

    sizes = Sizes(a, b)
    sizes.rows("", "layers.3.fc")                    # 2.0: the layer computes twice as many rows in a step of b
    sizes.elements("", "layers.3.fc", "activation")  # 2.0

They are known from the matrix products with the layers' weights that were recorded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import pyarrow.compute as pc

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.runs.tables import at_the_end
from te_precision_callbacks.statistics.names import logged_request

OF_GRADIENTS = frozenset({"gradient", "dgrad", "wgrad"})
"""The tensors whose magnitude depends on the number of rows: a loss may be a mean over them, or a sum."""

_GROWS_WITH_ELEMENTS: Mapping[str, float] = {"l1_norm": 1.0, "l2_norm": 0.5, "numel": 1.0, "nonfinite_num": 1.0}
"""A statistic -> the power of the number of elements with which it grows."""


class Size(NamedTuple):
    """The sizes of a layer's product with its weight, over the calls of a step.

    Attributes:
        rows: of the input.
        outputs: the elements of a row of the result.
        inputs: the elements of a row of the input.
    """

    rows: int
    outputs: int
    inputs: int

    @property
    def elements(self) -> Mapping[str, int]:
        """Tensor -> the number of its elements of which a statistic is computed; of a weight it counts once a step."""
        one, other, weight = self.rows * self.inputs, self.rows * self.outputs, self.outputs * self.inputs
        return {
            "activation": one,
            "dgrad": one,
            "output": other,
            "gradient": other,
            "weight": weight,
            "wgrad": weight,
        }


def sizes_of(run: RecordedRun) -> dict[tuple[str, str], Size]:
    """Scope and layer -> its size at the end of the run, for each layer that multiplies with a weight."""
    ran = at_the_end(run.gemms)
    ran = ran.filter(pc.and_(pc.equal(ran["gemm"], "fprop"), pc.greater(ran["macs"], 0)))
    found: dict[tuple[str, str], Size] = {}
    for row in ran.select(["scope", "layer", "n", "m", "k", "batch", "calls"]).to_pylist():
        if all(row[name] for name in ("n", "m", "k", "batch", "calls")):
            size = Size(row["n"] * row["batch"] * row["calls"], row["m"], row["k"])
            found.setdefault((row["scope"] or "", row["layer"]), size)
    return found


class Sizes:
    """The sizes of one run as multiples of those of another; 1 where one of them is not known.

    Args:
        a: the one that they are multiples of.
        b: the other one.
    """

    def __init__(self, a: RecordedRun, b: RecordedRun) -> None:
        ours, theirs = ({}, {}) if a is b else (sizes_of(run) for run in (a, b))
        self._pairs = {key: (size, theirs[key]) for key, size in ours.items() if key in theirs}

    @property
    def with_other_rows(self) -> list[tuple[str, str]]:
        """The layers that compute another number of rows in a step, by scope and name."""
        return [key for key, (ours, theirs) in self._pairs.items() if ours.rows != theirs.rows]

    def rows(self, scope: str, layer: str) -> float:
        """The multiple of the rows of a layer's input in a step."""
        pair = self._pairs.get((scope, layer))
        return 1.0 if pair is None else pair[1].rows / pair[0].rows

    def elements(self, scope: str, layer: str, tensor: str) -> float:
        """The multiple of the elements of a layer's tensor."""
        pair = self._pairs.get((scope, layer))
        if pair is None or tensor not in pair[0].elements:
            return 1.0
        return pair[1].elements[tensor] / pair[0].elements[tensor]

    def growth(self, subject: Subject) -> float:
        """The factor by which a statistic is larger in b only because its tensor is; 1 but for norms and counts."""
        request = logged_request(subject.statistic) if subject.tensor else None
        power = 0.0 if request is None else _GROWS_WITH_ELEMENTS.get(request.statistic.name, 0.0)
        if not power:
            return 1.0
        return float(self.elements(subject.scope, subject.layer, subject.tensor) ** power)
