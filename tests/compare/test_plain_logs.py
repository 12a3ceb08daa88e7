"""Logs that plain nvidia-dlfw-inspect has written, with Transformer Engine's own features: shown and compared."""

from __future__ import annotations

from pathlib import Path

import nvdlfw_inspect.api as debug_api
import pytest
import torch
import transformer_engine.debug.features
import transformer_engine.pytorch as te
from transformer_engine.debug.pytorch.debug_state import TEDebugState
from typer.testing import CliRunner, Result

from te_precision_callbacks import cli
from te_precision_callbacks.instrumentation.upstream import Snapshot
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.views.compare import compare
from tests.conftest import statistics

STEPS = 12


def train(folder: Path, factor: float = 1.0) -> Path:
    """Train three layers; from step 4 on the second one's weight is scaled, which the third one's takes back."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(te.Linear(32, 32, bias=False) for _ in range(3)))
    snapshot = Snapshot()
    try:
        features = [str(Path(transformer_engine.debug.features.__path__[0]))]
        config = statistics(tensors=["activation", "weight", "gradient"], stats=["cur_amax", "std"])
        debug_api.initialize(config, feature_dirs=features, log_dir=str(folder))
        TEDebugState.debug_enabled = True
        debug_api.infer_and_assign_layer_names(model)
        for step in range(STEPS):
            if step == 4:
                with torch.no_grad():
                    model[1].weight.mul_(factor)
                    model[2].weight.div_(factor)
            model(torch.randn(32, 32)).square().mean().backward()
            debug_api.step()
        debug_api.end_debug()
    finally:
        snapshot.restore()
    return folder


@pytest.fixture
def logs(tmp_path: Path) -> tuple[Path, Path]:
    return train(tmp_path / "a"), train(tmp_path / "b", 2.0**10)


def command(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, list(map(str, arguments)))


def test_they_are_compared_in_the_order_of_the_log(logs: tuple[Path, Path]) -> None:
    result = compare(*map(open_run, logs))
    assert not result.ordered
    assert (result.first.layer, result.first.tensor, result.first.iteration) == ("model.1", "weight", 4)
    assert result.facts == (), "a log has none"
    shown = command("compare", *logs)
    assert shown.exit_code == 1
    assert "The order of execution was not recorded" in " ".join(shown.output.split())


def test_they_are_shown(logs: tuple[Path, Path]) -> None:
    shown = command("show", logs[1])
    assert shown.exit_code == 0
    assert " rules checked)." in " ".join(shown.output.split())
    assert "a log of nvidia-dlfw-inspect" in " ".join(shown.output.split())
