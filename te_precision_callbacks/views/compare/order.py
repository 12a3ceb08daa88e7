"""The order of a step: the forwards of layers, their backwards, then the optimizer and the trainer."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import NamedTuple

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.index import Subject

Layer = tuple[str, str]

_IN_FORWARD = {"activation": 0, "weight": 1, "output": 2}
_IN_BACKWARD = {"gradient": 0, "dgrad": 1, "wgrad": 2}

FORWARD, BACKWARD, AFTERWARDS = 0, 1, 2


class StepPlace(NamedTuple):
    phase: int
    stage: int
    layer: float
    tensor: int


class Order:
    """The order of execution of some runs of one model; the first run with a layer decides about its place.

    ``seen``: the order was recorded; otherwise layers are in the order of their first values.
    """

    def __init__(self, runs: Iterable[RecordedRun]) -> None:
        self._forward: dict[Layer, float] = {}
        self._backward: dict[Layer, float] = {}
        runs = list(runs)
        for run in runs:
            columns = (run.layers[name].to_pylist() for name in ("scope", "layer", "exec_fwd", "exec_bwd"))
            for scope, layer, forward, backward in zip(*columns, strict=True):
                if forward is not None:
                    self._forward.setdefault((scope or "", layer), forward)
                if backward is not None:
                    self._backward.setdefault((scope or "", layer), backward)
        self.seen = bool(self._forward)
        # Behind those that were seen come the others, as they come first in the records.
        behind = max(self._forward.values(), default=-1.0) + 1
        for run in runs:
            for subject in run.subjects:
                if subject.layer:
                    self._forward.setdefault((subject.scope, subject.layer), behind + len(self._forward))

    def place(self, subject: Subject) -> StepPlace:
        layer = (subject.scope, subject.layer)
        stage = _stage(subject.scope)
        if subject.tensor in _IN_FORWARD:
            return StepPlace(FORWARD, stage, self._forward.get(layer, math.inf), _IN_FORWARD[subject.tensor])
        if subject.tensor in _IN_BACKWARD:
            backward = self._backward.get(layer, -self._forward.get(layer, -math.inf))
            return StepPlace(BACKWARD, -stage, backward, _IN_BACKWARD[subject.tensor])
        return StepPlace(AFTERWARDS, 0, self._forward.get(layer, math.inf), 0)


def _stage(scope: str) -> int:
    """The turn of a pipeline stage in the forward: all stages run their first chunk, then their second one."""
    numbers = {name: int(number) for name, number in re.findall(r"(?:^|\.)(vpp|pp)(\d+)(?=\.|$)", scope)}
    return numbers.get("vpp", 0) * 1_000_000 + numbers.get("pp", 0)
