"""Compares recorded runs."""

from __future__ import annotations

from collections.abc import Sequence

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.answers import precision_shares
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.aligning import align
from te_precision_callbacks.views.compare.compared_numbers import ComparedNumbers
from te_precision_callbacks.views.compare.departures import Search
from te_precision_callbacks.views.compare.differing_facts import facts_that_differ, layers_with_other_rows
from te_precision_callbacks.views.compare.loss import compare_losses
from te_precision_callbacks.views.compare.new_findings import compare_verdicts
from te_precision_callbacks.views.compare.order import Order
from te_precision_callbacks.views.compare.origins import partings
from te_precision_callbacks.views.compare.result import Comparison, ComparisonError, Floor, Pairing
from te_precision_callbacks.views.compare.sides import Side, side_of_run

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

    Values pair by scope, layer, tensor, statistic and step. Statistics of quantized tensors pair only within a recipe,
    statistics of the tensors themselves always. Raises ComparisonError if a run has no values, or nothing pairs.

    Args:
        noise: baseline runs that differ from a by the seed, for example: their differences are the noise floor.
        lasting: the minimum number of steps of a difference.
        numbers: collects values for :func:`te_precision_callbacks.views.compare.write_comparison`.
    """
    if lasting < 1:
        raise ComparisonError(f"lasting= must be 1 step or more, not {lasting}.")
    (b, *noise), renamed = zip(*(align(a, run) for run in (b, *noise)), strict=True)
    runs = (a, b, *noise)
    first, other, *others = (side_of_run(run, _name(run, runs)) for run in runs)
    theirs = set(other.subjects)
    paired = [subject for subject in first.subjects if subject in theirs]
    apart = _layers_apart(first, other)
    for reason in (apart if not paired else "", *(_layers_apart(first, side) for side in others if not apart)):
        if reason:
            raise ComparisonError(reason)
    order = Order([a, b])
    collect = None if numbers is None else numbers.collect_from(first, other)
    search = Search(first, other, others, lasting, collect)
    departures = list(search.run(paired))
    resized = layers_with_other_rows(a, b)
    shares = ({}, {}) if resized else (precision_shares(a), precision_shares(b))  # no bound is known for other batches
    if search.without_steps == len(paired):
        raise ComparisonError(
            f"{first.name} and {other.name} have {len(paired)} series in common, but no step of any: {_span(first)},"
            f" {_span(other)}.{first.run.notes_in_words}{other.run.notes_in_words}"
        )
    same_run = (a.path.resolve(), a.run_id) == (b.path.resolve(), b.run_id)
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
        (*filter(None, renamed), *(f"{_name(run, runs)}: {note}" for run in runs for note in run.notes)),
        same_run,
        None if same_run else compare_verdicts(a, b),
        apart and f"{apart} Only the numbers of the trainer are compared.",
    )


def _name(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
    several = any(other.path == run.path and other.run_id != run.run_id for other in runs)
    return f"{run.path} ({run.run_id})" if several else str(run.path)


def _layers_apart(first: Side, other: Side) -> str:
    notes = first.run.notes_in_words + other.run.notes_in_words
    if any(subject.layer for subject in first.series if subject in other.series):
        return ""
    for side in (first, other):
        if not any(subject.layer for subject in side.series):
            remedy = "Record it with a config that logs statistics, such as LogTensorStats."
            if "te" not in side.run.layers["family"].to_pylist():
                remedy = (
                    "It has no layer of Transformer Engine: without FP8, Accelerate and the Hugging Face Trainer"
                    " convert none. te_precision_callbacks.accelerate.convert_to_te(model), called before the optimizer"
                    " is made, gives it the layers of the run in FP8."
                )
            return f"{side.name} has no statistics of layers, so no layer can be compared. {remedy}{notes}"
    shown = [next(subject.layer for subject in side.series if subject.layer) for side in (first, other)]
    if any(subject.layer in {theirs.layer for theirs in other.series} for subject in first.series if subject.layer):
        return (
            f"{first.name} and {other.name} have layers in common, but no statistic of one: those of the tensors"
            f" themselves, such as std and cur_amax, pair whatever the recipe.{notes}"
        )
    return f"{first.name} and {other.name} share no layer; one has {shown[0]!r}, the other {shown[1]!r}.{notes}"


def _span(side: Side) -> str:
    first, last = side.run.series["first"].to_pylist(), side.run.series["last"].to_pylist()
    return f"{side.name} has steps {min(first)} to {max(last)}"


def _pairing(first: Side, other: Side, paired: Sequence[Subject], search: Search, resized: Sequence[str]) -> Pairing:
    ours, theirs = set(first.subjects) - set(paired), set(other.subjects) - set(paired)
    layers = [
        {(subject.scope, subject.layer): None for subject in side.series if subject.layer} for side in (first, other)
    ]
    statistics = [{subject.statistic for subject in side.subjects} for side in (first, other)]
    return Pairing(
        len(paired) - search.without_steps,
        search.without_steps,
        len(ours),
        len(theirs),
        sum(layer in layers[1] for layer in layers[0]),
        tuple(name for scope, name in layers[0] if (scope, name) not in layers[1]),
        tuple(name for scope, name in layers[1] if (scope, name) not in layers[0]),
        tuple(sorted(statistics[0] - statistics[1])),
        tuple(sorted(statistics[1] - statistics[0])),
        int(search.iterations[0]),
        int(search.iterations[-1]),
        tuple(resized),
        len(search.iterations),
    )
