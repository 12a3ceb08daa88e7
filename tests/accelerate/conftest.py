"""Accelerate keeps its state in classes: each test begins without it."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from accelerate.state import AcceleratorState, GradientState


def reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


@pytest.fixture(autouse=True)
def fresh_accelerate_state() -> Iterator[None]:
    yield
    reset()


@pytest.fixture
def offline_trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """MLflow with a store of local files, W&B offline; the folder that both write to."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", (tmp_path / "mlruns").as_uri())
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    yield tmp_path
    # Where a test failed before the script's end; and W&B keeps the settings of its first run in a process.
    for module, close in (("mlflow", "end_run"), ("wandb", "finish"), ("wandb", "teardown")):
        if module in sys.modules:
            getattr(sys.modules[module], close)()
