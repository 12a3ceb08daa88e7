"""Reactions to findings, carried out from the next step on, in the same step on all ranks (docs/diagnosis.md).

A reaction that concerns layers is a section of a config, planned like the sections of the user's config.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from te_precision_callbacks.base.counts import some_of
from te_precision_callbacks.base.errors import PrecisionDebugError
from te_precision_callbacks.base.ranks import is_distributed
from te_precision_callbacks.base.vocabulary import GEMMS, OPERANDS, RESULT
from te_precision_callbacks.config.loading import load_config
from te_precision_callbacks.config.yaml_text import Places
from te_precision_callbacks.diagnosis.finding import Finding
from te_precision_callbacks.diagnosis.reactions import (
    DUMP,
    HIGH_PRECISION,
    PROTECT,
    Action,
    calls_for_reaction,
    read_reactions,
)
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.sinks.step_records import Event

logger = logging.getLogger(__name__)

_WAIT_FOR_NONFINITE = 100
"""The steps in which the next inf or nan is dumped."""


class _Running(NamedTuple):
    """A reaction that lasts.

    Attributes:
        name: the name of its section.
        last: the last iteration.
        features: its features, with their options.
    """

    name: str
    kind: str
    begin: int
    last: int
    layers: Sequence[str]
    features: Mapping[str, Mapping[str, Any]]

    def section(self) -> dict[str, Any]:
        steps = {"enabled": True, "start_step": self.begin, "end_step": self.last}
        return {
            "enabled": True,
            "layers": {"exact_layer_names": list(self.layers)},
            "transformer_engine": {name: {**steps, **options} for name, options in self.features.items()},
        }


class Actions:
    """Collects reactions during a step, and carries them out at its end."""

    def __init__(self, context: RunContext, model: ObservedModel) -> None:
        self._context = context
        self._model = model
        on_finding = context.options.on_finding
        self._reactions = read_reactions(on_finding) if isinstance(on_finding, Mapping) else {}
        self._wanted: list[Action] = []
        self._running: list[_Running] = []
        self._count = 0

    def attach(self) -> None:
        """Continue reactions after a model was attached again, if it has their layers."""
        try:
            if self._running:
                self._plan(self._running)
        except PrecisionDebugError:
            self._running = []

    def note(self, finding: Finding) -> None:
        wanted = self._reactions.get(finding.rule, {}) if calls_for_reaction(finding) else {}
        for kind, steps in wanted.items():
            if kind in (DUMP, HIGH_PRECISION, PROTECT):
                self._wanted.append(Action(kind, finding.rule, finding.layers, finding.tensor, steps))

    def note_dump(self, layer: str) -> None:
        """End the dumps of a layer with this step."""
        for place, running in enumerate(self._running):
            if running.kind == DUMP and layer in running.layers:
                self._running[place] = running._replace(last=0)

    def end_step(self, iteration: int) -> None:
        """Carry out the reactions that all ranks want, and end reactions after their last step."""
        over = [running for running in self._running if running.last <= iteration]
        if over:
            self._plan([running for running in self._running if running not in over])
        for running in over:
            if running.kind == HIGH_PRECISION:
                self._report(f"{running.kind} ends here: {some_of(running.layers)}", iteration)
        for action in self._take():
            try:
                text = self._carry_out(action, iteration + 1)
            except PrecisionDebugError as error:
                text = f"not possible: {error}"
            self._report(f"{action.kind}, because of {action.rule}: {text}", iteration)

    def end(self, iteration: int) -> None:
        for action in self._wanted:
            text = "the run ended before the ranks could do it together"
            self._report(f"{action.kind}, because of {action.rule}: {text}", iteration, of_all=False)

    def _take(self) -> Sequence[Action]:
        wanted = self._wanted
        ranks = self._context.ranks
        if ranks.several:
            if not ranks.request_together("act", own=bool(wanted)):
                return ()
            wanted = ranks.pool(wanted, "reactions", Action)
        self._wanted = []
        return list(dict.fromkeys(wanted))

    def _carry_out(self, action: Action, begin: int) -> str:
        """Carry out a reaction from an iteration on; return a description."""
        if action.kind != DUMP and is_distributed(None) and not self._context.ranks.several:
            return "not possible with reduce=False, since all ranks must do it together"
        if action.kind == PROTECT:
            self._context.results.protects_checkpoints = True
            return "checkpoints are no longer saved or deleted"
        busy = set[str]().union(*(running.layers for running in self._running if running.kind == action.kind))
        concerned = self._model.layers_of(action.layers if action.kind == HIGH_PRECISION else action.layers[:1])
        refused = self._model.refusals(concerned) if action.kind == HIGH_PRECISION else {}
        layers = [layer for layer in concerned if layer not in busy and layer not in refused]
        but = "".join(f"; {layer} cannot: {why}" for layer, why in refused.items())
        if not concerned:
            return f"{some_of(action.layers) or 'the finding'} names no layer that debug features act on"
        if not layers:
            return f"no further layer of Transformer Engine is concerned{but}"
        self._count += 1
        running = _start(f"on_finding {self._count}: {action.kind}", action, begin, layers)
        self._plan([*self._running, running])
        which = f"step {begin}" if running.last == begin else f"the steps {begin} to {running.last}"
        if action.kind == HIGH_PRECISION:
            return f"{some_of(layers)}, in {which}{but}"
        gemms = " and ".join(running.features["DumpTensors"]["gemms"])
        return f"{gemms} of {layers[0]}, in {which}{', at the next inf or nan' if running.last > begin else ''}"

    def _plan(self, running: list[_Running]) -> None:
        sections = load_config({each.name: each.section() for each in running}).sections
        self._model.replan([replace(section, places=Places("a reaction to a finding")) for section in sections])
        self._running = running

    def _report(self, text: str, iteration: int, *, of_all: bool = True) -> None:
        self._context.events.append(Event("action", f"{text}.", iteration, "warning", data={"of_all": of_all}))
        if self._context.ranks.leads or not of_all:
            logger.warning("on_finding=: %s.", text)


def _start(name: str, action: Action, begin: int, layers: Sequence[str]) -> _Running:
    if action.kind == HIGH_PRECISION:
        last = begin + action.steps - 1
        return _Running(name, action.kind, begin, last, layers, {"DisableQuantizationLayer": {}})
    gemms = [gemm for gemm in GEMMS if action.tensor in (*OPERANDS[gemm], RESULT[gemm])] or ["fprop"]
    options: dict[str, Any] = {"gemms": gemms}
    steps = action.steps
    if action.rule == "nonfinite":
        options["when"] = "nonfinite"
        steps = _WAIT_FOR_NONFINITE
    return _Running(name, action.kind, begin, begin + steps - 1, layers, {"DumpTensors": options})
