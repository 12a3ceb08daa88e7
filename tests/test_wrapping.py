"""Tables fit a terminal without a word that breaks."""

from __future__ import annotations

import pytest

from te_precision_callbacks.base import terminal
from te_precision_callbacks.base.wrapping import wrapped

LAYER = "layers.{0-7}.self_attention.layernorm_qkv"
ROWS = [
    (LAYER, "FP8 E5M2 * E4M3", "1.93e+10 (24.0 %)", "log_tensor_stats: LogTensorStats of activation, steps 2 to 5"),
    ("head", "FP32", "3.15e+09 (3.9 %)", "torch.nn.Linear"),
]
HEADINGS = ("layer", "wgrad", "multiply-adds", "why not low, and what acts")


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int) -> list[str]:
    monkeypatch.setenv("COLUMNS", str(columns))
    table = terminal.table(*HEADINGS)
    for row in ROWS:
        table.add_row(*map(terminal.cell, row))
    terminal.show(table)
    return [line.rstrip() for line in capsys.readouterr().out.splitlines()]


@pytest.mark.parametrize("columns", [30, 40, 60, 80, 120, 200])
def test_words_and_parts_of_names_stay_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    lines = printed(capsys, monkeypatch, columns)
    text = "\n".join(lines)
    for word in ("attention.", "qkv", "LogTensorStats", "activation,", "1.93e+10", "E5M2", "24.0 %", "Linear"):
        assert word in text, (columns, word)
    if columns >= 60:
        assert max(map(len, lines)) <= columns


def test_short_text_does_not_wrap(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    (line,) = (line for line in printed(capsys, monkeypatch, 200) if LAYER in line)
    assert all(cell in line for cell in ROWS[0])


def test_a_name_stays_whole_as_long_as_words_can_give_way(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert any(LAYER in line for line in printed(capsys, monkeypatch, 110))


def test_without_room_for_columns_each_row_is_a_paragraph(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = printed(capsys, monkeypatch, 40)
    assert "wgrad: FP8 E5M2 * E4M3" in lines
    assert "layer: head" in lines


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("layers.{0-7}.self_attention", ["layers.", "{0-7}.", "self_", "attention"]),
        ("/tmp/run/20261122", ["/tmp/", "run/", "20261122"]),
        ("1.93e+10", ["1.93e+10"]),
        ("-2.5e-05", ["-2.5e-05"]),
        ("2026-11-22", ["2026-11-22"]),
        ("LayerNormLinear", ["LayerNormLinear"]),
    ],
)
def test_names_break_behind_a_separator_and_numbers_never(name: str, parts: list[str]) -> None:
    assert wrapped(name, 1).splitlines() == parts


def test_a_line_that_fits_keeps_its_indentation(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert wrapped("stats:\n    freq: 5\n    layers: all of them", 12).splitlines() == [
        "stats:",
        "    freq: 5",
        "layers: all",
        "of them",
    ]
    monkeypatch.setenv("COLUMNS", "60")
    table = terminal.table("fact", "A")
    table.add_row("config", terminal.cell_lines(["stats:", "    freq: 5"]))
    terminal.show(table)
    first, second = (line for line in capsys.readouterr().out.splitlines() if "stats" in line or "freq" in line)
    assert second.index("freq") - first.index("stats") == 4
