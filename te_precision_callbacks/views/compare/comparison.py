"""Compares recorded runs."""

from __future__ import annotations

from collections.abc import Sequence

from te_precision_callbacks.runs import RecordedRun
from te_precision_callbacks.runs.answers import precision_shares
from te_precision_callbacks.runs.index import Subject
from te_precision_callbacks.views.compare.aligning import align
from te_precision_callbacks.views.compare.compared_numbers import ComparedNumbers
from te_precision_callbacks.views.compare.departures import Search
from te_precision_callbacks.views.compare.differing_facts import facts_that_differ
from te_precision_callbacks.views.compare.errors import ComparisonError
from te_precision_callbacks.views.compare.loss import compare_losses
from te_precision_callbacks.views.compare.new_findings import compare_verdicts
from te_precision_callbacks.views.compare.order import Order
from te_precision_callbacks.views.compare.origins import partings
from te_precision_callbacks.views.compare.result import Comparison, Floor, Pairing
from te_precision_callbacks.views.compare.sides import Side, side_of_run, side_of_step
from te_precision_callbacks.views.compare.tensor_sizes import Sizes

LASTING = 5
"""The steps that a difference must last."""


def compare(
    a: RecordedRun,
    b: RecordedRun | None = None,
    *,
    noise: Sequence[RecordedRun] = (),
    steps: tuple[int, int] | None = None,
    lasting: int = LASTING,
    numbers: ComparedNumbers | None = None,
) -> Comparison:
    """Compare two runs, or two steps of one run.

    Numbers pair by scope, layer, tensor, statistic and step. Statistics of the quantized tensors of different recipes
    do not pair; those of the tensors themselves do.

    Args:
        a: the reference.
        b: the other run; None with ``steps``.
        noise: runs that differ from a ordinarily, such as in the seed alone: they say how much each statistic does.
        steps: two iterations of ``a``: the ``lasting`` steps from each on are compared. What changes between the first
            stretch and the one right behind it is the noise.
        lasting: the steps for which a difference must last to count.
        numbers: keeps what is compared, for :func:`te_precision_callbacks.views.compare.write_comparison`.

    Raises:
        ComparisonError: a run has no numbers, nothing pairs, or there is no such step.
    """
    if lasting < 1:
        raise ComparisonError(f"lasting= must be 1 step or more, not {lasting}.")
    renamed: list[str] = []
    if b is not None:
        (b, note), *more = (align(a, run) for run in (b, *noise))
        noise, renamed = [run for run, _ in more], [text for text in (note, *(text for _, text in more)) if text]
    one, other, others = _sides(a, b, noise, steps, lasting)
    theirs = set(other.subjects)
    paired = [subject for subject in one.subjects if subject in theirs]
    apart = _layers_apart(one, other)
    for reason in (apart if not paired else "", *(_layers_apart(one, side) for side in others if not apart)):
        if reason:
            raise ComparisonError(reason)
    order = Order([a, *([] if b is None else [b])])
    sizes = Sizes(a, a if b is None else b)
    search = Search(one, other, others, lasting, sizes, None if numbers is None else numbers.taking(one, other, paired))
    found = list(search.run(paired, {subject: order.place(subject) for subject in paired}))
    comparable = not sizes.with_other_rows  # of losses of other batches nothing is known
    shares = (precision_shares(a), precision_shares(a if b is None else b)) if comparable else ({}, {})
    if search.without_steps == len(paired):
        raise ComparisonError(
            f"{one.name} and {other.name} have {len(paired)} series in common, but no step of any: {_span(one)},"
            f" {_span(other)}.{one.run.notes_in_words}{other.run.notes_in_words}"
        )
    same_run = b is not None and (a.path.resolve(), a.run_id) == (b.path.resolve(), b.run_id)
    return Comparison(
        one.name,
        other.name,
        () if b is None else tuple(facts_that_differ(a, b)),
        _pairing(one, other, paired, search),
        lasting,
        Floor(tuple(side.name for side in others), search.without_noise) if others else None,
        order.seen,
        tuple(partings(found, order)),
        search.first_unequal,
        compare_losses(one, other, others, shares) if steps is None else None,
        (*renamed, *_notes(a, b, noise)),
        same_run,
        None if same_run or b is None else compare_verdicts(a, b),
        steps,
        apart and f"{apart} Only the numbers of the trainer are compared.",
    )


