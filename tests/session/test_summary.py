"""What a session shows in a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from rich.console import Console

from te_precision_callbacks import InspectSession
from te_precision_callbacks.config.loading import DEFAULT_CONFIG
from te_precision_callbacks.summary import summary

LONG = "fp8_block_scaling_block_dynamic_range_mean_columnwise"
STRANGE = "[red]\x1b[2J\u202e[/red] a_name_that_is_longer_than_a_line_of_the_table"
FEATURES = DEFAULT_CONFIG["default_statistics"]["transformer_engine"]


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> InspectSession:
    """Of two steps, the first with larger values; the config of a user who wants much."""
    log_dir = tmp_path_factory.mktemp("run [bold]")
    lost = {**FEATURES["LogFp8TensorStats"], "stats": ["underflows%", "overflows%", LONG], "freq": 1}
    section = {**DEFAULT_CONFIG["default_statistics"]}
    section["transformer_engine"] = {
        "LogTensorStats": {**FEATURES["LogTensorStats"], "freq": 1},
        "LogFp8TensorStats": lost,
    }
    torch.manual_seed(0)
    model = torch.nn.Module()
    model.add_module("decoder", te.TransformerLayer(32, 64, 2))
    model.add_module(STRANGE, te.Linear(32, 32))
    with InspectSession({"s": section}, model=model, log_dir=log_dir) as running:
        for size in (123456.0, 1.0):
            with te.autocast(enabled=True):
                out = size * torch.randn(16, 2, 32)
                for part in model.children():
                    out = part(out)
            (out * size).sum().backward()
            running.step()
    return running


def shown(session: InspectSession, width: int) -> str:
    console = Console(file=io.StringIO(), width=width)
    console.print(summary(session))
    return console.file.getvalue()  # type: ignore[attr-defined, no-any-return]


@pytest.mark.parametrize("width", [80, 200])
def test_no_number_and_no_header_is_broken(session: InspectSession, width: int) -> None:
    text = shown(session, width)
    tables = text[text.index("Last statistics") :]
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    worst = {tuple(worst.row[:4]): worst for worst in session.worst_statistics}
    for row in session.last_statistics:
        cell = f"{row.value:.3g} ({worst[row[:4]].row.value:.3g} @ {worst[row[:4]].iteration})"
        assert f" {cell} " in tables
    for name in ("min", "cur_amax", "nonfinite_num", "underflows%", "overflows%"):
        assert f" {name} " in tables
    for part in ("fp8_block_scaling_", "block_dynamic_range_", "mean_columnwise"):
        assert f" {part} " in tables, "a long name is broken where its parts end"


def test_the_worst_stands_beside_the_last(session: InspectSession) -> None:
    last = next(row for row in session.last_statistics if (row.tensor, row.statistic) == ("gradient", "cur_amax"))
    (worst,) = (worst for worst in session.worst_statistics if worst.row[:4] == last[:4])
    assert worst.iteration == 0
    assert worst.row.value > 100 * last.value


def test_names_are_neither_markup_nor_commands_of_the_terminal(session: InspectSession) -> None:
    text = shown(session, 200)
    assert r"[red]\x1b[2J\u202e[/red] a_na" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]" in text.replace("\n", ""), "in the path of the logs too"


def test_a_session_without_statistics_has_no_table_of_them(tmp_path: Path) -> None:
    model = te.Linear(32, 32)
    with InspectSession(model=model, log_dir=tmp_path) as session:
        pass
    assert "Last statistics" not in shown(session, 80)


def test_a_precision_that_has_changed_is_told_of_each_operand(tmp_path: Path) -> None:
    """Abbreviated formats share their first word; what has changed is written out."""
    model = te.Linear(32, 32)
    with InspectSession({}, model=torch.nn.ModuleDict({"fc": model}), log_dir=tmp_path) as running:
        for enabled in (False, True):
            with te.autocast(enabled=enabled):
                out = model(torch.randn(16, 32, requires_grad=True))
            out.sum().backward()
            running.step()
    text = shown(running, 200)
    assert "(FP32 -> FP8 E5M2) * (FP32 -> FP8 E4M3)" in text
    assert "* ->" not in text
