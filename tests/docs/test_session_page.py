"""docs/session.md: its code as it stands there, and what it says of names, starts and errors."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.session import InspectSession, running_session
from tests.conftest import Keeper, statistics
from tests.docs.pages import blocks
from tests.lightning.models import logged_lines

PAGE = "docs/session.md"
SCRIPT, ACCUMULATION, PIECES, RUNNING, SEVERAL, EVALUATION, KNOWN = blocks(PAGE, "python")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """The names that the first block leaves, and what it has printed, in a folder with the page's config."""
    monkeypatch.chdir(tmp_path)
    (config,) = blocks(PAGE, "yaml", "# config.yaml")
    Path("config.yaml").write_text(config)
    found: dict[str, Any] = {}
    exec(SCRIPT, found)
    found["printed"] = capsys.readouterr().out.splitlines()
    return found


def test_the_blocks_run_one_after_another(names: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert f"print(entry.layer, entry.gemm, entry.operands)  # {names['printed'][0]}\n" in SCRIPT
    assert names["session"].iteration == 4
    numbers = 2 * 2 * 2  # layers, tensors, statistics
    assert len(logged_lines(Path("run"))) == numbers * 4
    exec(ACCUMULATION, names)
    assert capsys.readouterr().out.splitlines() == [f"1 0 1 {numbers}", f"2 1 3 {numbers}"]
    exec(PIECES, names)
    assert (names["session"].running, names["session"].iteration) == (False, 4)
    exec(RUNNING, names)
    assert running_session() is None
    exec(SEVERAL, names)
    assert names["session"].iteration == 4
    layers = [layer.name for layer in names["session"].layers]
    assert layers == ["generator.0", "generator.2", "critic.0", "critic.2"]
    found = {(found.layer, found.tensor) for found in names["session"].last_statistics}
    assert found == {(layer, tensor) for layer in layers for tensor in ("activation", "gradient")}
    assert {entry.operands["weight"] for entry in names["session"].precision if entry.gemm == "fprop"} == {"FP8 E4M3"}
    exec(EVALUATION, names)
    exec(KNOWN, names)
    shown = capsys.readouterr().out
    assert "Precision that really ran" in shown
    assert any(line.startswith("0 activation max ") for line in shown.splitlines())
    assert "Precision that really ran" in Path("run/precision_summary.txt").read_text()


def test_what_is_not_to_be_observed_is_not(names: dict[str, Any]) -> None:
    """What was gathered since the last step is written at the end: here the forward of the evaluation, or nothing."""
    for log_dir, code in {
        "paused": EVALUATION,
        "observed": EVALUATION.replace("observing = False", "observing = True"),
    }.items():
        exec(code.replace('"run"', repr(log_dir)), names)
        iterations = {iteration for _, iteration in logged_lines(Path(log_dir))}
        assert iterations == set(range(4 if log_dir == "paused" else 5))


def test_a_loop_that_fails_ends_its_session(names: dict[str, Any]) -> None:
    def batches() -> Iterator[torch.Tensor]:
        yield torch.randn(32, 64)
        raise OSError("no data")

    with pytest.raises(OSError, match="no data"):
        exec(PIECES, names | {"loader": batches()})
    assert running_session() is None


def test_a_session_that_was_stopped_begins_anew(tmp_path: Path, keeper: Keeper) -> None:
    model = torch.nn.Sequential(te.Linear(16, 16))
    session = InspectSession(statistics(), model=model, log_dir=tmp_path, sinks=[keeper])
    for _ in range(2):
        session.start()
        model(torch.randn(16, 16)).sum().backward()
        session.step()
        session.stop()
        session.stop()
    assert keeper.iterations == [0, 0]
    assert keeper.closed == [None, None]
