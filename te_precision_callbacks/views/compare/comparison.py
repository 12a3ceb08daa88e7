"""Compares recorded runs: their layers by name, their facts, and their values."""

from __future__ import annotations

import itertools
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.runs.summary import precision_shares
from te_precision_callbacks.runs.tables import facts_at_end
from te_precision_callbacks.views.compare.departures import Search, Side, side_of_run
from te_precision_callbacks.views.compare.loss import compare_losses
from te_precision_callbacks.views.compare.origins import Order, partings
from te_precision_callbacks.views.compare.result import (
    Comparison,
    ComparisonError,
    FactDifference,
    Floor,
    Pairing,
    compare_verdicts,
)
from te_precision_callbacks.views.report.facts import readable

if TYPE_CHECKING:
    from te_precision_callbacks.views.compare.comparison_page import ComparedNumbers

_TABLES = ("layers", "gemms", "operands", "plan", "series", "events")

_MOST_PREFIXES = 8


def align(a: RecordedRun, b: RecordedRun) -> tuple[RecordedRun, str]:
    """Rename the layers of ``b`` if no name matches, but most names match after replacing a common prefix.

    Returns:
        ``b``, and a note about the names, empty without a change.
    """
    ours = _layers(a)
    theirs = _layers(b)
    if not ours or not theirs or ours & theirs:
        return b, ""

    def common(pair: tuple[str, str]) -> tuple[int, int]:
        return len(_without(ours, pair[0]) & _without(theirs, pair[1])), -len("".join(pair))

    own, other = max(itertools.product(_prefixes(ours), _prefixes(theirs)), key=common)
    count, _ = common((own, other))
    if 2 * count < min(len(ours), len(theirs)):
        return b, ""

    def rename(name: str) -> str:
        if name.startswith(other):
            return own + name[len(other) :]
        return name

    note = f"{count} layers are paired without their prefixes: {other!r} in {b.path}, {own!r} in {a.path}."
    return replace(b, **{name: _with_layers(getattr(b, name), rename) for name in _TABLES}), note


def _layers(run: RecordedRun) -> set[str]:
    return set(filter(None, pc.unique(run.series["layer"]).to_pylist()))


