"""What the tests of the engine share."""

from __future__ import annotations

import pytest

from te_precision_callbacks.engine.kernels import compiled


@pytest.fixture(autouse=True)
def compiling_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a run that has measured much already: the compiled pass is taken from the first tensor on."""
    monkeypatch.setattr(compiled, "PAYS_FROM", 0)
