"""The Trainer keeps Accelerate's state in classes, and its integrations write to a folder from the environment."""

import pytest

from tests.accelerate.conftest import fresh_accelerate_state, offline_trackers  # noqa: F401


@pytest.fixture
def fp8_of_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate converts the layers of a model to FP8."""
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp8")
    monkeypatch.setenv("ACCELERATE_FP8_BACKEND", "TE")
