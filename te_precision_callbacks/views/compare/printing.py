"""Prints a comparison on the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import typer

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import many
from te_precision_callbacks.layers.folding import folded, form_of
from te_precision_callbacks.views.compare.new_findings import ComparedVerdicts
from te_precision_callbacks.views.compare.result import Comparison, FactDifference, Parting
from te_precision_callbacks.views.compare.wording import (
    MOST_NAMES,
    difference,
    first_lines,
    number,
    of_losses,
    origin,
    times,
    what_was_compared,
    where_first,
)
from te_precision_callbacks.views.verdicts import MOST_FINDINGS, more_findings

_MOST_ROWS = 20
_MOST_FACTS = 30
_WIDEST_NAME = 36
"""The width of the names of facts, which may be those of many layers: most of a line is for what differs."""

_WIDEST_VALUE = 60
"""The width of what differs in a file or pipe, which has no width of its own."""

_INDENT = 2


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
        _paragraphs("Findings of B that A has not", _new_findings(verdicts))
    _show_facts(comparison.facts)
    _paragraphs("What was compared", what_was_compared(comparison))
    _paragraphs("Where they part", where_first(comparison))
    if comparison.parted:
        _show_parted(comparison)
    if comparison.loss is not None:
        _paragraphs("Loss", of_losses(comparison.loss))
    for note in comparison.notes:
        typer.echo()
        terminal.show_text(f"Note: {note}", hanging=_INDENT)


def _new_findings(verdicts: ComparedVerdicts) -> Iterator[str]:
    yield from list(verdicts.in_words())[:MOST_FINDINGS] or ["none"]
    left = more_findings(len(verdicts.only_b))
    if left:
        yield f"{left}, which --json has."
    yield f"The verdict of A: {verdicts.a.summary}"
    yield f"The verdict of B: {verdicts.b.summary}"


def _paragraphs(title: str, lines: Iterable[str]) -> None:
    _title(title)
    for line in lines:
        terminal.show_text(line, _INDENT, hanging=_INDENT)


def _title(text: str) -> None:
    terminal.show(f"\n[bold]{text}[/bold]")


def _show_facts(facts: Sequence[FactDifference]) -> None:
    _title("Facts that differ")
    if not facts:
        terminal.show_text("none that were recorded", _INDENT)
        return
    table = terminal.table("fact", "A", "B")
    table.columns[0].max_width = _WIDEST_NAME
    if not terminal.is_terminal():
        table.columns[1].max_width = table.columns[2].max_width = _WIDEST_VALUE
    for fact in facts[:_MOST_FACTS]:
        table.add_row(*map(terminal.cell, (fact.name, fact.a, fact.b)))
    terminal.show(table)
    if facts[_MOST_FACTS:]:
        terminal.show_text(f"and {len(facts) - _MOST_FACTS} more, which --json has.", _INDENT)


def _show_parted(comparison: Comparison) -> None:
    rows: dict[tuple[Any, ...], list[Parting]] = {}
    for parting in comparison.parted:
        strongest = parting.strongest
        what = (parting.iteration, form_of(parting.layer), parting.tensor, parting.rank, parting.origin)
        rows.setdefault((*what, strongest.statistic, strongest.difference > 0), []).append(parting)
    last = "beyond its ordinary spread" if comparison.floor else "of what counts"
    table = terminal.table("step", "where", "statistic", "A", "B", "difference", last, "")
    for column in table.columns[3:6]:
        column.no_wrap = True
    for parted in list(rows.values())[:_MOST_ROWS]:
        worst = max(parted, key=lambda parting: parting.strongest.strength)
        departure = worst.strongest
        layers = folded((parting.layer for parting in parted), most=MOST_NAMES)
        where = " ".join(part for part in (", ".join(layers), worst.tensor) if part) or departure.statistic
        cells = (
            worst.iteration,
            where if worst.rank is None else f"{where} (rank {worst.rank})",
            departure.statistic + (f", {len(worst.departures) - 1} more" if worst.departures[1:] else ""),
            number(departure.a),
            number(departure.b),
            difference(departure),
            times(departure),
            origin(worst) if len(parted) == 1 else worst.origin,
        )
        table.add_row(*map(terminal.cell, cells))
    terminal.show(table)
    left = list(rows.values())[_MOST_ROWS:]
    if left:
        tensors = sum(map(len, left))
        terminal.show_text(f"and {many(tensors, 'tensor')} more, which --json has.", _INDENT)
