"""Facts that differ between two runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.answers import precision_shares
from te_precision_callbacks.runs.tables import at_the_end
from te_precision_callbacks.views.compare.result import FactDifference
from te_precision_callbacks.views.report.facts import readable

_OF_EVERY_RUN = frozenset(
    {"run_id", "segment", "parent_segment", "status", "host", "pid", "pid_namespace", "pid_started", "launch"}
)
"""Facts that no two runs share, beside times."""

_FIRST = ("config", "versions", "recipe", "recipes", "environment")

_MOST_LAYERS = 3
_ROWS = "rows in a step of"


def facts_that_differ(a: RecordedRun, b: RecordedRun) -> list[FactDifference]:
    """Compare the facts of the last process starts of two runs, then their matrix products."""
    ours, theirs = _settings(a), _settings(b)
    if not ours or not theirs:  # a log of plain nvidia-dlfw-inspect has none
        ours = theirs = {}
    settings = [
        FactDifference(name, ours.get(name, ""), theirs.get(name, ""))
        for name in sorted({*ours, *theirs} - {"config_hash"}, key=_rank)
        if ours.get(name) != theirs.get(name)
    ]
    return [*settings, *_of_states(a, b), *_of_products(a, b)]


def _rank(name: str) -> tuple[int, str]:
    part = name.partition(".")[0]
    return _FIRST.index(part) if part in _FIRST else len(_FIRST), name


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping):
        for key, inner in value.items():
            if path or not (key in _OF_EVERY_RUN or key.endswith("_at") or key.startswith(("first_", "last_"))):
                yield from _flat(f"{path}.{key}" if path else str(key), inner)
    elif value is not None:
        yield path, value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _settings(run: RecordedRun) -> dict[str, str]:
    """The facts of the last process start, with the options of the config by their path."""
    facts = readable(run.segments[-1].facts) if run.segments else {}
    config = yaml.safe_load(facts.pop("config_text", None) or "{}")
    return {**dict(_flat("config", config)), **dict(_flat("", facts))}


def _of_states(a: RecordedRun, b: RecordedRun) -> Iterator[FactDifference]:
    ours, theirs = (_types(run) for run in (a, b))
    for subject in ours:
        if ours[subject] != theirs.get(subject, ours[subject]):
            yield FactDifference(f"type of {subject.replace('_', ' ')}", ours[subject], theirs[subject])


def _types(run: RecordedRun) -> dict[str, str]:
    types: dict[str, set[str]] = defaultdict(set)
    for row in run.states.to_pylist():
        types[row["subject"] or ""].add(row["dtype"] or "")
    return {subject: ", ".join(sorted(dtypes)) for subject, dtypes in types.items()}


def _of_products(a: RecordedRun, b: RecordedRun) -> Iterator[FactDifference]:
    if not len(a.gemms) or not len(b.gemms):
        return
    texts = [
        ", ".join(f"{name.upper()} {percent(share)} %" for name, share in shares.items())
        for shares in (precision_shares(a), precision_shares(b))
    ]
    if texts[0] != texts[1]:
        yield FactDifference("coverage", *texts)
    for (what, before, after), layers in _changed(a, b).items():
        yield FactDifference(f"{what} {', '.join(folded(layers, most=_MOST_LAYERS))}", before, after)


def layers_with_other_rows(a: RecordedRun, b: RecordedRun) -> list[str]:
    """The layers that compute another number of rows in a step of b, such as with another batch size."""
    return [layer for (what, *_), layers in _changed(a, b).items() if what == _ROWS for layer in layers]


def _changed(a: RecordedRun, b: RecordedRun) -> dict[tuple[str, str, str], list[str]]:
    theirs = _of_layers(b)
    changed: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key, value in _of_layers(a).items():
        if theirs.get(key, value) != value:
            changed[key[0], value, theirs[key]].append(key[2])
    return changed


def _of_layers(run: RecordedRun) -> dict[tuple[str, str, str], str]:
    """Fact, scope and layer -> the value at the end of the run: rows in a step, the weight's size, and precisions."""
    products = at_the_end(run.gemms).to_pylist()
    facts: dict[tuple[str, str, str], str] = {}
    for row in products:
        if row["gemm"] == "fprop" and all(row[name] for name in ("macs", "n", "m", "k", "batch", "calls")):
            place = row["scope"] or "", row["layer"]
            facts.setdefault((_ROWS, *place), f"{row['n'] * row['batch'] * row['calls']:,}")
            facts.setdefault(("weight of", *place), f"{row['m']} x {row['k']}")
    precisions = {(f"{row['gemm']} of", row["scope"] or "", row["layer"]): row["precision"] or "" for row in products}
    return facts | {key: precision.upper() for key, precision in precisions.items()}
