"""Prints the memory of a model: tables for the terminal, or an object for JSON.

show(memory)
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.counts import size
from te_precision_callbacks.layers.folding import folded
from te_precision_callbacks.speed.memory.rows import (
    KINDS,
    LIVES,
    SAVED,
    Lives,
    Memory,
    MemoryRow,
    by_kind,
    total,
)

_MOST_NAMES = 4


def show(memory: Memory) -> None:
    """Print the bytes by kind beside high precision, and notes, fitted to the terminal."""
    terminal.show_text(_heading(memory))
    show_rows(memory.rows)
    for layers, why in _not_planned(memory):
        terminal.show_text(f"Not planned: {layers}: {why}", hanging=2)
    terminal.show_notes(memory.notes)


def show_rows(rows: Sequence[MemoryRow]) -> None:
    """Print the bytes by kind beside high precision, and what low precision adds or saves while what is there."""
    table = terminal.table("", "planned", "in high precision", "added")
    for column in table.columns[1:]:
        column.justify = "right"
    kinds = [(KINDS[kind], found) for kind, found in by_kind(rows).items()]
    for name, found in [*kinds, ("all on the device", total(rows))]:
        added = f"{'+' if found.added > 0 else ''}{size(found.added)}"
        table.add_row(*map(terminal.cell, (name, size(found.low), size(found.high), added)))
    terminal.show(table)
    for lives in LIVES:
        if any(row.lives == lives for row in rows):
            terminal.show_text(_balance([row for row in rows if row.lives == lives], lives))


def as_json(memory: Memory) -> dict[str, Any]:
    """The memory as an object for JSON: totals, rows, and what is not known."""
    return {
        "recipe": memory.recipe or "none",
        "capability": "{}.{}".format(*memory.capability),
        "tokens": memory.tokens,
        "cached": memory.cached,
        "transposes": memory.transposes,
        "total": memory.bytes().as_json(),
        "kinds": {kind: found.as_json() for kind, found in memory.by_kind().items()},
        "lives": {lives: memory.bytes(lives=lives).as_json() for lives in LIVES},
        "rows": [dataclasses.asdict(row) for row in memory],
        "not_planned": dict(memory.not_planned),
        "notes": list(memory.notes),
    }


def _heading(memory: Memory) -> str:
    weights = "kept over micro-batches" if memory.cached else "made in each forward"
    of = "unknown tokens" if memory.tokens is None else f"{memory.tokens:,} tokens a forward"
    if memory.tokens is None and any(row.kind in SAVED for row in memory):
        of = "the tokens of a batch"
    recipe = memory.recipe or "no recipe, or several"
    return (
        f"Memory of {len(memory.layers)} layers on one rank: {recipe}, compute capability"
        f" {memory.capability[0]}.{memory.capability[1]}, {of}, codes of weights {weights}."
    )


def _balance(rows: Sequence[MemoryRow], lives: Lives) -> str:
    added = total(rows).added
    does = "adds nothing" if not added else f"adds {size(added)}" if added > 0 else f"saves {size(-added)}"
    what = LIVES[lives] if lives == "always" else f"kept {LIVES[lives]}"
    return f"What is {what}: low precision {does}."


def _not_planned(memory: Memory) -> list[tuple[str, str]]:
    of_why: dict[str, list[str]] = {}
    for layer, why in memory.not_planned.items():
        of_why.setdefault(why, []).append(layer)
    return [(", ".join(folded(layers, most=_MOST_NAMES)), why) for why, layers in of_why.items()]