def _prefixes(names: Collection[str]) -> list[str]:
    """Return the prefixes that at least half of the names have, with a final dot; first the empty prefix."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        counts.update(".".join(parts[:end]) + "." for end in range(1, min(len(parts), _MOST_PREFIXES)))
    return ["", *(prefix for prefix, count in counts.items() if 2 * count >= len(names))]


def _without(names: Collection[str], prefix: str) -> set[str]:
    return {name[len(prefix) :] for name in names if name.startswith(prefix)}


def _with_layers(table: pa.Table, rename: Callable[[str], str]) -> pa.Table:
    place = table.schema.get_field_index("layer")
    if place < 0 or not len(table):
        return table
    column = pa.array([name and rename(name) for name in table["layer"].to_pylist()], pa.string())
    return table.set_column(place, table.schema.field(place), column.cast(table.schema.field(place).type))


_OF_EVERY_RUN = frozenset(
    {"run_id", "segment", "parent_segment", "status", "host", "pid", "pid_namespace", "pid_started"}
)
"""Facts that differ between any two runs."""

_FIRST = ("config", "versions", "recipe", "recipes", "environment")

_MOST_LAYERS = 3
_ROWS = "rows in a step of"


def facts_that_differ(a: RecordedRun, b: RecordedRun) -> list[FactDifference]:
    """Compare the facts of the last process starts of two runs, then their matrix products."""
    ours = _settings(a)
    theirs = _settings(b)
    if not ours or not theirs:  # a log of plain nvidia-dlfw-inspect has none
        ours = theirs = {}
    names = dict(ours.items() ^ theirs.items()).keys() - {"config_hash"}
    settings = [FactDifference(name, ours.get(name, ""), theirs.get(name, "")) for name in sorted(names, key=_rank)]
    return [*settings, *_state_differences(a, b), *_product_differences(a, b)]


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
    facts = readable(run.segments[-1].facts) if run.segments else {}
    config = yaml.safe_load(facts.pop("config_text", None) or "{}")
    return {**dict(_flat("config", config)), **dict(_flat("", facts))}


def _state_differences(a: RecordedRun, b: RecordedRun) -> Iterator[FactDifference]:
    ours = _types(a)
    theirs = _types(b)
    for subject in ours:
        if ours[subject] != theirs.get(subject, ours[subject]):
            yield FactDifference(f"type of {subject.replace('_', ' ')}", ours[subject], theirs[subject])


def _types(run: RecordedRun) -> dict[str, str]:
    types: dict[str, set[str]] = defaultdict(set)
    for row in run.states.to_pylist():
        types[row["subject"] or ""].add(row["dtype"] or "")
    return {subject: ", ".join(sorted(dtypes)) for subject, dtypes in types.items()}


def _shares_text(run: RecordedRun) -> str:
    return ", ".join(f"{name.upper()} {percent(share)} %" for name, share in precision_shares(run).items())


def _product_differences(a: RecordedRun, b: RecordedRun) -> Iterator[FactDifference]:
    if not len(a.gemms) or not len(b.gemms):
        return
    of_a = _shares_text(a)
    of_b = _shares_text(b)
    if of_a != of_b:
        yield FactDifference("coverage", of_a, of_b)
    for (what, before, after), layers in _changed_layer_facts(a, b).items():
        yield FactDifference(f"{what} {', '.join(fold_names(layers, most=_MOST_LAYERS))}", before, after)


def _changed_layer_facts(a: RecordedRun, b: RecordedRun) -> dict[tuple[str, str, str], list[str]]:
    theirs = _layer_facts(b)
    changed: dict[tuple[str, str, str], list[str]] = {}
    for key, value in _layer_facts(a).items():
        what, _, layer = key
        if theirs.get(key, value) != value:
            changed.setdefault((what, value, theirs[key]), []).append(layer)
    return changed


def _layer_facts(run: RecordedRun) -> dict[tuple[str, str, str], str]:
    """Fact, scope and layer -> the value at the end of the run: rows in a step, the weight's size, and precisions."""
    facts: dict[tuple[str, str, str], str] = {}
    precisions: dict[tuple[str, str, str], str] = {}
    for row in facts_at_end(run.gemms).to_pylist():
        place = row["scope"] or "", row["layer"]
        precisions[(f"{row['gemm']} of", *place)] = (row["precision"] or "").upper()
        if row["gemm"] == "fprop" and all(row[name] for name in ("macs", "n", "m", "k", "batch", "calls")):
            facts.setdefault((_ROWS, *place), f"{row['n'] * row['batch'] * row['calls']:,}")
            facts.setdefault(("weight of", *place), f"{row['m']} x {row['k']}")
    return facts | precisions


LASTING = 5


def compare(
    a: RecordedRun,
    b: RecordedRun,
    *,
    noise: Sequence[RecordedRun] = (),
    lasting: int = LASTING,
    numbers: ComparedNumbers | None = None,
) -> Comparison:
    """Compare two runs.

    Values pair by scope, layer, tensor, statistic and step. Statistics of quantization pair only within a recipe.
    Raises ComparisonError if a run has no values, or nothing pairs.

    Args:
        noise: baseline runs that differ from a only by the seed, for example: their differences are the noise floor.
        lasting: the minimum number of steps of a difference.
        numbers: collects values for :func:`te_precision_callbacks.views.compare.write_comparison`.
    """
    if lasting < 1:
        raise ComparisonError(f"lasting= must be 1 step or more, not {lasting}.")
    (b, *noise), rename = zip(*(align(a, run) for run in (b, *noise)), strict=True)
    runs = (a, b, *noise)
    first, other, *others = (side_of_run(run, _name(run, runs)) for run in runs)
    paired = [subject for subject in first.subjects if subject in other.series or subject in other.scalars]
    apart = _explain_unpaired(first, other)
    for reason in (apart if not paired else "", *(_explain_unpaired(first, side) for side in others if not apart)):
        if reason:
            raise ComparisonError(reason)
    order = Order([a, b])
    collect = None if numbers is None else numbers.collect_from(first, other)
    search = Search(first, other, others, lasting, collect)
    departures = list(search.run(paired))
    resized = _resized(a, b)
    # Published bounds are for equal batches.
    shares = ({}, {}) if resized else (precision_shares(a), precision_shares(b))
    if search.without_steps == len(paired):
        raise ComparisonError(
            f"{first.name} and {other.name} have {len(paired)} series in common, but no common steps: {_span(first)},"
            f" {_span(other)}.{first.run.notes_sentence}{other.run.notes_sentence}"
        )
    same_run = (a.path.resolve(), a.run_id) == (b.path.resolve(), b.run_id)
    notes = list(filter(None, rename))
    for run in runs:
        notes += [f"{_name(run, runs)}: {note}" for note in run.notes]
    return Comparison(
        first.name,
        other.name,
        tuple(facts_that_differ(a, b)),
        _pairing(first, other, paired, search, resized),
        lasting,
        Floor(tuple(side.name for side in others), search.without_noise) if others else None,
        order.seen,
        tuple(partings(departures, order)),
        search.all_equal,
        compare_losses(first, other, others, shares),
        tuple(notes),
        same_run,
        None if same_run else compare_verdicts(a, b),
        apart and f"{apart} Only trainer metrics are compared.",
    )


