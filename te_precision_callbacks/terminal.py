"""What the commands print: tables, lines of text, and one JSON object for ``--json``.

shown = new_table("layer", "bytes")
shown.add_row(as_text(layer), f"{size:,}")
show(shown)
show_json({"layer": layer, "bytes": size})

Names and messages come from files and configs, so they are shown as text, not as markup, and without control
characters.
"""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import typer
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table


def new_table(*columns: str) -> Table:
    """An empty table whose cells are wrapped, never cut."""
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def show(what: Table | str) -> None:
    """Print a table, or a line of text with rich's markup; into a file or a pipe every line stays whole."""
    console = Console(highlight=False, soft_wrap=not isinstance(what, Table))
    if isinstance(what, Table) and not console.is_terminal:
        console = Console(highlight=False, width=500)
    console.print(what)


def visible(text: str) -> str:
    """The text without terminal controls: characters that cannot be printed become escapes."""
    return "".join(each if each.isprintable() else each.encode("unicode_escape").decode() for each in text)


def as_text(what: object) -> str:
    """An object as text for a table or a line: without markup and terminal controls."""
    return escape(visible(str(what)))


def show_json(what: Any) -> None:
    """Print an object as JSON; see :func:`plain`."""
    typer.echo(json.dumps(plain(what), indent=2, allow_nan=False))


def plain(value: Any) -> Any:
    """A value for JSON: without dataclasses and tuples, and "nan", "inf" or "-inf" for a number that is not finite."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return plain(fields)
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
