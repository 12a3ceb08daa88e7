"""Compares recorded runs: their layers by name, their facts, and their values."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import yaml

from te_precision_callbacks.base.counts import group_by_key
from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.summary import precision_shares
from te_precision_callbacks.runs.tables import Subject, facts_at_end
from te_precision_callbacks.views.compare.departures import Search, Side
from te_precision_callbacks.views.compare.loss import compare_losses
from te_precision_callbacks.views.compare.origins import Order, partings
from te_precision_callbacks.views.compare.result import (
    ComparedVerdicts,
    Comparison,
    ComparisonError,
    FactDifference,
    Floor,
    Pairing,
)
from te_precision_callbacks.views.report.data import readable

if TYPE_CHECKING:
    from te_precision_callbacks.views.compare.comparison_page import ComparedNumbers

_TABLES = ("layers", "gemms", "operands", "plan", "series", "events")


def align(a: RecordedRun, b: RecordedRun) -> tuple[RecordedRun, str]:
    """Rename the layers of ``b`` if no name matches, but most names match after replacing a common prefix.

    Returns:
        ``b``, and a note about the names, empty without a change.
    """
    names_a = set(filter(None, pc.unique(a.series["layer"]).to_pylist()))
    names_b = set(filter(None, pc.unique(b.series["layer"]).to_pylist()))
    if names_a & names_b:
        return b, ""
    ends_of_b = {end: name for name in names_b for end in _ends(name)}
    prefixes: Counter[tuple[str, str]] = Counter()
    for name in names_a:
        for end in _ends(name):
            if end in ends_of_b:
                prefixes[name.removesuffix(end), ends_of_b[end].removesuffix(end)] += 1
                break
    for (prefix_a, prefix_b), count in prefixes.most_common(1):
        if 2 * count >= min(len(names_a), len(names_b)):
            tables = {name: _with_prefix(getattr(b, name), prefix_a, prefix_b) for name in _TABLES}
            paired = f"{count} layers are paired without their prefixes"
            return replace(b, **tables), f"{paired}: {prefix_b!r} in {b.path}, {prefix_a!r} in {a.path}."
    return b, ""


def _ends(name: str) -> list[str]:
    """The name without more and more of its first parts."""
    parts = name.split(".")
    return [".".join(parts[number:]) for number in range(len(parts))]


def _with_prefix(table: pa.Table, new: str, old: str) -> pa.Table:
    number = table.schema.get_field_index("layer")
    field = table.schema.field(number)
    names = pc.replace_substring_regex(table["layer"].cast(pa.string()), f"^{re.escape(old)}", new)
    return table.set_column(number, field, names.cast(field.type))


_OF_EVERY_RUN = re.compile(
    "run_id|files|segment|parent_segment|status|host|pid|pid_namespace|pid_started|launch|config_hash|.*_at|first_.*|last_.*"
)
"""Facts that differ between any two runs."""

_FIRST = ("config", "versions", "recipe", "recipes", "environment")

_MOST_LAYERS = 3
_ROWS = "rows in a step of"


def facts_that_differ(a: RecordedRun, b: RecordedRun) -> list[FactDifference]:
    """Compare the facts of the last process starts of two runs, then their matrix products."""
    differences = []
    for facts_of in (_settings, _precision):
        facts_a = facts_of(a)
        facts_b = facts_of(b)
        if facts_a and facts_b:  # a log of plain nvidia-dlfw-inspect has none
            for name in sorted(facts_a.keys() | facts_b.keys(), key=_rank):
                text_a = facts_a.get(name, "")
                text_b = facts_b.get(name, "")
                if text_a != text_b:
                    differences.append(FactDifference(name, text_a, text_b))
    for (what, text_a, text_b), layers in _changed_layer_facts(a, b).items():
        name = f"{what} {', '.join(fold_names(layers, most=_MOST_LAYERS))}"
        differences.append(FactDifference(name, text_a, text_b))
    return differences


def _rank(name: str) -> tuple[int, str]:
    part = name.partition(".")[0]
    return _FIRST.index(part) if part in _FIRST else len(_FIRST), name


def _settings(run: RecordedRun) -> dict[str, str]:
    facts = readable(run.segments[-1].facts) if run.segments else {}
    config = yaml.safe_load(facts.pop("config_text", None) or "{}")
    return dict(_flat({"config": config, **{name: facts[name] for name in facts if not _OF_EVERY_RUN.fullmatch(name)}}))


def _flat(facts: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for name, value in facts.items():
        if isinstance(value, Mapping):
            for path, text in _flat(value):
                yield f"{name}.{path}", text
        elif value is not None:
            yield str(name), value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def _precision(run: RecordedRun) -> dict[str, str]:
    """The types of the training's state, and the shares of the precisions."""
    texts = {}
    for subject, types in group_by_key((row["subject"], row["dtype"]) for row in run.states.to_pylist()).items():
        texts[f"type of {(subject or '').replace('_', ' ')}"] = ", ".join(sorted({dtype or "" for dtype in types}))
    shares = precision_shares(run)
    if shares:
        texts["coverage"] = ", ".join(f"{name.upper()} {percent(share)} %" for name, share in shares.items())
    return texts


def _changed_layer_facts(a: RecordedRun, b: RecordedRun) -> dict[tuple[str, str, str], list[str]]:
    """Return fact, text of A, text of B -> the layers."""
    facts_b = _layer_facts(b)
    return group_by_key(
        ((what, text, facts_b[what, scope, layer]), layer)
        for (what, scope, layer), text in _layer_facts(a).items()
        if facts_b.get((what, scope, layer), text) != text
    )


