"""The facts of a run, as tables for the records."""

from __future__ import annotations

import functools
import json
import logging
import os
import platform
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import yaml

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.base.ranks import is_distributed
from te_precision_callbacks.base.vocabulary import class_names
from te_precision_callbacks.config.planning import Section
from te_precision_callbacks.coverage.gemm_precision import GemmPrecision
from te_precision_callbacks.coverage.other_steps import columns_of
from te_precision_callbacks.instrumentation.recipe_arguments import (
    amax_reductions,
    computes_in_float16,
    ignored_arguments,
    margins,
    recipes_of,
)
from te_precision_callbacks.layers.naming import modules_with_gemms
from te_precision_callbacks.reference import is_installed
from te_precision_callbacks.runs.fingerprints import QUANTIZED
from te_precision_callbacks.runs.sink import FactTables
from te_precision_callbacks.session.context import RunContext
from te_precision_callbacks.session.model import ObservedModel
from te_precision_callbacks.session.resume import versions
from te_precision_callbacks.sinks.step_records import LayerInfo
from te_precision_callbacks.te import modules as te_modules
from te_precision_callbacks.te.environment import installed_version, read_environment, torch_facts

logger = logging.getLogger(__name__)

MOST_SHARE = 0.05
"""Maximum share of the training time for collecting facts that change all the time."""

REST_AFTER_A_FAILURE = 10.0
"""Seconds before facts are collected again after a failure, except at the end of the run."""

_TRAINERS = ("lightning", "accelerate", "transformers", "megatron-core", "peft")
"""Packages whose version is recorded if they are in use."""

# Cached: reading takes a few milliseconds at each start of a session.
_version_of_trainer = functools.cache(installed_version)

Row = dict[str, Any]


