"""Facts that differ between two runs."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import pyarrow.compute as pc
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
"""The facts that come first, in this order."""

_MOST_LAYERS = 3


def facts_that_differ(a: RecordedRun, b: RecordedRun) -> list[FactDifference]:
    """Compare the facts of the last process starts of two runs, then their matrix products."""
    ours, theirs = _settings(a), _settings(b)
    if not ours or not theirs:  # a log of plain nvidia-dlfw-inspect has none
        ours = theirs = {}
    found = [
        FactDifference(name, ours.get(name, ""), theirs.get(name, ""))
        for name in sorted({*ours, *theirs} - {"config_hash"}, key=_rank)
        if ours.get(name) != theirs.get(name)
    ]
    return [*found, *_of_states(a, b), *_of_products(a, b)]


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
    """The types of weights, gradients and the optimizer's state."""
    ours, theirs = (_types(run) for run in (a, b))
    for subject in ours:
        if ours[subject] != theirs.get(subject, ours[subject]):
            yield FactDifference(f"type of {subject.replace('_', ' ')}", ours[subject], theirs[subject])


def _types(run: RecordedRun) -> dict[str, str]:
    """Subject -> its types."""
    found: dict[str, set[str]] = defaultdict(set)
    for row in run.states.to_pylist():
        found[row["subject"] or ""].add(row["dtype"] or "")
    return {subject: ", ".join(sorted(types)) for subject, types in found.items()}


def _products(run: RecordedRun) -> list[dict[str, Any]]:
    columns = ["scope", "layer", "gemm", "precision"]
    return list(at_the_end(run.gemms).select(columns).to_pylist())


def _of_products(a: RecordedRun, b: RecordedRun) -> Iterator[FactDifference]:
    if not len(a.gemms) or not len(b.gemms):
        return
    shares = [precision_shares(run) for run in (a, b)]
    texts = [", ".join(f"{name.upper()} {percent(share)} %" for name, share in each.items()) for each in shares]
    if texts[0] != texts[1]:
        yield FactDifference("coverage", *texts)
    yield from _of_sizes(a, b)
    precision = [
        {(row["scope"] or "", row["layer"], row["gemm"]): row["precision"] or "" for row in _products(run)}
        for run in (a, b)
    ]
    changed: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key in precision[0]:
        ours, theirs = (found.get(key, "") for found in precision)
        if key in precision[1] and ours != theirs:
            changed[key[2], ours, theirs].append(key[1])
    for (gemm, ours, theirs), layers in changed.items():
        yield FactDifference(f"{gemm} of {_in_words(layers)}", ours.upper(), theirs.upper())


def _of_sizes(a: RecordedRun, b: RecordedRun) -> Iterator[FactDifference]:
    """The rows that layers compute in a step, such as with another batch size, and the sizes of their weights."""
    ours, theirs = _sizes(a), _sizes(b)
    changed: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    for key, size in ours.items():
        other = theirs.get(key, size)
        if size.rows != other.rows:
            changed["rows in a step of", f"{size.rows:,}", f"{other.rows:,}"].append(key[1])
        if size[1:] != other[1:]:
            one, two = (f"{each.outputs} x {each.inputs}" for each in (size, other))
            changed["weight of", one, two].append(key[1])
    for (what, one, two), layers in changed.items():
        yield FactDifference(f"{what} {_in_words(layers)}", one, two)


class _Size(NamedTuple):
    """A layer's product with its weight: rows of the input in a step, rows and columns of the weight."""

    rows: int
    outputs: int
    inputs: int


def _sizes(run: RecordedRun) -> dict[tuple[str, str], _Size]:
    """Scope and layer -> its size at the end of the run."""
    ran = at_the_end(run.gemms)
    ran = ran.filter(pc.and_(pc.equal(ran["gemm"], "fprop"), pc.greater(ran["macs"], 0)))
    found: dict[tuple[str, str], _Size] = {}
    for row in ran.select(["scope", "layer", "n", "m", "k", "batch", "calls"]).to_pylist():
        if all(row[name] for name in ("n", "m", "k", "batch", "calls")):
            size = _Size(row["n"] * row["batch"] * row["calls"], row["m"], row["k"])
            found.setdefault((row["scope"] or "", row["layer"]), size)
    return found


def layers_with_other_rows(a: RecordedRun, b: RecordedRun) -> list[str]:
    """The layers that compute another number of rows in a step of b, such as with another batch size."""
    theirs = _sizes(b)
    return [key[1] for key, size in _sizes(a).items() if key in theirs and theirs[key].rows != size.rows]


def _in_words(layers: Iterable[str]) -> str:
    return ", ".join(folded(layers, most=_MOST_LAYERS))
