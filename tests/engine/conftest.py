"""Shared fixtures of the engine's tests."""

import sys

import pytest

from te_precision_callbacks.engine.kernels import compiled


@pytest.fixture(autouse=True)
def compiling_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run that has measured much already: compiled kernels are used from the first tensor on."""
    monkeypatch.setattr(compiled, "PAYS_FROM", 0)


@pytest.fixture
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch, which takes some seconds for each dtype; the kernels have separate tests."""
    monkeypatch.setattr(compiled, "SMALLEST", sys.maxsize)