def _layer_facts(run: RecordedRun) -> dict[tuple[str, str, str], str]:
    """Fact, scope and layer -> the value at the end of the run: rows in a step, the weight's size, and precisions."""
    facts: dict[tuple[str, str, str], str] = {}
    for row in facts_at_end(run.gemms).to_pylist():
        layer = (row["scope"] or "", row["layer"])
        if row["gemm"] == "fprop" and all(row[name] for name in ("macs", "n", "m", "k", "batch", "calls")):
            facts.setdefault((_ROWS, *layer), f"{row['n'] * row['batch'] * row['calls']:,}")
            facts.setdefault(("weight of", *layer), f"{row['m']} x {row['k']}")
        facts[(f"{row['gemm']} of", *layer)] = (row["precision"] or "").upper()
    return facts


def compare(
    a: RecordedRun,
    b: RecordedRun,
    *,
    noise: Sequence[RecordedRun] = (),
    lasting: int = 5,
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
    first, other, *further_sides = (Side(run, _name(run, runs)) for run in runs)
    paired = [subject for subject in first.subjects if subject in other.subjects]
    apart = _explain_unpaired(first, other)
    reasons = [] if apart else [_explain_unpaired(first, side) for side in further_sides]
    for reason in filter(None, reasons if paired else [apart]):
        raise ComparisonError(reason)
    collect = None if numbers is None else numbers.collect_from(first, other)
    search = Search(first, other, further_sides, lasting, collect)
    departures = search.run(paired)
    if search.without_steps == len(paired):
        raise _without_common_steps(first, other, len(paired))
    pairing = _pairing(first, other, paired, search)
    # Published bounds are for equal batches.
    shares = ({}, {}) if pairing.with_other_rows else (precision_shares(a), precision_shares(b))
    order = Order([a, b])
    same_run = (a.path.resolve(), a.run_id) == (b.path.resolve(), b.run_id)
    notes = list(filter(None, rename))
    for side in (first, other, *further_sides):
        notes += [f"{side.name}: {note}" for note in side.run.notes]
    return Comparison(
        a=first.name,
        b=other.name,
        facts=tuple(facts_that_differ(a, b)),
        pairing=pairing,
        lasting=lasting,
        floor=Floor(tuple(side.name for side in further_sides), search.without_noise) if further_sides else None,
        ordered=order.seen,
        parted=tuple(partings(departures, order)),
        all_equal=search.all_equal,
        loss=compare_losses(a, b, noise, shares),
        notes=tuple(notes),
        same_run=same_run,
        verdicts=None if same_run else ComparedVerdicts(a, b),
        layers_apart=apart and f"{apart} Only trainer metrics are compared.",
    )


def _without_common_steps(first: Side, other: Side, paired: int) -> ComparisonError:
    spans = []
    for side in (first, other):
        series = side.run.series
        spans.append(f"{side.name} has steps {pc.min(series['first'])} to {pc.max(series['last'])}")
    return ComparisonError(
        f"{first.name} and {other.name} have {paired} series in common, but no common steps:"
        f" {', '.join(spans)}.{first.run.notes_sentence}{other.run.notes_sentence}"
    )


def _name(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
    has_other_runs = len({other.run_id for other in runs if other.path == run.path}) > 1
    if has_other_runs:
        return f"{run.path} ({run.run_id})"
    return str(run.path)


def _explain_unpaired(first: Side, other: Side) -> str:
    """Return why no series of a layer pairs, and the remedy; empty if one does."""
    if any(subject.layer for subject in first.subjects if subject in other.subjects):
        return ""
    notes = first.run.notes_sentence + other.run.notes_sentence
    for side in (first, other):
        if not side.layers:
            remedy = "Record it with a config that logs statistics, such as LogTensorStats."
            if "te" not in side.run.layers["family"].to_pylist():
                remedy = (
                    "It has no Transformer Engine layers. For the same layers as in the FP8 run, call"
                    " te_precision_callbacks.accelerate.convert_to_te(model) before creating the optimizer."
                )
            return f"{side.name} has no statistics of layers, so no layer can be compared. {remedy}{notes}"
    names = [name for _, name in first.layers]
    other_names = [name for _, name in other.layers]
    if set(names).intersection(other_names):
        return (
            f"{first.name} and {other.name} have common layers, but no common statistics. Record statistics that do not"
            f" depend on the recipe, such as std and cur_amax.{notes}"
        )
    return (
        f"{first.name} and {other.name} have no common layers: one has {names[0]!r}, the other"
        f" {other_names[0]!r}.{notes}"
    )


def _pairing(first: Side, other: Side, paired: Sequence[Subject], search: Search) -> Pairing:
    statistics_a = {subject.statistic for subject in first.subjects}
    statistics_b = {subject.statistic for subject in other.subjects}
    resized: list[str] = []
    for (what, _, _), layers in _changed_layer_facts(first.run, other.run).items():
        if what == _ROWS:
            resized += layers
    return Pairing(
        series=len(paired) - search.without_steps,
        without_steps=search.without_steps,
        only_a=len(first.subjects) - len(paired),
        only_b=len(other.subjects) - len(paired),
        layers=len(first.layers.keys() & other.layers.keys()),
        layers_only_a=tuple(name for scope, name in first.layers if (scope, name) not in other.layers),
        layers_only_b=tuple(name for scope, name in other.layers if (scope, name) not in first.layers),
        statistics_only_a=tuple(sorted(statistics_a - statistics_b)),
        statistics_only_b=tuple(sorted(statistics_b - statistics_a)),
        first=int(search.iterations[0]),
        last=int(search.iterations[-1]),
        with_other_rows=tuple(resized),
        steps=len(search.iterations),
    )
