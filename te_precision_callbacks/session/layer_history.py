"""What the config did with each layer of a model, in each iteration: models change while they are trained."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import replace

from te_precision_callbacks.base.spans import AnyIteration, Iterations
from te_precision_callbacks.sinks.step_records import LayerInfo


class Layers(AnyIteration[LayerInfo]):
    """Every layer of a model that can be observed, and what the config does with it.

    session.layers              # now
    session.layers(at=120)      # in iteration 120, with the span of iterations in which it did
    """


class LayerHistory:
    """The layers of a run, by iteration. Few iterations change them, so each change keeps all layers.

    Args:
        iterations: those that have run.

    Attributes:
        changes: how often layers were put.
    """

    def __init__(self, iterations: Iterations) -> None:
        self.changes = 0
        self._iterations = iterations
        self._since: list[int] = []
        self._layers: list[tuple[LayerInfo, ...]] = []

    @property
    def now(self) -> Layers:
        """The present ones."""
        return Layers(self._layers[-1] if self._layers else (), self.at)

    def put(self, iteration: int, layers: Iterable[LayerInfo]) -> None:
        """Let layers be those of an iteration and of the following ones, until others are put."""
        self.changes += 1
        while self._since and self._since[-1] >= iteration:
            del self._since[-1], self._layers[-1]
        before = {info.name: info for info in self.now}
        self._since.append(iteration)
        self._layers.append(tuple(_since(iteration, info, before.get(info.name)) for info in layers))

    def go_to(self, iteration: int) -> None:
        """Let the present layers hold from another iteration on, with which a run goes on."""
        if self._since:
            layers = self.now
            if self._since[-1] not in self._iterations:
                del self._since[-1], self._layers[-1]
            self.put(iteration, layers)

    def spans(self) -> list[LayerInfo]:
        """All layers that there were, each as often as it was another, with the iterations in which it was so."""
        found: dict[tuple[str, int], LayerInfo] = {}
        for number, layers in enumerate(self._layers):
            later = list(zip(self._since[number + 1 :], self._layers[number + 1 :], strict=True))
            for info in layers:
                found.setdefault((info.name, info.since), replace(info, until=_until(info, later)))
        return list(found.values())

    def at(self, iteration: int) -> tuple[LayerInfo, ...]:
        """The layers in an iteration. Raises IterationError where it has not run."""
        self._iterations.require("layers", iteration)
        number = bisect_right(self._since, iteration)
        later = list(zip(self._since[number:], self._layers[number:], strict=True))
        return tuple(replace(info, until=_until(info, later)) for info in self._layers[number - 1])


def _since(iteration: int, info: LayerInfo, before: LayerInfo | None) -> LayerInfo:
    """A layer with the iteration since which it is as it is."""
    lasts = before is not None and replace(info, since=before.since) == before
    return before if before is not None and lasts else replace(info, since=iteration)


def _until(info: LayerInfo, later: Iterable[tuple[int, tuple[LayerInfo, ...]]]) -> int | None:
    """The last iteration in which a layer was as it is, by the changes behind it."""
    return next((since - 1 for since, layers in later if info not in layers), None)
