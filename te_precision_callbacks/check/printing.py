"""Prints a plan: as a table for the terminal, or as an object for JSON.

show(checked, "package.module:function", "meta")
"""

from __future__ import annotations

from typing import Any

import typer

from te_precision_callbacks import terminal
from te_precision_callbacks.check.model import CheckedModel
from te_precision_callbacks.check.rows import Row, rows
from te_precision_callbacks.folding import folded
from te_precision_callbacks.records.coverage import PRECISIONS

_INDENT = 2
_MOST_NAMES = 8
_MOST_ROWS = 60


def show(checked: CheckedModel, model: str, device: str) -> None:
    """Print a plan as a table, with its findings.

    Args:
        checked: the plan.
        model: the name of the model.
        device: the device that the model was made on.
    """
    terminal.show_text(
        f"{model}: {checked.layers} layers of Transformer Engine, made on {device}. {_conditions(checked)}"
    )
    found = rows(checked)
    table = terminal.table("layer", "fprop", "dgrad", "wgrad", "multiply-adds", "why not low, and what acts")
    for row in found[:_MOST_ROWS]:
        table.add_row(*_cells(row, checked.coverage.macs()))
    terminal.show(table)
    if found[_MOST_ROWS:]:
        layers = sum(len(row.layers) for row in found[_MOST_ROWS:])
        terminal.show_text(f"and {len(found) - _MOST_ROWS} more rows with {layers} layers, which --json has.")
    terminal.show_text(str(checked.coverage) if checked.coverage.macs() else "No matrix product is planned.")
    if checked.not_counted:
        names = ", ".join(folded(checked.not_counted, most=_MOST_NAMES))
        terminal.show_text(
            f"Not planned, since their classes do not tell what they multiply: {names}. session.coverage() counts them"
            " in a run."
        )
    for note in checked.notes:
        typer.echo()
        for number, line in enumerate(note.splitlines()):
            terminal.show_text(f"{'' if number else 'Note: '}{line}", hanging=_INDENT)
    if checked.findings:
        typer.echo(f"\n{len(checked.findings)} finding{'s' if len(checked.findings) > 1 else ''}")
    for finding in checked.findings:
        typer.echo()
        terminal.show_text(finding.text, _INDENT, hanging=_INDENT)


def _conditions(checked: CheckedModel) -> str:
    """The recipe, the GPU and the tokens that the plan is for."""
    from transformer_engine.pytorch.utils import get_device_compute_capability

    capability = "{}.{}".format(*get_device_compute_capability())
    tokens = "multiply-adds of one token" if checked.tokens is None else f"{checked.tokens} tokens a step"
    return f"Recipe: {checked.recipe or 'none'}, compute capability {capability}, {tokens}."


def _cells(row: Row, whole: int) -> list[str]:
    names, more = row.names[:_MOST_NAMES], len(row.names) - _MOST_NAMES
    gemms = [str(row.gemms[gemm]) if gemm in row.gemms else "" for gemm in ("fprop", "dgrad", "wgrad")]
    share = f" ({100 * row.macs / whole:.1f} %)" if whole else ""
    beside = [row.family] if row.family == "lookup" else []
    texts = [*beside, *([row.why] if row.why else []), *map(str, row.features)]
    return [
        terminal.cell_lines([*names, *([f"and {more} more"] if more > 0 else [])]),
        *map(terminal.cell, gemms),
        terminal.cell(f"{row.macs:.3g}{share}" if row.macs else ""),
        terminal.cell_lines(texts),
    ]


def as_json(checked: CheckedModel, model: str, device: str) -> dict[str, Any]:
    """A plan as an object for JSON. Arguments are those of :func:`show`."""
    coverage = checked.coverage
    return {
        "model": model,
        "device": device,
        "recipe": checked.recipe or "none",
        "tokens": checked.tokens,
        "macs": coverage.macs(),
        "share": {name: coverage.share(name) for name in PRECISIONS if coverage.macs(name)},
        "plan": [
            {
                "layers": row.layers,
                "family": row.family,
                "macs": row.macs,
                "gemms": dict(row.gemms),
                "features": [feature._asdict() for feature in row.features],
            }
            for row in rows(checked)
        ],
        "not_counted": checked.not_counted,
        "findings": checked.findings,
        "notes": checked.notes,
    }
