"""The facts of a run for a report: products, metrics, events, config and versions."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow.compute as pc

from te_precision_callbacks.coverage.other_steps import recorded_products
from te_precision_callbacks.runs.recorded import RecordedRun
from te_precision_callbacks.runs.summary import multiply_adds
from te_precision_callbacks.runs.tables import facts_at_end
from te_precision_callbacks.statistics.arrays import Floats, Ints
from te_precision_callbacks.views.report.subjects import layer_name

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


def gemms(run: RecordedRun) -> dict[str, list[dict[str, Any]]]:
    products: dict[str, list[dict[str, Any]]] = defaultdict(list)
    names = ("gemm", "backward", "runs", "not_run", "precision", "recipe", "n", "m", "k", "batch", "calls", "macs")
    for row, product in recorded_products(facts_at_end(run.gemms), facts_at_end(run.operands)):
        why = "" if product.not_run else product.why
        facts = {**{name: row[name] for name in names}, "operands": product.operands, "why": why}
        products[layer_name(row["scope"], row["layer"])].append(facts)
    return products


def layer_facts(run: RecordedRun) -> dict[str, dict[str, Any]]:
    layers: dict[str, dict[str, Any]] = {}
    for row in run.layers.to_pylist():
        name = layer_name(row["scope"], row["layer"])
        known = layers.setdefault(name, {})
        for key in ("given", "class", "family", "exec_fwd", "exec_bwd", "params", "weight_dtype", "primary_weights"):
            if row[key] is not None:
                known[key] = row[key]
        known["refused"] = row["refused"] or known.get("refused")
        known["sections"] = row["sections"] or known.get("sections") or []
    return layers


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
    """The steps with records, the first and last time, the median time of a step, and the session's share of it."""
    steps = run.steps
    if not len(steps):
        return {}
    bounds = pc.min_max(steps["iteration"]).as_py()
    facts: dict[str, Any] = {
        "steps": len(pc.unique(steps["iteration"])),
        "first": bounds["min"],
        "last": bounds["max"],
    }
    timed = steps.select(["segment", "iteration", "wall_time"]).filter(pc.field("wall_time").is_valid())
    rows = timed.to_pylist()
    if rows:
        facts["from"] = rows[0]["wall_time"].isoformat(timespec="seconds")
        facts["to"] = rows[-1]["wall_time"].isoformat(timespec="seconds")
    durations = []
    for before, row in pairwise(rows):
        count = row["iteration"] - before["iteration"]  # not every step has records
        if row["segment"] == before["segment"] and count > 0:
            durations.append((row["wall_time"] - before["wall_time"]).total_seconds() / count)
    if durations:
        facts["median_step_seconds"] = float(np.median(durations))
    observing = steps["observe_seconds"].drop_null().to_numpy()
    if observing.size:
        facts["median_observe_seconds"] = float(np.median(observing))
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
    sections: dict[tuple[Any, ...], set[str]] = defaultdict(set)
    names = ("section", "file", "line", "feature", "since", "until")
    for row in run.plan.to_pylist():
        sections[tuple(row[name] for name in names)].add(row["layer"])
    return [{**dict(zip(names, key, strict=True)), "layers": len(layers)} for key, layers in sections.items()]
