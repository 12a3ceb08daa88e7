"""The output of ``te-precision search``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import group_by_key, many
from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.coverage.coverage import percent
from te_precision_callbacks.layers.folding import fold_names
from te_precision_callbacks.search.measuring import GradientEffect
from te_precision_callbacks.search.searching import SearchResult
from te_precision_callbacks.search.solving import MeasuredPrior, Point
from te_precision_callbacks.search.sweep import MeasuredGroup

_MOST_ROWS = 12


def show(result: SearchResult, folder: Path) -> None:
    terminal.show_text(f"Recipe {result.recipe}; {result.passes} forwards with backward.")
    terminal.show("\n[bold]Effect of low precision, alone in a layer[/bold]")
    heads_of_groups = ("level", "where", "gradient error", "cosine", "of update", "loss")
    _show_rows(heads_of_groups, list(map(_cells_of_group, result.measured)))
    terminal.show("\n[bold]Cost against quality[/bold]")
    heads = ("also in high precision", "low share", "ms over all-low", "expected error")
    _show_rows(heads, list(map(_cells_of_point, result.frontier)))
    terminal.show("\n[bold]Choice[/bold]")
    for gemms, names in group_by_key((gemms, name) for name, gemms in result.high.items()).items():
        of_gemms = "" if gemms == GEMMS else f" ({', '.join(gemms)})"
        terminal.show_text(f"In high precision{of_gemms}: {', '.join(fold_names(names, most=8))}.", hanging=2)
    if not result.high:
        terminal.show_text("Everything in low precision.")
    terminal.show_text(f"All-low: {_effect(result.all_low)}.")
    terminal.show_text(f"Choice: {_effect_and_cost(result)}.")
    if result.prior is not None:
        terminal.show_text(
            f"For comparison, {result.prior.text} ({result.prior.source}): {_effect_and_cost(result.prior)}."
        )
    if result.confirmation is not None:
        terminal.show(f"\n[bold]Confirmation, {many(result.confirmation.steps, 'step')}[/bold]")
        for line in result.describe():
            terminal.show_text(line, hanging=2)
    terminal.show_notes(result.notes)
    terminal.show_text(f"Written: {', '.join(sorted(map(str, folder.glob('*'))))}.")


def _effect(effect: GradientEffect) -> str:
    text = f"gradient error {effect.error:.3g}, cosine {effect.cosine:.6f}"
    return text if effect.update is None else f"{text}, of the optimizer's update {effect.update:.6f}"


def _effect_and_cost(measured: SearchResult | MeasuredPrior) -> str:
    extra = "" if measured.extra_ms is None else f", {measured.extra_ms:.3g} ms over all-low"
    return f"{_effect(measured.effect)}; {percent(measured.low_share)} % low{extra}"


def _show_rows(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = terminal.table(*heads)
    for cells in rows[:_MOST_ROWS]:
        table.add_row(*map(terminal.cell, cells))
    terminal.show(table)
    if rows[_MOST_ROWS:]:
        terminal.show_text(f"and {len(rows) - _MOST_ROWS} more, which --json has.")


def _cells_of_group(entry: MeasuredGroup) -> tuple[str, ...]:
    effect = entry.effect
    update = "" if effect.update is None else f"{effect.update:.6f}"
    return entry.level, entry.group.name, f"{effect.error:.3g}", f"{effect.cosine:.6f}", update, f"{effect.loss:.6g}"


def _cells_of_point(point: Point) -> tuple[str, ...]:
    extra = "" if point.extra_ms is None else f"{point.extra_ms:.3g}"
    return point.kept or "nothing", f"{percent(point.low_share)} %", extra, f"{point.expected_error:.3g}"
