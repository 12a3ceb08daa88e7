"""Printing of tables, text and JSON by the commands of ``te-precision``.

Colour and bold are for terminals only; lines in a file or pipe are not wrapped. Text from files and configs is printed
without markup and control characters.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import shutil
import textwrap
from collections.abc import Iterable, Sequence
from typing import Annotated, Any

import typer
from rich import box
from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.containers import Lines
from rich.table import Table
from rich.text import Text

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

Run = Annotated[
    str | None,
    typer.Option(
        "--run",
        metavar="NAME",
        help="Name, or beginning of the name, of a run in a folder with several runs. Default: the latest.",
    ),
]

_WHOLE_LINES = 500
"""Table width in files and pipes, unless COLUMNS is set."""

_WIDEST_TEXT = 120

_NAME = 20
"""Width of a column below which names of layers may break."""

_WORD = re.compile(r"\S+")
_SEPARATED = re.compile(r"(?<=[\w})\]][._/])(?=[^\W\d]|{)")


def table(*columns: str) -> Table:
    rich_table = Table(box=box.SIMPLE_HEAD, padding=(0, 1))
    for column in columns:
        rich_table.add_column(column, overflow="fold")
    return rich_table


def is_terminal() -> bool:
    return Console().is_terminal


def show(what: RenderableType, optional: Sequence[str] = ()) -> None:
    """Print text or a table; of a table on a narrow terminal, without some of its ``optional`` columns, in order."""
    console = Console(highlight=False, soft_wrap=isinstance(what, str))
    if not isinstance(what, str) and not console.is_terminal:
        console = Console(highlight=False, width=shutil.get_terminal_size((_WHOLE_LINES, 0)).columns)
    if isinstance(what, Table):
        left_out = _narrow(what, console.width, optional)
        if _least_width(what) > console.width:
            _show_rows(what)
            return
        what.caption = f"without {', '.join(left_out)}: see --json" if left_out else None
    if console.is_terminal:
        console.print(what)
        return
    with console.capture() as captured:
        console.print(what)
    typer.echo("\n".join(line.rstrip(" ") for line in captured.get().split("\n")), nl=False)


def _least_width(rich_table: Table) -> int:
    """Return the smallest width of a table without broken words, except in long names."""
    width = 0
    for column in rich_table.columns:
        words = " ".join([str(column.header), *map(str, column.cells)]).split()
        width += 3 + min(max(map(cell_len, words), default=0), _NAME)
    return width


def _narrow(rich_table: Table, width: int, optional: Iterable[str]) -> list[str]:
    """Leave out optional columns until a table fits, if it then fits; return their names."""
    all_columns = list(rich_table.columns)
    left_out = []
    for name in optional:
        if _least_width(rich_table) > width:
            rich_table.columns = [column for column in rich_table.columns if column.header != name]
            left_out.append(name)
    if _least_width(rich_table) <= width:
        return left_out
    rich_table.columns = all_columns
    return []


def _show_rows(rich_table: Table) -> None:
    """Print each row of a table as a paragraph: on a narrow terminal, columns would break words."""
    for row in zip(*(column.cells for column in rich_table.columns), strict=True):
        cells = []
        for column, value in zip(rich_table.columns, map(str, row), strict=True):
            if value:
                lines = ", ".join(value.splitlines())
                cells.append(f"{column.header}: {lines}".removeprefix(": "))
        show_text("; ".join(cells), hanging=4)


class Wrapped(Text):
    """Text that breaks names of layers and files after a separator if they are longer than a line."""

    def wrap(self, console: Console, width: int, **options: Any) -> Lines:
        text = _WORD.sub(lambda word: _break_name(word[0], width), self.plain)
        return Text(text, self.style, overflow="fold").wrap(console, width, **options)


def _break_name(word: str, width: int) -> str:
    lines = [""]
    for part in _SEPARATED.split(word):
        if lines[-1] and cell_len(lines[-1] + part) > width:
            lines.append("")
        lines[-1] += part
    return "\n".join(lines)


def paragraph(text: str, style: str = "") -> Text:
    return Wrapped(visible(text), style, overflow="fold")


def show_text(text: str, indent: int = 0, hanging: int = 0, *, err: bool = False) -> None:
    """Print a paragraph, wrapped to COLUMNS if set, or to the terminal, or to 80 columns in a file or pipe."""
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


def show_as_it_is(text: str, indent: int) -> None:
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
    if len(text) == 1:
        return text.encode("unicode_escape").decode()
    return "".join(map(visible, text))


def shell_command(*words: str) -> str:
    """Return a command to paste into a shell, with quoted words; characters that cannot be printed as in ``$'\\n'``."""
    return " ".join(map(_quoted, words))


def _quoted(word: str) -> str:
    if word.isprintable():
        return shlex.quote(word)
    plain_bytes = set(range(32, 127)) - set(b"'\\")
    text = ""
    for byte in os.fsencode(word):
        text += chr(byte) if byte in plain_bytes else f"\\x{byte:02x}"
    return f"$'{text}'"


def cell(what: object) -> Text:
    return cell_lines([str(what)])


def cell_lines(lines: Iterable[str]) -> Text:
    return Wrapped("\n".join(map(visible, lines)), overflow="fold")


def plain(value: Any) -> Any:
    """Convert to JSON types; non-finite numbers become "nan", "inf" or "-inf"."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain({field.name: getattr(value, field.name) for field in dataclasses.fields(value)})
    if isinstance(value, dict):
        return {name: plain(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
