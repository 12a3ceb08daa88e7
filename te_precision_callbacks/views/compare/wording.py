"""The text of a comparison, and its output on the terminal."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key, many, some_of, without_exponents
from te_precision_callbacks.diagnosis.finding import MOST_FINDINGS, more_findings
from te_precision_callbacks.layers.folding import fold_names, form_of
from te_precision_callbacks.views.compare.departures import NO_NUMBER
from te_precision_callbacks.views.compare.paired import PairedDifference, SeedComparison
from te_precision_callbacks.views.compare.result import (
    ComparedVerdicts,
    Comparison,
    FactDifference,
    LossComparison,
    Parting,
    StatisticDeparture,
)

MOST_NAMES = 3


def describe_pairing(comparison: Comparison) -> Iterator[str]:
    pairing = comparison.pairing
    floor = comparison.floor
    span = f"over {many(pairing.steps, 'step')} ({pairing.first} to {pairing.last})"
    steps = span if pairing.steps > 1 else f"in step {pairing.first} only"
    yield f"{many(pairing.series, 'series')} of {many(pairing.layers, 'layer')} were compared {steps}."
    for where, count, statistics, layers in (
        ("A", pairing.only_a, pairing.statistics_only_a, pairing.layers_only_a),
        ("B", pairing.only_b, pairing.statistics_only_b, pairing.layers_only_b),
    ):
        if count:
            apart = [f"the statistics {some_of(statistics)}"] if statistics else []
            apart += [f"the layers {some_of(fold_names(layers))}"] if layers else []
            yield f"{many(count, 'series')} only in {where}{': ' if apart else ''}{' and '.join(apart)}."
    if pairing.without_steps:
        yield f"{many(pairing.without_steps, 'series')} of both have no step in common."
    if pairing.with_other_rows:
        resized = some_of(fold_names(pairing.with_other_rows))
        yield (
            f"B has another number of rows in {resized}, for example another batch size: norms, counts and gradients"
            " may differ only because of that."
        )
    if floor is None:
        yield (
            "No noise floor: differences count from a factor of 2 (4 for squared errors), 5 percentage points or 3"
            " dB. To measure it, pass a repeat of A with another seed as --noise."
        )
    else:
        yield f"Noise floor: the difference between A and {' and '.join(floor.sides)}."
        if floor.without:
            yield (
                f"The noise floor lacks {many(floor.without, 'series')}: their differences count from a factor of 2,"
                " 5 percentage points or 3 dB."
            )
    if pairing.steps == 1:
        yield "A difference counts if it is in this step, the only one compared."
    elif pairing.steps < comparison.lasting:
        yield f"A difference counts if it lasts all {pairing.steps} steps."
    else:
        yield f"A difference counts if it lasts {many(comparison.lasting, 'step')}."
    if not comparison.ordered:
        yield "The order of execution was not recorded: layers are in the order of their first values."


def describe_first(comparison: Comparison) -> Iterator[str]:
    if comparison.all_equal:
        yield "All paired values are bit-identical."
        return
    first = comparison.first
    if first is None:
        beyond = "exceeds the noise floor" if comparison.floor else "is large enough to count"
        steps = min(comparison.lasting, comparison.pairing.steps)
        beyond += f" for {steps} steps" if steps > 1 else ""
        text = f"No difference {beyond}, although not all values are equal."
        yield "No layer was compared." if comparison.layers_apart else text
        return
    plainer = ("std", "cur_amax") if first.strongest.statistic in ("min", "max", "mean") else ()
    departure = next(
        (other for other in first.departures if other.statistic in plainer and other.iteration == first.iteration),
        first.strongest,
    )
    medians = f" (medians of steps {departure.iteration} to {departure.until})" if departure.steps > 1 else ""
    multiple = times(departure)
    beyond = f", {multiple.removesuffix('x')}times its noise" if multiple and departure.spread is not None else ""
    yield (
        f"First at step {first.iteration}: {', '.join(filter(None, (first.name, origin(first))))}."
        f" {departure.statistic} is {number(departure.b)} in B, {number(departure.a)} in A{medians}:"
        f" {difference(departure, in_sentence=True)}{beyond}."
    )
    if any(parting.iteration < first.iteration for parting in comparison.parted):
        between = f"between steps {first.since - 1} and {first.iteration}"
        yield f"This statistic has no values {between}: the difference may have begun in any of these steps."


def first_lines(comparison: Comparison) -> Iterator[str]:
    """Yield the most important lines: that no layers pair, and that a loss is not finite, since when."""
    if comparison.layers_apart:
        yield comparison.layers_apart
    loss = comparison.loss
    if loss is None:
        return
    sides = (("A", loss.lost_a, "B", loss.lost_b), ("B", loss.lost_b, "A", loss.lost_a))
    for side, lost, other, lost_there in sides:
        if lost is not None:
            when = f"from step {lost.since} on" if lost.since < lost.until else f"at its last logged step, {lost.since}"
            finite_there = f"; in {other} it is finite" if lost_there is None else ""
            yield f"The {loss.name} of {side} is {lost.what} {when}{finite_there}."
    if loss.is_apart and loss.is_finding:
        values = f"{number(loss.a)} in A and {number(loss.b)} in B ({_percent(loss.relative)})"
        yield f"The {loss.name} is {values} from step {loss.stable_since} on."


def describe_losses(loss: LossComparison) -> Iterator[str]:
    is_lost = loss.lost_a is not None or loss.lost_b is not None
    if not loss.steps:
        yield f"No {loss.name} can be compared: one run has inf or nan from the first common step on."
        return
    what = f", {loss.steps} steps before one becomes inf or nan" if is_lost else ""
    off = f" ({_percent(loss.relative)})" if math.isfinite(loss.relative) else ""
    most = f" Largest difference: {_percent(loss.largest, signed=False)}, at step {loss.largest_at}." if off else ""
    yield (
        f"{loss.name} (running median over {many(loss.window, 'step')}{what}): from step {loss.stable_since} on"
        f" {number(loss.a)} in A, {number(loss.b)} in B{off}.{most if math.isfinite(loss.largest) else ''}"
    )
    if loss.spike is not None:
        among = "" if loss.spike.steps == 1 else f", the largest of {loss.spike.steps} such steps"
        yield (
            f"There is a spike at step {loss.spike.iteration}: {number(loss.spike.a)} in A, {number(loss.spike.b)} in"
            f" B{among}. The running median hides it."
        )
    if loss.floor is not None and math.isfinite(loss.floor):
        yield f"The runs of the noise floor differ by {_percent(loss.floor, signed=False)} there."
    yardsticks = [yardstick for yardstick in loss.yardsticks if yardstick.holds is not None]
    a, b = map(str.upper, loss.precisions)
    for yardstick in yardsticks:
        where = "Within" if yardstick.holds else "NOT within"
        other = "" if f"against {a}" in yardstick.name else f" A ran in {a}."
        bound = _percent(yardstick.bound, signed=False)
        yield f"{where} {bound}, the bound for {yardstick.name} ({yardstick.source}).{other}"
    if a and b and a != b and not yardsticks:
        yield f"No bound is known for this pair: A is in {a}, B in {b}."


def origin(parting: Parting) -> str:
    if parting.source:
        return f"inherited from {parting.source}"
    if parting.layer:
        return parting.origin
    return ""


def difference(departure: StatisticDeparture, *, in_sentence: bool = False) -> str:
    value = departure.difference
    if abs(value) > NO_NUMBER:
        if not (math.isfinite(departure.a) and math.isfinite(departure.b)):
            return "no number"
        return "at times inf or nan"
    if departure.unit == "powers of two":
        if departure.a * departure.b < 0:
            return "another sign"
        if 0 in (departure.a, departure.b):
            if departure.a == 0:
                return "from 0"
            return "to 0"
        factor = f"{2.0 ** abs(value):.3g} times {'smaller' if value < 0 else 'larger'}"
        if in_sentence:
            return without_exponents(factor)
        return f"x {2.0**value:.3g}"
    return f"{value:+.3g} {departure.unit}"


def times(departure: StatisticDeparture) -> str:
    """The difference as a multiple of the noise, or of the bound without a noise floor; empty with inf or nan."""
    if abs(departure.difference) > NO_NUMBER:
        return ""
    measure = departure.bound if departure.spread is None else departure.spread
    return f"{abs(departure.difference) / measure:.3g} x"


def departure_texts(departure: StatisticDeparture) -> dict[str, str]:
    """The values of a row, for the terminal and the page."""
    values = {"a": number(departure.a), "b": number(departure.b)}
    return {**values, "difference": difference(departure), "times": times(departure)}


def number(value: float) -> str:
    return f"{value:.4g}"


def _percent(share: float, *, signed: bool = True) -> str:
    return f"{100 * share:{'+' if signed else ''}.3g} %"


_MOST_ROWS = 20
_MOST_FACTS = 30
_WIDEST_NAME = 36
"""The width of the names of facts, which may be those of many layers: most of a line is for what differs."""

_WIDEST_VALUE = 60
"""The width of what differs in a file or pipe, which has no width of its own."""

_INDENT = 2

FACT_NAMES = {"settings.expects_low": "setting that selects low precision"}


def show(comparison: Comparison) -> None:
    verdicts = comparison.verdicts
    for line in first_lines(comparison):
        terminal.show_text(line)
    if verdicts is not None:
        terminal.show_text(verdicts.summary)
    if comparison.same_run:
        terminal.show_text("A and B are the same run, so nothing can differ.")
    terminal.show_text(f"A: {comparison.a}")
    terminal.show_text(f"B: {comparison.b}")
    if verdicts is not None:
        _paragraphs("Findings that only B has", _new_findings(verdicts))
    _show_facts(comparison.facts)
    _paragraphs("What was compared", describe_pairing(comparison))
    _paragraphs("Where they diverge", describe_first(comparison))
    if comparison.parted:
        _show_departures(comparison)
    if comparison.loss is not None:
        _paragraphs("Loss", describe_losses(comparison.loss))
    for note in comparison.notes:
        typer.echo()
        terminal.show_text(f"Note: {note}", hanging=_INDENT)


def _new_findings(verdicts: ComparedVerdicts) -> Iterator[str]:
    yield from list(verdicts.in_words())[:MOST_FINDINGS] or ["none"]
    further = more_findings(len(verdicts.only_b))
    if further:
        yield f"{further}, which --json has."
    yield f"Diagnosis of A: {verdicts.a.summary}"
    yield f"Diagnosis of B: {verdicts.b.summary}"


def _paragraphs(title: str, lines: Iterable[str]) -> None:
    _title(title)
    for line in lines:
        terminal.show_text(line, _INDENT, hanging=_INDENT)


def _title(text: str) -> None:
    terminal.show(f"\n[bold]{text}[/bold]")


def _show_facts(facts: Sequence[FactDifference]) -> None:
    _title("Facts that differ")
    if not facts:
        terminal.show_text("none", _INDENT)
        return
    table = terminal.table("fact", "A", "B")
    table.columns[0].max_width = _WIDEST_NAME
    if not terminal.is_terminal():
        table.columns[1].max_width = _WIDEST_VALUE
        table.columns[2].max_width = _WIDEST_VALUE
    for fact in facts[:_MOST_FACTS]:
        table.add_row(*map(terminal.cell, (FACT_NAMES.get(fact.name, fact.name), fact.a, fact.b)))
    terminal.show(table)
    if facts[_MOST_FACTS:]:
        terminal.show_text(f"and {len(facts) - _MOST_FACTS} more, which --json has.", _INDENT)


def _show_departures(comparison: Comparison) -> None:
    def form(parting: Parting) -> tuple[Any, ...]:
        strongest = parting.strongest
        key = (parting.iteration, form_of(parting.layer), parting.tensor, parting.rank, parting.origin)
        return *key, strongest.statistic, strongest.difference > 0

    rows = [*group_by_key((form(parting), parting) for parting in comparison.parted).values()]
    last = "vs. noise" if comparison.floor else "vs. threshold"
    table = terminal.table("step", "where", "statistic", "A", "B", "difference", last, "")
    for column in table.columns[3:6]:
        column.no_wrap = True
    for parted in rows[:_MOST_ROWS]:
        worst = max(parted, key=lambda parting: parting.strongest.strength)
        departure = worst.strongest
        layers = fold_names((parting.layer for parting in parted), most=MOST_NAMES)
        where = " ".join(filter(None, (", ".join(layers), worst.tensor))) or departure.statistic
        cells = (
            worst.iteration,
            where if worst.rank is None else f"{where} (rank {worst.rank})",
            departure.statistic + (f", {len(worst.departures) - 1} more" if worst.departures[1:] else ""),
            *departure_texts(departure).values(),
            origin(worst) if len(parted) == 1 or not worst.layer else worst.origin,
        )
        table.add_row(*map(terminal.cell, cells))
    terminal.show(table)
    remaining = sum(map(len, rows[_MOST_ROWS:]))
    if remaining:
        terminal.show_text(f"and {many(remaining, 'tensor')} more, which --json has.", _INDENT)


def show_seeds(comparison: SeedComparison) -> None:
    table = terminal.table("seed", "A", "B", "difference", "from step")
    for number, (a, b) in enumerate(zip(comparison.losses_a, comparison.losses_b, strict=True)):
        change = _percent(b / a - 1) if a and math.isfinite(b / a) else ""
        cells = (number + 1, number_of_loss(a), number_of_loss(b), change, comparison.since[number])
        table.add_row(*map(terminal.cell, cells))
    for name, runs in (("A", comparison.a), ("B", comparison.b)):
        terminal.show_text(f"{name}: {', '.join(runs)}")
    terminal.show(table)
    for line in comparison.lost:
        terminal.show_text(line)
    if len(set(comparison.since)) > 1:
        terminal.show_text("The pairs have different lengths, so these means are not from the same steps.")
    for line in describe_pairs(comparison.paired, comparison.loss):
        terminal.show_text(line)


def number_of_loss(value: float) -> str:
    return f"{value:.5g}"


def describe_pairs(paired: PairedDifference, loss: str, a: str = "A", b: str = "B") -> Iterator[str]:
    """Yield the difference of paired final losses, and whether it is within the tolerance."""
    values = f"{number_of_loss(paired.a)} in {a}, {number_of_loss(paired.b)} in {b} ({_percent(paired.difference)})"
    bound = _percent(paired.tolerance, signed=False)
    if not math.isfinite(paired.a):
        yield f"In {a}, a {loss} is inf or nan, so {b} cannot be compared with it."
        return
    if not math.isfinite(paired.b):
        yield f"In {b}, a {loss} is inf or nan: NOT within the tolerance of {bound}."
        return
    if paired.pairs == 1:
        yield f"{loss}: {values}, of one seed a side."
        yield f"Cannot decide with 1 seed: it has no spread. Give at least 3 seeds a side, to test against {bound}."
        return
    low, high = map(_percent, paired.interval)
    yield f"{loss}, mean of {paired.pairs} paired seeds: {values}, 95 % confidence interval {low} to {high}."
    tested = "two one-sided tests at 5 %"
    if paired.decision == "within":
        yield f"Within the tolerance of {bound} ({tested})."
    elif paired.decision == "beyond":
        side = "lower" if paired.difference < 0 else "higher"
        yield f"NOT within the tolerance of {bound} ({tested}): {b} is {side}."
    elif paired.pairs_needed is None:
        yield f"Cannot decide with {paired.pairs} seeds whether {b} is within {bound}; nor would 1,000 seeds."
    else:
        yield (
            f"Cannot decide with {paired.pairs} seeds whether {b} is within {bound}; {paired.pairs_needed} would, if"
            " mean and spread stay as they are."
        )
