"""The facts in which two runs differ: what ran, before what came of it."""

from __future__ import annotations

import difflib
import json
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.answers import precision_shares
from te_precision_callbacks.runs.tables import at_the_end
from te_precision_callbacks.views.compare.result import FactDifference
from te_precision_callbacks.views.compare.tensor_sizes import sizes_of
from te_precision_callbacks.views.report.facts import readable

_OF_EVERY_RUN = frozenset(
    {"run_id", "segment", "parent_segment", "status", "host", "pid", "pid_namespace", "pid_started", "launch"}
)
"""Facts that no two runs share, beside times."""

_FIRST = ("config", "versions", "recipe", "recipes", "environment")
"""The facts that come first, in this order."""

_COMMENT = re.compile(r"(?:^|\s)#[^'\"]*$|^\s*#.*")
"""A comment of YAML; one behind a value only without quotes, since a # can be in a quoted text."""

_MOST_LINES = 40
_MOST_LAYERS = 3


def facts_that_differ(a: RecordedRun, b: RecordedRun) -> list[FactDifference]:
    """The facts of the last segments of two runs that differ, then those of their matrix products."""
    ours, theirs = (dict(_flat("", readable(run.segments[-1].facts))) if run.segments else {} for run in (a, b))
    if not ours or not theirs:  # a log of plain nvidia-dlfw-inspect has none
        ours = theirs = {}
    found = [*_config(ours, theirs)]
    names = sorted({*ours, *theirs} - {"config_text", "config_hash"}, key=_rank)
    found += [
        FactDifference(name, ours.get(name, ""), theirs.get(name, ""))
        for name in names
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


def _config(ours: Mapping[str, str], theirs: Mapping[str, str]) -> Iterator[FactDifference]:
    """The lines of the configs that differ."""
    one, other = (_without_comments(facts.get("config_text", "")) for facts in (ours, theirs))
    if one == other:
        if ours.get("config_hash") != theirs.get("config_hash"):
            yield FactDifference("config_hash", ours.get("config_hash", ""), theirs.get("config_hash", ""))
        return
    number = 0
    places = _places(one), _places(other)
    for kind, start, end, first, last in difflib.SequenceMatcher(None, one, other, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        for place in range(max(end - start, last - first)):
            number += 1
            if number <= _MOST_LINES:
                yield FactDifference(
                    "config",
                    places[0][start + place] if start + place < end else "",
                    places[1][first + place] if first + place < last else "",
                )
    if number > _MOST_LINES:
        yield FactDifference("config", *(f"{number - _MOST_LINES} more lines that differ" for _ in range(2)))


def _without_comments(text: str) -> list[str]:
    """The lines of a YAML that hold something, without comments."""
    lines = (_COMMENT.sub("", line).rstrip() for line in text.splitlines())
    return [line for line in lines if line]


def _places(lines: Sequence[str]) -> list[str]:
    """Each line of a YAML after the keys that it is under; lists and plugins' names are no such keys."""
    found = []
    above: list[tuple[int, str]] = []
    for line in lines:
        text = line.strip()
        indent = len(line) - len(line.lstrip()) + text.startswith("- ")  # an item may be as far left as its list's key
        while above and above[-1][0] >= indent:
            above.pop()
        keys = " / ".join(key for _, key in above if key)
        found.append(f"{keys}: {text}" if keys else text)
        name = text.removeprefix("- ")
        key = name.removesuffix(":") if name.endswith(":") and name != "transformer_engine:" else ""
        above.append((indent, name if text.startswith("- ") and not key else key))
    return found


def _of_states(a: RecordedRun, b: RecordedRun) -> Iterator[FactDifference]:
    """The types of what is kept: weights, gradients, the optimizer's state."""
    ours, theirs = (_types(run) for run in (a, b))
    for subject in ours:
        if ours[subject] != theirs.get(subject, ours[subject]):
            yield FactDifference(f"type of {subject.replace('_', ' ')}", ours[subject], theirs[subject])


def _types(run: RecordedRun) -> dict[str, str]:
    """What is kept -> its types."""
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
    ours, theirs = sizes_of(a), sizes_of(b)
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


def _in_words(layers: Iterable[str]) -> str:
    return ", ".join(folded(layers, most=_MOST_LAYERS))