class RunFacts:
    """Collects the facts of a run for its records: machine, layers, GEMMs, recipes and the plan."""

    def __init__(self, context: RunContext, model: ObservedModel) -> None:
        self._options = context.options
        self._model = model
        self._results = context.results
        self._taken: tuple[object, ...] = (None,)
        self._urgent = False, False
        self._rests_until = 0.0
        self._machine: Row | None = None

    def take(self, *, at_last: bool, has_statistics: bool) -> FactTables | None:
        """Return the facts, or None without new ones.

        None for a while after a collection, unless ``at_last``, or if statistics were collected in another precision,
        or a GradScaler or optimizers that step in turn have been seen: the rules that check them depend on it.
        """
        begun = time.perf_counter()
        results = self._results
        coverage = results.coverage
        urgent = results.scales_loss, results.takes_turns
        is_due = at_last or begun >= self._rests_until or urgent != self._urgent
        if not is_due and not (has_statistics and results.table.changes != self._taken[0]):
            return None
        changes = results.table.changes, results.layers, coverage.changes
        settings = *urgent, results.adds_eps, self._model.hooks.selected_gemms.unmeasured
        state = *changes, len(coverage.other_ranks_products), len(coverage.unconverted), *settings
        if state == self._taken:
            return None
        self._rests_until = begun + REST_AFTER_A_FAILURE
        infos = results.layers
        precision = results.table.history.whole_run()
        gemms, operands = self._products()
        layers = self._layers(infos, gemms)
        for row in gemms:
            row["scope"] = layers[row["layer"]]["scope"]
        tables = {
            "layers": list(layers.values()),
            "gemms": gemms,
            "operands": operands,
            "states": self._states(),
            "plan": list(self._plan(infos)),
        }
        facts = FactTables(self._run(precision), tables)
        ended = time.perf_counter()
        self._taken = state
        self._urgent = urgent
        self._rests_until = ended + (ended - begun) / MOST_SHARE
        return facts

    # ------------------------------------------------------------------ run.json

    def _run(self, precision: Iterable[GemmPrecision]) -> Row:
        if self._machine is None:
            self._machine = self._machine_facts()
        recipes = dict.fromkeys(recipe for entry in precision for recipe in entry.recipe.split(" -> ") if recipe)
        return {
            **self._machine,
            "config_text": self._config_text(),
            "config_hash": self._model.config_hash,
            "recipes": list(recipes),
            "unconverted": dict(self._results.coverage.unconverted),
            "settings": self._settings(),
        }

    def _settings(self) -> Row:
        layers = self._model.layers
        reduces = self._options.reduce
        computed = modules_with_gemms(layers.modules, layers.operations)
        is_reduced = reduces and is_distributed(self._options.process_group)
        hooks = self._model.hooks
        runs_elsewhere = hooks.answers.ran_elsewhere and not self._results.table.order[0]
        enters = "the script enters te.autocast(enabled=True)"
        if runs_elsewhere or not hooks.has_enabled_autocast:
            enters = ""
        return {
            "loss_is_scaled": self._results.scales_loss,
            "takes_turns": self._results.takes_turns,
            "adds_eps": self._results.adds_eps,
            "float16": computes_in_float16(computed),
            "ranks": torch.distributed.get_world_size(self._options.process_group) if is_reduced else 1,
            "alike": not layers.other_ranks_products,
            "ignored": ignored_arguments(recipes_of(computed)),
            "margins": margins(recipes_of(computed)),
            "amaxes": amax_reductions(computed),
            "unmeasured": hooks.selected_gemms.unmeasured,
            "loss_is_filtered": self._results.filters_loss,
            "expects_low": self._results.expects_low or enters,
        }

    def _machine_facts(self) -> Row:
        facts = torch_facts()
        script = sys.argv[0] if sys.argv else ""
        installed = dict(versions()) | {"python": platform.python_version()}
        for name in _TRAINERS:
            if name.partition("-")[0] in sys.modules and (version := _version_of_trainer(name)) is not None:
                installed[name] = version
        return {
            "integration": self._results.integration,
            "versions": installed,
            "environment": read_environment(os.environ),
            "torch_settings": dict(facts.settings),
            "platform": platform.platform(),
            "gpu": facts.gpus[0].name if facts.gpus else None,
            "gpus": len(facts.gpus),
            "capability": facts.gpus[0].capability if facts.gpus else None,
            "cuda": facts.cuda,
            "driver": facts.driver,
            "te_backend": "reference" if is_installed() else "compiled",
            "reduce": self._options.reduce,
            "observe": self._options.observe,
            # -c or - for code without a file, empty at an interactive prompt
            "script": script if script in ("", "-", "-c") else os.path.abspath(script),
            "started_by": self._results.started_at,
        }

    def _config_text(self) -> str:
        source = self._options.config.source
        if source is not None:
            try:
                return source.read_text(encoding="utf-8")
            except (OSError, UnicodeDecodeError):
                pass  # deleted since
        content = json.loads(json.dumps(self._options.config.content, default=_plain))
        return yaml.safe_dump(content, sort_keys=False, default_flow_style=None)

    # ------------------------------------------------------------------ tables

    def _layers(self, infos: Sequence[LayerInfo], gemms: Sequence[Row]) -> dict[str, Row]:
        begin = self._results.iterations.first or 0
        weights = self._weights()
        products = group_by_key((row["layer"], row) for row in gemms)
        rows: dict[str, Row] = {}
        for info in infos:
            rows[info.name] = {
                "scope": info.scope,
                "layer": info.name,
                "given": info.given,
                "class": info.module_class,
                "family": products[info.name][0]["family"] if info.name in products else "te",
                "exec_fwd": info.exec_fwd,
                "exec_bwd": info.exec_bwd,
                **weights.get(info.name, {}),
                "refused": info.refused,
                "sections": list(info.sections),
                "since": begin,
            }
        for layer in self._model.layers.other_ranks_products:
            row = {"scope": layer.scope, "layer": layer.name, "class": layer.types[0], "family": "te", "since": begin}
            rows.setdefault(layer.name, row)
        for name, (first, *more) in products.items():
            since = min(row["since"] for row in (first, *more))
            rows.setdefault(name, {"scope": "", "layer": name, "family": first["family"], "since": since})
        return rows

    def _weights(self) -> dict[str, Row]:
        columns: dict[str, Row] = {}
        for named in self._model.layers.modules:
            row = te_modules.of(named.module)
            for number, layer in enumerate(named.layers):
                params = 0
                dtypes: dict[str, None] = {}
                kind = "high"
                for weight in row.weights(named.module, number):
                    local = getattr(weight, "_local_tensor", weight)
                    params += local.numel()
                    dtypes[str(local.dtype).partition(".")[2]] = None
                    if not QUANTIZED.isdisjoint(class_names(local)):
                        kind = "quantized"
                columns[layer.name] = {"params": params, "weight_dtype": ", ".join(dtypes), "primary_weights": kind}
        return columns

    def _products(self) -> tuple[list[Row], list[Row]]:
        gemms: list[Row] = []
        operands: list[Row] = []
        results = self._results
        for product, order, since, until in results.coverage.by_span():
            number = len(gemms)
            span = {"gemm_id": number, "since": since, "until": until}
            gemms.append({**span, "order": order, **columns_of(product)})
            shared = {**span, "layer": product.layer, "gemm": product.gemm, "source": "seen"}
            operands += [{**shared, "tensor": tensor, "format": text} for tensor, text in product.operands.items()]
        return gemms, operands

    def _states(self) -> list[Row]:
        rows = self._results.coverage.state
        return [{"subject": row.subject, "dtype": row.dtype, "bytes": row.bytes, "count": row.tensors} for row in rows]

    def _plan(self, infos: Sequence[LayerInfo]) -> Iterator[Row]:
        sections = {section.name: section for section in self._options.config.enabled_sections}
        for info in infos:
            for namespace, features in info.features.items():
                for feature, options in features.items():
                    yield {
                        **_place([sections[name] for name in info.sections], namespace, feature),
                        "feature": feature,
                        "layer": info.name,
                        "options": json.dumps(dict(options), default=str),
                        "since": self._results.iterations.first or 0,
                    }


def _place(sections: Sequence[Section], namespace: str, feature: str) -> Row:
    """Return section, file and line of a layer's feature, matched case-insensitively; no line for a mapping."""
    section, key = sections[0], feature
    for other in reversed(sections):
        for spelling in other.features.get(namespace, ()):
            if spelling.lower() == feature.lower():
                section, key = other, spelling
    marks = section.places.marks
    mark = marks.get((section.name, namespace, key)) or marks.get((section.name,))
    return {"section": section.name, "file": section.places.name, "line": None if mark is None else mark.line}


def _plain(value: object) -> object:
    if isinstance(value, Mapping):
        return dict(value)
    return str(value)
