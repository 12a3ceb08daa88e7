"""Gives the layers of a run the names that they have in another one, where these differ in their first parts alone.

Lightning names layers from the LightningModule on, ``net.layers.3.fc1``, and other integrations from the model on,
``layers.3.fc1``.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import replace

import pyarrow as pa
import pyarrow.compute as pc

from te_precision_callbacks.runs import RecordedRun

_TABLES = ("layers", "gemms", "operands", "plan", "series", "events")

_MOST_PREFIXES = 8


def align(a: RecordedRun, b: RecordedRun) -> tuple[RecordedRun, str]:
    """Rename the layers of ``b`` like those of ``a``, if they share no layer but most of the ends of their names. The
    note is empty if nothing was renamed.
    """
    ours, theirs = _layers(a), _layers(b)
    if not ours or not theirs or ours & theirs:
        return b, ""
    pairs = itertools.product(_prefixes(ours), _prefixes(theirs))
    common = {pair: len(_without(ours, pair[0]) & _without(theirs, pair[1])) for pair in pairs}
    own, other = max(common, key=lambda pair: (common[pair], -len(pair[0]) - len(pair[1])))
    if 2 * common[own, other] < min(len(ours), len(theirs)):
        return b, ""

    def renamed(name: str) -> str:
        return own + name[len(other) :] if name.startswith(other) else name

    note = (
        f"{b.path}: its layers are named {other!r}... where those of {a.path} are named {own!r}...; layers are paired"
        f" by the rest of their names: {common[own, other]} of them."
    )
    tables = {name: _with_layers(getattr(b, name), renamed) for name in _TABLES}
    return replace(b, **tables), note


def _layers(run: RecordedRun) -> set[str]:
    return {name for name in pc.unique(run.series["layer"]).to_pylist() if name}


def _prefixes(names: Collection[str]) -> list[str]:
    """The first parts that at least half of the names have, each with its dot, and the empty one."""
    counts: Counter[str] = Counter()
    for name in names:
        parts = name.split(".")
        counts.update(".".join(parts[:end]) + "." for end in range(1, min(len(parts), _MOST_PREFIXES)))
    return ["", *(prefix for prefix, count in counts.items() if 2 * count >= len(names))]


def _without(names: Collection[str], prefix: str) -> set[str]:
    return {name[len(prefix) :] for name in names if name.startswith(prefix)}


def _with_layers(table: pa.Table, renamed: Callable[[str], str]) -> pa.Table:
    place = table.schema.get_field_index("layer")
    if place < 0 or not len(table):
        return table
    names: dict[str, str] = {name: renamed(name) for name in pc.unique(table["layer"]).to_pylist() if name}
    column = pa.array([names.get(name, name) for name in table["layer"].to_pylist()], pa.string())
    return table.set_column(place, table.schema.field(place), column.cast(table.schema.field(place).type))
