"""The memory of a run: in its record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.runs import open_run
from te_precision_callbacks.session import InspectSession, facts
from tests.capability import any_capability, stand_for
from tests.check.running import BF16
from tests.conftest import statistics


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = te.LayerNormMLP(64, 128, params_dtype=BF16)
        self.operation = te.ops.Linear(64, 32, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor, first: bool) -> torch.Tensor:
        result: torch.Tensor = self.operation(self.mlp(x, is_first_microbatch=first))
        return result


def train(folder: Path) -> Any:
    """Two steps of two micro-batches, and what was recorded of them."""
    with any_capability():
        stand_for((9, 0))
        model = Net()
        with InspectSession(statistics(), model=model, log_dir=folder) as session:
            for _ in range(2):
                for first in (True, False):
                    with te.autocast(enabled=True, recipe=recipes.DelayedScaling()):
                        model(torch.randn(32, 64, dtype=BF16, requires_grad=True), first).float().sum().backward()
                session.step()
    return open_run(folder)


def test_a_run_records_what_its_layers_keep(tmp_path: Path) -> None:
    run = train(tmp_path)
    rows = run.memory.to_pylist()
    planned: Counter[tuple[str, str]] = Counter()
    for row in rows:
        planned[row["layer"], row["kind"]] += row["low"]
    assert planned["mlp.fc1", "weight_rowwise"] == planned["mlp.fc1", "weight_columnwise"] == 128 * 64
    assert planned["operation", "scaling_state"] == 3 * 1025 * 4
    assert planned["mlp.fc1", "saved_rowwise"] == 32 * 64, "the rows of one micro-batch"
    assert planned["operation", "weight_columnwise"] == 64 * 32


def test_a_failure_is_told_once_and_the_run_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(*_: Any) -> None:
        raise ValueError("no such thing")

    monkeypatch.setattr(facts, "memory_of_run", fails)
    run = train(tmp_path)
    assert len(run.memory) == 0
    assert len(run.gemms) > 0
    assert caplog.text.count("The memory of the layers is not recorded: ValueError: no such thing") == 1