def _resized(a: RecordedRun, b: RecordedRun) -> list[str]:
    """Return the layers with different numbers of rows in a step, for example from another batch size."""
    resized: list[str] = []
    for (what, *_), layers in _changed_layer_facts(a, b).items():
        if what == _ROWS:
            resized += layers
    return resized


def _name(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
    several = any(other.path == run.path and other.run_id != run.run_id for other in runs)
    if several:
        return f"{run.path} ({run.run_id})"
    return str(run.path)


def _explain_unpaired(first: Side, other: Side) -> str:
    notes = first.run.notes_sentence + other.run.notes_sentence
    if any(subject.layer for subject in first.series if subject in other.series):
        return ""
    ours = _layers_of(first)
    theirs = _layers_of(other)
    for side, layers in ((first, ours), (other, theirs)):
        if not layers:
            remedy = "Record it with a config that logs statistics, such as LogTensorStats."
            if "te" not in side.run.layers["family"].to_pylist():
                remedy = (
                    "It has no Transformer Engine layers. For the same layers as in the FP8 run, call"
                    " te_precision_callbacks.accelerate.convert_to_te(model) before creating the optimizer."
                )
            return f"{side.name} has no statistics of layers, so no layer can be compared. {remedy}{notes}"
    _, own_names = zip(*ours, strict=True)
    _, other_names = zip(*theirs, strict=True)
    if set(own_names).intersection(other_names):
        return (
            f"{first.name} and {other.name} have common layers, but no common statistics. Record statistics that do not"
            f" depend on the recipe, such as std and cur_amax.{notes}"
        )
    return (
        f"{first.name} and {other.name} have no common layers: one has {own_names[0]!r}, the other"
        f" {other_names[0]!r}.{notes}"
    )


_Layers = dict[tuple[str, str], None]
"""Scope and name of layers, in the order of the records."""


def _layers_of(side: Side) -> _Layers:
    return dict.fromkeys((subject.scope, subject.layer) for subject in side.series if subject.layer)


def _names_only_in(layers: _Layers, others: _Layers) -> tuple[str, ...]:
    return tuple(name for scope, name in layers if (scope, name) not in others)


def _span(side: Side) -> str:
    first = side.run.series["first"].to_pylist()
    last = side.run.series["last"].to_pylist()
    return f"{side.name} has steps {min(first)} to {max(last)}"


def _pairing(first: Side, other: Side, paired: Sequence[Subject], search: Search, resized: Sequence[str]) -> Pairing:
    ours = set(first.subjects) - set(paired)
    theirs = set(other.subjects) - set(paired)
    layers_a = _layers_of(first)
    layers_b = _layers_of(other)
    statistics_a = {subject.statistic for subject in first.subjects}
    statistics_b = {subject.statistic for subject in other.subjects}
    return Pairing(
        len(paired) - search.without_steps,
        search.without_steps,
        len(ours),
        len(theirs),
        len(layers_a.keys() & layers_b.keys()),
        _names_only_in(layers_a, layers_b),
        _names_only_in(layers_b, layers_a),
        tuple(sorted(statistics_a - statistics_b)),
        tuple(sorted(statistics_b - statistics_a)),
        int(search.iterations[0]),
        int(search.iterations[-1]),
        tuple(resized),
        len(search.iterations),
    )
