"""Printing of tables, text and JSON by the commands of ``te-precision``.

Colour and bold are for terminals only; in a file or pipe every line stays whole. Text from files and configs is printed
without markup and control characters.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
import textwrap
from collections.abc import Iterable, Iterator
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape, render
from rich.table import Table
from rich.text import Text

from te_precision_callbacks.base.wrapping import fitted, wrapped

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="NAME",
        help="The run of a folder that has several: its name, or the beginning of it. The default is the latest.",
    ),
]

_WHOLE_LINES = 500
"""Table width in files and pipes, unless COLUMNS is set."""

_WIDEST_TEXT = 120

_PADDING = 3


def table(*columns: str) -> Table:
    made = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        made.add_column(column, overflow="fold")
    return made


def is_terminal() -> bool:
    return Console().is_terminal


def show(what: RenderableType) -> None:
    console = Console(highlight=False, soft_wrap=isinstance(what, str))
    if not isinstance(what, str) and not console.is_terminal:
        console = Console(highlight=False, width=shutil.get_terminal_size((_WHOLE_LINES, 0)).columns)
    if isinstance(what, Table):
        _show_table(what, console)
    else:
        _print(what, console)


def _print(what: RenderableType, console: Console) -> None:
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    typer.echo("\n".join(line.rstrip(" ") for line in captured.get().split("\n")), nl=False)


def _show_table(made: Table, console: Console) -> None:
    """Print a table; where a word of each column does not fit, print a paragraph per row."""
    result = fitted_table(made, console.width)
    if result is not None:
        _print(result, console)
        return
    headings, *rows = zip(*_texts(made), strict=True)
    for row in rows:
        typer.echo()
        for heading, text in zip(headings, row, strict=True):
            if text:
                show_text(f"{heading}: {', '.join(text.splitlines())}" if heading else text, hanging=_PADDING)


def fitted_table(made: Table, width: int) -> Table | None:
    """Wrap the cells of a table without breaking words; None if the width is too small."""
    columns = _texts(made)
    room = width - _PADDING * len(columns) - 1
    widths = fitted(columns, room, [column.max_width for column in made.columns])
    if widths is None:
        return None
    heading_cells, *row_cells = (
        [cell_lines(wrapped(text, width).splitlines()) for text, width in zip(texts, widths, strict=True)]
        for texts in zip(*columns, strict=True)
    )
    result = table(*heading_cells)
    result.title, result.title_justify = made.title, made.title_justify
    result.caption, result.caption_justify = made.caption, made.caption_justify
    for column, given, fit in zip(result.columns, made.columns, widths, strict=True):
        column.width, column.justify = fit, given.justify
    for cells in row_cells:
        result.add_row(*cells)
    return result


def _texts(made: Table) -> list[list[str]]:
    return [
        [text.plain if isinstance(text, Text) else render(str(text)).plain for text in (column.header, *column.cells)]
        for column in made.columns
    ]


class Paragraph:
    def __init__(self, text: str, style: str = "") -> None:
        self._text, self._style = visible(text), style

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        fits = cell_len(self._text) <= options.max_width
        yield Text(self._text if fits else wrapped(self._text, options.max_width), self._style, overflow="fold")


def show_text(text: str, indent: int = 0, hanging: int = 0, *, err: bool = False) -> None:
    """Print a paragraph, wrapped to the terminal, or to 80 columns in a file or pipe, unless COLUMNS is set."""
    width = min(shutil.get_terminal_size().columns, _WIDEST_TEXT)
    first = " " * indent
    typer.echo(
        textwrap.fill(
            visible(text),
            max(width - 1, 40),
            initial_indent=first,
            subsequent_indent=first + " " * hanging,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        err=err,
    )


def show_as_it_is(text: str, indent: int = 0) -> None:
    for line in text.splitlines():
        typer.echo(" " * indent + visible(line))


def show_notes(notes: Iterable[str]) -> None:
    for note in notes:
        typer.echo()
        for number, line in enumerate(note.splitlines()):
            show_text(f"{'' if number else 'Note: '}{line}", hanging=2)


def show_json(what: Any) -> None:
    typer.echo(as_json(what))


def as_json(what: Any) -> str:
    return json.dumps(plain(what), indent=2, allow_nan=False)


def visible(text: str) -> str:
    """Escape characters that cannot be printed, such as terminal controls."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() else character.encode("unicode_escape").decode() for character in text
    )


def cell(what: object) -> str:
    return escape(visible(str(what)))


def cell_lines(lines: Iterable[str]) -> str:
    return "\n".join(map(cell, lines))


def plain(value: Any) -> Any:
    """Convert to JSON types; numbers that are not finite become "nan", "inf" or "-inf"."""
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
