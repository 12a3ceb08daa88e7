"""What a session shows in a terminal."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from rich.console import Console
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks import InspectSession
from te_precision_callbacks.config.loading import DEFAULT_CONFIG
from te_precision_callbacks.session.summary import summary
from te_precision_callbacks.statistics.series import family_of
from tests.conftest import statistics
from tests.full_disk import files_up_to

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
    for statistic in {worst.row.statistic for worst in session.worst_statistics}:
        # The worst of each that has a direction: a table has it first, or at least among its rows.
        rows = [row for row in session.last_statistics if row.statistic == statistic]
        row = max(rows, key=lambda row: family_of(row.tensor, statistic).badness(worst[row[:4]].row.value))
        last, lost = f"{row.value:.3g}", f"{worst[row[:4]].row.value:.3g}"
        assert f" {last if last == lost else f'{last} ({lost} @ {worst[row[:4]].iteration})'} " in tables
    for name in ("min", "cur_amax", "nonfinite_num", "underflows%", "overflows%"):
        assert f" {name} " in tables
    for part in ("fp8_block_scaling_", "block_dynamic_range_", "mean_columnwise"):
        assert f" {part} " in tables, "a long name is broken where its parts end"


def test_the_worst_stands_beside_the_last(session: InspectSession) -> None:
    found = {tuple(row[:4]): row.value for row in session.last_statistics}
    assert any(worst.row.value > found[worst.row[:4]] and not worst.iteration for worst in session.worst_statistics)
    assert not any(worst.row.statistic == "cur_amax" for worst in session.worst_statistics), "no amax is bad"


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


def test_a_precision_that_has_changed_back_says_what_it_is_now(tmp_path: Path) -> None:
    model = te.Linear(32, 32)
    with InspectSession(statistics(), model=torch.nn.Sequential(model), log_dir=tmp_path) as running:
        for enabled in (True, False, True):
            with te.autocast(enabled=enabled):
                out = model(torch.randn(16, 32))
            out.sum().backward()
            running.step()
    assert "FP8 E4M3 -> FP32; 2 changes, now FP8 E4M3" in shown(running, 200)


def test_what_shows_a_fault_comes_first(tmp_path: Path) -> None:
    """Before what is 0 everywhere, and what has no worse direction; and no number is cut where names are short."""
    model = torch.nn.Sequential(te.Linear(32, 32))
    section = statistics(stats=["min", "max", "mean", "std", "l1_norm", "nonfinite_num"])["stats"]
    of_fp8 = {"enabled": True, "tensors": ["activation"], "stats": ["overflows%", "underflows%"]}
    section["transformer_engine"]["LogFp8TensorStats"] = of_fp8
    with InspectSession({"s": section}, model=model, log_dir=tmp_path, records="off") as running:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            model(torch.cat([torch.randn(16, 31), torch.full((16, 1), 1e6)], 1)).sum().backward()
        running.step()
    for width in range(60, 140, 4):
        text = shown(running, width)
        assert text.index("underflows%") < min(map(text.index, ("nonfinite_num", "overflows%", "min", "l1_norm")))
        assert "…" not in text


WIDE = {
    "LogTensorStats": ["min", "max", "mean", "std", "l1_norm", "cur_amax", "dynamic_range", "nonfinite_num"],
    "LogFp8TensorStats": ["underflows%", "overflows%", "mse", "scale_inv_min", "mxfp8_mse", "mxfp8_underflow_blocks%"],
}


@pytest.mark.slow
def test_fourteen_statistics_of_many_tensors_are_readable(tmp_path: Path) -> None:
    """What is lost first, the worst tensors first, the others by name; the same in a file of the log folder."""
    section = {
        "enabled": True,
        "layers": {"layer_types": ["all"]},
        "transformer_engine": {
            name: {"enabled": True, "freq": 1, "tensors": ["activation", "weight"], "stats": stats}
            for name, stats in WIDE.items()
        },
    }
    torch.manual_seed(0)
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([te.Linear(32, 32) for _ in range(9)])})
    with InspectSession({"s": section}, model=model, log_dir=tmp_path) as session:
        for _ in range(2):
            with te.autocast(enabled=True):
                for number, layer in enumerate(model["blocks"]):
                    spread = torch.where(torch.rand(32, 32) < number / 10, 1e-6, 1.0)
                    layer(torch.randn(32, 32) * spread).sum().backward()
            session.step()
    for width in (80, 120, 200):
        text = shown(session, width)
        assert max(map(len, text.splitlines())) <= width
        tables = text.split("Last statistics")[1:]
        assert len(tables) <= {80: 7, 120: 5, 200: 3}[width]
        # Twelve tensors and the layers that they are of, a title, a header of some lines, the others.
        assert max(len(table.splitlines()) for table in tables) < 40
        first = tables[0].splitlines()
        assert "underflows%" in next(line for line in first if "layer and tensor" in line)
        assert next(line for line in first if "blocks." in line).split() == ["blocks.8"]
        assert all("and 6 more: blocks." in table for table in tables)
        for names in WIDE.values():
            assert all(name.rpartition("_")[2] in text for name in names)
    assert "blocks.{" in text
    written = (tmp_path / "precision_summary.txt").read_text()
    assert written.startswith("Summary of ")
    assert "at iteration 2" in written.splitlines()[0]
    lines = [line.rstrip() for line in shown(session, 120).splitlines()]
    assert "\n".join(lines) in written


def test_each_run_in_a_folder_adds_its_summary(tmp_path: Path) -> None:
    """The newest comes first, so that the file begins with its verdict."""
    model = te.Linear(32, 32)
    for steps in (1, 3):
        with InspectSession(model=model, log_dir=tmp_path) as session:
            for _ in range(steps):
                model(torch.randn(16, 32)).sum().backward()
                session.step()
    written = (tmp_path / "precision_summary.txt").read_text()
    assert written.count("Precision that really ran") == 2
    assert "at iteration 3" in written.splitlines()[0]
    assert written.index("Not enough checked") < written.index("at iteration 1")


def test_a_full_disk_leaves_the_summary_of_the_run_before(tmp_path: Path) -> None:
    model = te.Linear(32, 32)
    with InspectSession(model=model, log_dir=tmp_path) as session:
        model(torch.randn(16, 32)).sum().backward()
        session.step()
    written = (tmp_path / "precision_summary.txt").read_text()
    session = InspectSession(model=model, log_dir=tmp_path).start()
    for _ in range(2):
        model(torch.randn(16, 32)).sum().backward()
        session.step()
    with files_up_to(100):
        session.stop()
    assert written.startswith("Summary of ")
    assert (tmp_path / "precision_summary.txt").read_text() == written
