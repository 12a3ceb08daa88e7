"""The facts of a run for a report: products, metrics, events, config and versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow.compute as pc

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.coverage.other_steps import recorded_products
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.summary import multiply_adds
from te_precision_callbacks.runs.tables import facts_at_end
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.report.subjects import ReportLayer, layer_name

_MOST_EVENTS = 2000
_MOST_POINTS = 20_000


def downsample(values: Floats) -> Ints:
    """Downsample to at most :data:`_MOST_POINTS` values; returns indices of the minimum and maximum, or of a nan, of
    equal pieces.
    """
    if len(values) <= _MOST_POINTS:
        return np.arange(len(values))
    edges = np.linspace(0, len(values), _MOST_POINTS // 2 + 1).astype(np.int64)
    kept = {0, len(values) - 1}
    for begin, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        piece = values[begin:end]
        kept.update((begin + int(piece.argmin()), begin + int(piece.argmax())))
    return np.array(sorted(kept))


def coverage(run: RecordedRun) -> list[dict[str, Any]]:
    sums = sorted(multiply_adds(run).items())
    return [{"precision": name, "backward": backward, "macs": macs} for (name, backward), macs in sums]


_LAYER_FACTS = ("given", "class", "family", "exec_fwd", "params", "weight_dtype", "primary_weights")
_GEMM_FACTS = ("gemm", "backward", "runs", "not_run", "precision", "n", "m", "k", "batch", "calls", "macs")


def layers(run: RecordedRun, shown: Sequence[ReportLayer]) -> list[dict[str, Any]]:
    """The layers with their recorded facts and matrix products."""
    layer_facts: dict[str, dict[str, Any]] = defaultdict(dict)
    for row in run.layers.to_pylist():
        known = layer_facts[layer_name(row["scope"], row["layer"])]
        known |= {key: row[key] for key in _LAYER_FACTS if row[key] is not None}
        for key in ("refused", "sections"):
            known[key] = row[key] or known.get(key)
    products: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row, product in recorded_products(facts_at_end(run.gemms), facts_at_end(run.operands)):
        why = "" if product.not_run else product.why
        gemm_facts = {name: row[name] for name in _GEMM_FACTS}
        products[layer_name(row["scope"], row["layer"])].append(
            {**gemm_facts, "operands": product.operands, "why": why}
        )
    return [
        {**vars(layer), "facts": layer_facts.get(layer.name, {}), "gemms": products.get(layer.name, [])}
        for layer in shown
    ]


def events(run: RecordedRun) -> tuple[list[dict[str, Any]], int]:
    all_events = run.events_of_ranks()
    rows = []
    for row in all_events[-_MOST_EVENTS:]:
        row["ranks"] = ", ".join(map(str, row["ranks"]))
        row["layer"] = layer_name(row.pop("scope"), row["layer"])
        time = row.pop("wall_time")
        if row["kind"] == "last_steps":
            del row["data"]  # megabytes, which have a page of their own
        row["time"] = time.isoformat(timespec="seconds") if time else ""
        rows.append({key: value for key, value in row.items() if value not in (None, "")})
    return rows, len(all_events)


def duration(run: RecordedRun) -> dict[str, Any]:
    """The steps with records, and the median time of a step."""
    if not len(run.steps):
        return {}
    iterations = run.steps["iteration"].to_numpy()
    facts: dict[str, Any] = {
        "steps": len(np.unique(iterations)),
        "first": int(iterations.min()),
        "last": int(iterations.max()),
    }
    timed = run.steps.filter(pc.field("wall_time").is_valid())
    count = np.diff(timed["iteration"].to_numpy())  # not every step has records
    seconds = np.diff(timed["wall_time"].to_numpy()) / np.timedelta64(1, "s")
    in_segment = (count > 0) & (np.diff(timed["segment"].to_numpy()) == 0)
    if in_segment.any():
        facts["median_step_seconds"] = float(np.median(seconds[in_segment] / count[in_segment]))
    return facts


def trainer_steps(run: RecordedRun) -> dict[str, int | None]:
    """The trainer's first and last step, and its lead over the iteration; None if the lead changes."""
    iterations = run.steps["iteration"]
    own = run.steps["logging_step"]
    ahead = pc.unique(pc.subtract(own, iterations)).to_pylist()
    bounds = pc.min_max(own).as_py()
    return {"first": bounds["min"], "last": bounds["max"], "ahead": ahead[0] if len(ahead) == 1 else None}


def segments(run: RecordedRun) -> list[dict[str, Any]]:
    return [{**vars(segment), "facts": readable(segment.facts)} for segment in run.segments]


def readable(facts: Mapping[str, Any]) -> dict[str, Any]:
    """The facts of a process start without the long rows on amaxes, which a rule checks."""
    settings = facts.get("settings")
    if not isinstance(settings, dict):
        return dict(facts)
    return {**facts, "settings": {name: value for name, value in settings.items() if name != "amaxes"}}


def plan(run: RecordedRun) -> list[dict[str, Any]]:
    """The sections of the config, each with its number of layers."""
    names = ("section", "file", "line", "feature", "since", "until")
    layers_of = group_by_key((tuple(row[name] for name in names), row["layer"]) for row in run.plan.to_pylist())
    return [{**dict(zip(names, key, strict=True)), "layers": len(set(layers_of[key]))} for key in layers_of]
