"""Print a measured step to the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from te_precision_callbacks.base import terminal
from te_precision_callbacks.speed.trace.measuring import MeasuredStep

_MOST_LAYERS = 20
_MOST_PARTS = 6
_PASSES = ("forward", "backward", "recompute", "optimizer", "other")


def show(step: MeasuredStep) -> None:
    """Print kinds of kernels by pass, layers by time, and notes."""
    iterations = step.iterations
    of = f"iteration {iterations[0]}" if iterations else "the whole trace"
    if len(iterations) > 1:
        of = f"mean of {len(iterations)} iterations ({iterations[0]} to {iterations[-1]})"
    rank = "" if step.rank is None else f", rank {step.rank}"
    terminal.show_text(f"{step.device}{rank}: {of}. Step {step.wall_ms:.3f} ms.")
    _show_kinds(step)
    _show_layers(step)
    terminal.show_notes(step.notes)


def _show_kinds(step: MeasuredStep) -> None:
    passes: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in step.products:
        passes[row.kind or "unknown", row.format][row.of_pass or "other"] += row.ms
    columns = [name for name in _PASSES if any(name in of_kind for of_kind in passes.values())]
    rows = [
        [
            f"{kind} {form}".strip(),
            f"{ms:.3f}",
            f"{100 * ms / step.work_ms:.1f} %" if step.work_ms else "",
            *(f"{passes[kind, form][name]:.3f}" if passes[kind, form].get(name) else "" for name in columns),
        ]
        for (kind, form), ms in step.by_kind().items()
    ]
    _show_table(["kind", "ms", "of kernels" if step.on_device else "of operators", *columns], rows)


def _show_layers(step: MeasuredStep) -> None:
    layers: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in step.products:
        layers[row.layer or "(no layer)"][row.gemm or row.kind or "unknown"] += row.ms
    rows = []
    for layer, parts in sorted(layers.items(), key=lambda item: -sum(item[1].values())):
        largest = sorted(parts.items(), key=lambda item: -item[1])[:_MOST_PARTS]
        rows.append([layer, f"{sum(parts.values()):.3f}", ", ".join(f"{name} {ms:.3f}" for name, ms in largest)])
    _show_table(["layer", "ms", "of which"], rows[:_MOST_LAYERS])
    if len(rows) > _MOST_LAYERS:
        terminal.show_text(f"and {len(rows) - _MOST_LAYERS} more layers; --json lists all.")


def _show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = terminal.table(*head)
    for column in table.columns[1:]:
        column.justify = "left" if column.header == "of which" else "right"
    for row in rows:
        table.add_row(*map(terminal.cell, row))
    terminal.show(table)
