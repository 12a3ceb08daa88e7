"""The trace section of docs/fp8-not-faster.md: its code as it stands there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te

from te_precision_callbacks.speed.trace import MeasuredStep
from tests.docs.pages import blocks

_, LOOP, READ, OWN = blocks("docs/fp8-not-faster.md", "python")


def test_the_code_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text("{}\n")
    model = te.Linear(32, 32)
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), 1e-3),
        "loader": [torch.randn(32, 32)] * 14,
    }
    exec(LOOP, names)
    exec(READ, names)
    assert names["step"].iterations == (11, 12, 13)
    assert "linear" in capsys.readouterr().out
    names["path"].rename("trace.json.gz")
    exec(OWN, names)
    assert isinstance(names["step"], MeasuredStep)
