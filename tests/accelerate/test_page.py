"""docs/accelerate.md: every block in it, as it stands there; and the example."""

import importlib
import re
from pathlib import Path
from typing import Any

import pytest

from tests.docs.pages import blocks
from tests.lightning.models import board_scalars, logged_lines

pytestmark = pytest.mark.processes

ROOT = Path(__file__).parents[2]
PAGE = "docs/accelerate.md"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (config,) = blocks(PAGE, "yaml")
    (tmp_path / "config.yaml").write_text(config)
    (tmp_path / "train.py").write_text(blocks(PAGE, "python")[0])
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE", "1")
    return tmp_path


@pytest.mark.slow
def test_every_block_runs(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One after the other, in one process: 16 batches, so 8 optimizer steps each."""
    script, *others = blocks(PAGE, "python")
    names: dict[str, Any] = {"resume": False, "trained": 0}
    exec(script, names)
    board = board_scalars(folder / "run" / "board")
    assert sorted(board["te.0/activation/max"]) == list(range(1, 9))
    assert set(board) >= {"te.2/weight/underflows%", "te.2/gradient/std"}
    shown = ""
    for block in others:
        exec(block, names)
        session = names["debugger"].session
        assert not session.running
        assert session.iteration == 8
        shown += capsys.readouterr().out
        if "save_state" in block:
            names["resume"] = True
            for names["trained"], iteration in ((0, 8 + 8), (6, 16 + 5)):  # of 16 batches, 6 are skipped
                exec(block, names)
                assert names["debugger"].session.iteration == iteration
    assert "of the multiply-adds" in shown
    assert sum("save_state" in block for block in others) == 1


@pytest.mark.slow
def test_the_example_runs_and_shows_what_came_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    losses = importlib.import_module("accelerate_fp8").main(["--steps", "8", "--log-dir", str(tmp_path)])
    shown = capsys.readouterr().out
    assert len(losses) == 8
    assert losses[-1] < losses[0] - 0.5
    coverage = " ".join(shown.partition("FP8 in ")[2].split())
    assert re.match(r"[\d.]+ % of the multiply-adds \(fprop [\d.]+, dgrad 100, wgrad 100, attention 0\)", coverage)
    assert "% in BF16: model.layers.{0-1}.mlp.down_proj (DisableFP8GEMM in" in coverage
    board = board_scalars(tmp_path / "board")
    assert board["loss"] == {step: pytest.approx(loss) for step, loss in enumerate(losses, 1)}
    assert "te/worst_underflows%" in board
    assert {0, 2, 4, 6} <= {iteration for _, iteration in logged_lines(tmp_path)}
    assert "No problems found" in shown
