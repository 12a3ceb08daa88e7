"""docs/session.md: its code, and its statements about names, starts and errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.session import running_session
from tests.docs.pages import blocks
from tests.lightning.models import logged_lines

PAGE = "docs/session.md"
SCRIPT, ACCUMULATION, PIECES, RUNNING, SEVERAL, EVALUATION, KNOWN = blocks(PAGE, "python")


@pytest.fixture
def names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """Return the names and the output of the first block, in a folder with the page's config."""
    monkeypatch.chdir(tmp_path)
    (config,) = blocks(PAGE, "yaml", "# config.yaml")
    Path("config.yaml").write_text(config)
    results: dict[str, Any] = {}
    exec(SCRIPT, results)
    results["printed"] = capsys.readouterr().out.splitlines()
    return results


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
    results = {(statistic.layer, statistic.tensor) for statistic in names["session"].last_statistics}
    assert results == {(layer, tensor) for layer in layers for tensor in ("activation", "gradient")}
    assert {entry.operands["weight"] for entry in names["session"].precision if entry.gemm == "fprop"} == {"FP8 E4M3"}
    exec(EVALUATION, names)
    exec(KNOWN, names)
    shown = capsys.readouterr().out
    assert names["session"].findings.summary in shown
    assert "of the multiply-adds" in shown
    assert any(line.startswith("0 activation max ") for line in shown.splitlines())
