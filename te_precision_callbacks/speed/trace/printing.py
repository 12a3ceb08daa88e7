"""Prints a measured step: tables for the terminal, or an object for JSON.

show(step)
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from te_precision_callbacks.base import terminal
from te_precision_callbacks.speed.trace.measuring import MeasuredStep

_MOST_LAYERS = 20
_MOST_UNKNOWN = 10
_INDENT = 2
_PASSES = ("forward", "backward", "recompute", "optimizer", "other")


def show(step: MeasuredStep, *, most_layers: int = _MOST_LAYERS) -> None:
    """Print a measured step, fitted to the terminal: kinds, passes, layers by time, and what is uncertain.

    Args:
        step: the step.
        most_layers: the most layers that are listed.
    """
    for line in _head(step):
        terminal.show_text(line)
    _show_kinds(step)
    _show_layers(step, most_layers)
    _show_unknown(step)
    terminal.show_notes(step.notes)


def as_json(step: MeasuredStep) -> dict[str, Any]:
    """A measured step as JSON can hold it; milliseconds of a step."""
    facts = asdict(step)
    facts["products"] = [{"pass": row.pop("of_pass"), **row} for row in facts["products"]]
    facts["unassigned"] = [entry._asdict() for entry in step.unassigned]
    facts["busy_share"] = step.busy_share
    facts["unassigned_share"] = step.unassigned_share
    return facts


def _head(step: MeasuredStep) -> list[str]:
    count = len(step.iterations)
    of = (
        f"iteration {step.iterations[0]}"
        if count == 1
        else f"{count} iterations ({step.iterations[0]} to"
        if count
        else ""
    )
    of += f" {step.iterations[-1]}), the mean of them" if count > 1 else ""
    rank = "" if step.rank is None else f", rank {step.rank}"
    busy = "GPU busy" if step.on_device else "operators run"
    return [
        f"{step.device}{rank}: {of or 'the whole trace'}.",
        f"Step {_ms(step.wall_ms)}, {busy} {_percent(step.busy_share)} of it, idle {_ms(step.idle_ms)}.",
    ]


def _show_kinds(step: MeasuredStep) -> None:
    passes: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in step.products:
        passes[row.kind or "unknown", row.format][row.of_pass or "other"] += row.ms
    columns = [name for name in _PASSES if any(name in of_kind for of_kind in passes.values())]
    whole = step.work_ms
    rows = [
        [
            f"{kind} {form}".strip(),
            f"{ms:.3f}",
            _percent(ms / whole if whole else float("nan")),
            *(f"{passes[kind, form][name]:.3f}" if passes[kind, form].get(name) else "" for name in columns),
        ]
        for (kind, form), ms in step.by_kind().items()
    ]
    rows.append(["idle", f"{step.idle_ms:.3f}", *[""] * (1 + len(columns))])
    if step.overlap_ms > 0:
        rows.append(["at the same time as others", f"-{step.overlap_ms:.3f}", *[""] * (1 + len(columns))])
    rows.append(["step", f"{step.wall_ms:.3f}", *[""] * (1 + len(columns))])
    _show_table(["kind", "ms", "of kernels" if step.on_device else "of operators", *columns], rows)


def _show_layers(step: MeasuredStep, most: int) -> None:
    gemms: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in step.products:
        gemms[row.layer][row.gemm or (row.kind or "unknown")] += row.ms
    layers = {layer: ms for layer, ms in step.by_layer().items() if layer}
    if not layers:
        terminal.show_text("No layer is known.")
        return
    rows = [[layer, f"{ms:.3f}", _parts(gemms[layer])] for layer, ms in list(layers.items())[:most]]
    rest = sum(list(layers.values())[most:])
    if rest:
        rows.append([f"{len(layers) - most} more layers", f"{rest:.3f}", ""])
    if "" in gemms:
        rows.append(["(no layer)", f"{sum(gemms[''].values()):.3f}", _parts(gemms[""])])
    _show_table(["layer", "ms", "of which"], rows)


def _parts(parts: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {ms:.3f}" for name, ms in sorted(parts.items(), key=lambda item: -item[1])[:6])


def _show_unknown(step: MeasuredStep) -> None:
    if not step.unassigned:
        return
    terminal.show_text("")
    share = _percent(step.unassigned_share)
    terminal.show_text(f"Kernels whose kind is unknown: {share} of the time of kernels.")
    for name, ms in step.unassigned[:_MOST_UNKNOWN]:
        terminal.show_text(f"{ms:.3f} ms  {name}", _INDENT, hanging=_INDENT)
    if len(step.unassigned) > _MOST_UNKNOWN:
        terminal.show_text(f"and {len(step.unassigned) - _MOST_UNKNOWN} more", _INDENT)


def _ms(value: float) -> str:
    return f"{value:.3f} ms"


def _percent(share: float) -> str:
    return "unknown" if share != share else f"{100 * share:.1f} %"


def _show_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table, whose numbers are the columns between the first one and "of which"."""
    table = terminal.table(*head)
    for column in table.columns[1:]:
        column.justify = "left" if column.header == "of which" else "right"
    for row in rows:
        table.add_row(*map(terminal.cell, row))
    terminal.show(table)
