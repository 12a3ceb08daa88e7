"""The tables of a session's results, on a terminal and in the log folder."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from rich.console import Console

from te_precision_callbacks import InspectSession
from te_precision_callbacks.session.summary import summary
from tests.full_disk import files_up_to

STRANGE = "[red]\x1b[2J\u202e[/red] a_name_that_is_longer_than_a_line_of_the_table"


def printed(session: InspectSession, width: int) -> str:
    output = io.StringIO()
    Console(file=output, width=width).print(summary(session))
    return output.getvalue()


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> InspectSession:
    """Two steps of four equal layers, of one that leaves FP8 in the second step, and of one with a strange name."""
    parts = {"blocks": torch.nn.Sequential(*(te.Linear(32, 32) for _ in range(4))), "changing": te.Linear(32, 32)}
    model = torch.nn.ModuleDict(parts)
    model.add_module(STRANGE, te.Linear(32, 32))
    with InspectSession({}, model=model, log_dir=tmp_path_factory.mktemp("run [bold]")) as running:
        for enabled in (True, False):
            with te.autocast(enabled=True):
                out = model[STRANGE](model["blocks"](torch.randn(16, 32, requires_grad=True)))
            with te.autocast(enabled=enabled):
                out = model["changing"](out)
            out.sum().backward()
            running.step()
    return running


@pytest.mark.parametrize("width", [80, 200])
def test_tables_fit_the_width(session: InspectSession, width: int) -> None:
    text = printed(session, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text


def test_layers_with_the_same_precision_share_a_row(session: InspectSession) -> None:
    [row] = [line for line in printed(session, 200).splitlines() if line.strip().startswith("blocks.{0-3} ")]
    assert row.split()[1:4] == ["FP8", "E4M3", "FP8"]


def test_all_formats_of_a_layer_that_changed_are_in_order(session: InspectSession) -> None:
    assert "(FP8 E5M2 -> FP32) * (FP8 E4M3 -> FP32)" in printed(session, 200)


def test_names_are_neither_markup_nor_terminal_commands(session: InspectSession) -> None:
    text = printed(session, 200)
    assert r"[red]\x1b[2J\u202e[/red] a_na" in text
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "[bold]" in text.replace("\n", ""), "in the path of the logs too"


def test_the_file_begins_with_the_newest_run_and_survives_a_full_disk(tmp_path: Path) -> None:
    model, path = te.Linear(32, 32), tmp_path / "precision_summary.txt"

    def train(steps: int) -> InspectSession:
        session = InspectSession(model=model, log_dir=tmp_path).start()
        for _ in range(steps):
            model(torch.randn(16, 32)).sum().backward()
            session.step()
        return session

    train(1).stop()
    train(3).stop()
    written = path.read_text()
    assert written.count("Precision that really ran") == 2
    assert "at iteration 3" in written.splitlines()[0]
    session = train(2)
    with files_up_to(100):
        session.stop()
    assert path.read_text() == written