def _name(run: RecordedRun, runs: Sequence[RecordedRun]) -> str:
    """What a run is called among those that are compared: its path, with its own name where another run has that."""
    several = any(each.path == run.path and each.run_id != run.run_id for each in runs)
    return f"{run.path} ({run.run_id})" if several else str(run.path)


def _sides(
    a: RecordedRun,
    b: RecordedRun | None,
    noise: Sequence[RecordedRun],
    steps: tuple[int, int] | None,
    lasting: int,
) -> tuple[Side, Side, list[Side]]:
    """The two sides, and those of the noise."""
    if b is not None and steps is None:
        runs = (a, b, *noise)
        one, other, *others = (side_of_run(run, _name(run, runs)) for run in runs)
        return one, other, others
    if b is not None or noise:
        raise ComparisonError("Two steps are those of one run, which is compared without another one or noise.")
    if steps is None:
        raise ComparisonError("Nothing to compare with: give a second run, or two steps of this one.")
    return _of_steps(a, steps, lasting)


def _of_steps(run: RecordedRun, steps: tuple[int, int], lasting: int) -> tuple[Side, Side, list[Side]]:
    """The stretches from two steps on, and as noise the one behind the first."""
    if steps[0] == steps[1]:
        raise ComparisonError(f"Step {steps[0]} is compared with itself; give two steps.")
    one, other = (side_of_step(run, step, lasting) for step in steps)
    return one, other, [side_of_step(run, steps[0], lasting, behind=True)]


def _layers_apart(one: Side, other: Side) -> str:
    """Why no layer of one side can be compared with the other, and what to do; empty if one can."""
    notes = one.run.notes_in_words + other.run.notes_in_words
    if any(subject.layer for subject in one.series if subject in other.series):
        return ""
    for side in (one, other):
        if not any(subject.layer for subject in side.series):
            remedy = "Record it with a config that logs statistics, such as LogTensorStats."
            if "te" not in side.run.layers["family"].to_pylist():
                remedy = (
                    "It has no layer of Transformer Engine: without FP8, Accelerate and the Hugging Face Trainer"
                    " convert none. te_precision_callbacks.accelerate.convert_to_te(model), called before the optimizer"
                    " is made, gives it the layers of the run in FP8."
                )
            return f"{side.name} has no statistics of layers, so no layer can be compared. {remedy}{notes}"
    shown = [next(subject.layer for subject in side.series if subject.layer) for side in (one, other)]
    if any(subject.layer in {each.layer for each in other.series} for subject in one.series if subject.layer):
        return (
            f"{one.name} and {other.name} have layers in common, but no statistic of one: those of the tensors"
            f" themselves, such as std and cur_amax, pair whatever the recipe.{notes}"
        )
    return f"{one.name} and {other.name} share no layer; one has {shown[0]!r}, the other {shown[1]!r}.{notes}"


def _span(side: Side) -> str:
    first, last = side.run.series["first"].to_pylist(), side.run.series["last"].to_pylist()
    return f"{side.name} has steps {min(first)} to {max(last)}"


def _pairing(one: Side, other: Side, paired: Sequence[Subject], search: Search) -> Pairing:
    ours, theirs = set(one.subjects) - set(paired), set(other.subjects) - set(paired)
    layers = [
        {(subject.scope, subject.layer): None for subject in side.series if subject.layer} for side in (one, other)
    ]
    statistics = [{subject.statistic for subject in side.subjects} for side in (one, other)]
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
        search.values,
        int(search.iterations[0]),
        int(search.iterations[-1]),
        tuple(name for _, name in search.sizes.with_other_rows),
        len(search.iterations),
        search.shorter,
    )


def _notes(a: RecordedRun, b: RecordedRun | None, noise: Sequence[RecordedRun]) -> tuple[str, ...]:
    runs = [a, *([] if b is None else [b]), *noise]
    return tuple(f"{_name(run, runs)}: {note}" for run in runs for note in run.notes)
