"""Tables on a narrow terminal."""

from __future__ import annotations

import pytest
from rich.console import Console

from te_precision_callbacks.base import terminal


@pytest.mark.parametrize(
    ("text", "width", "lines"),
    [
        ("layers.{0-2}.self_attention.layernorm_qkv", 29, ["layers.{0-2}.self_attention.", "layernorm_qkv"]),
        ("below examples/demo.yaml", 9, ["below", "examples/", "demo.yaml"]),
        ("1234.5678", 7, ["1234.56", "78"]),  # a number has no separators
        ("[bold]a.b", 20, ["[bold]a.b"]),
    ],
)
def test_names_break_after_a_separator(text: str, width: int, lines: list[str]) -> None:
    table = terminal.table("")
    table.show_header = False
    table.add_row(terminal.cell(text))
    console = Console(width=width + 4)  # with the padding and the edges
    with console.capture() as captured:
        console.print(table)
    assert [line.strip() for line in captured.get().splitlines() if line.strip()] == lines
