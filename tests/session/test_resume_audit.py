"""The audit of a resume: what it finds in real runs, and that it says nothing after a good resume."""

from __future__ import annotations

import io
import json
import logging
import pickle
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.errors import PrecisionDebugError
from te_precision_callbacks.fingerprints import FILE_NAME, Fingerprint, FingerprintError, ResumeReport, read
from te_precision_callbacks.session import InspectSession, ObservationError, ResumeAuditError
from tests.capability import any_capability, stand_for
from tests.conftest import feature, statistics

VARIABLE = "NVTE_ALLOW_UNSAFE_PICKLE_EXTRA_STATE"
DELAYED = recipes.DelayedScaling(amax_history_len=4)
RECIPES: Mapping[str, tuple[recipes.Recipe, tuple[int, int]]] = {
    "delayed": (DELAYED, (9, 0)),
    "current": (recipes.Float8CurrentScaling(), (9, 0)),
    "block": (recipes.Float8BlockScaling(), (9, 0)),
    "mxfp8": (recipes.MXFP8BlockScaling(), (10, 0)),
    "nvfp4": (recipes.NVFP4BlockScaling(), (10, 0)),
}
State = dict[str, Any]


@pytest.fixture(autouse=True)
def trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


def net(recipe: recipes.Recipe, *, quantized: bool) -> torch.nn.Module:
    torch.manual_seed(0)
    with te.quantized_model_init(enabled=quantized, recipe=recipe):
        blocks = [te.LayerNormMLP(64, 64, params_dtype=torch.bfloat16) for _ in range(2)]
        return torch.nn.Sequential(*blocks, te.Linear(64, 64, params_dtype=torch.bfloat16))


def train(model: torch.nn.Module, session: InspectSession, recipe: recipes.Recipe | None, steps: int) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(steps):
        with te.autocast(enabled=recipe is not None, recipe=recipe):
            out = model(torch.randn(32, 64, dtype=torch.bfloat16))
        out.float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        session.step()


def saved(folder: Path, recipe: recipes.Recipe | None, *, quantized: bool = False, config: Any = None) -> State:
    """A checkpoint after three steps, by way of torch's file format."""
    model = net(recipe or DELAYED, quantized=quantized)
    with InspectSession(config or statistics(), model=model, log_dir=folder) as session:
        train(model, session, recipe, 3)
        file = io.BytesIO()
        torch.save({"model": model.state_dict(), "session": session.state_dict()}, file)
    file.seek(0)
    loaded: State = torch.load(file)
    return loaded


def resumed(
    folder: Path,
    state: State,
    recipe: recipes.Recipe | None,
    *,
    quantized: bool = False,
    config: Any = None,
    then: Callable[[torch.nn.Module], Any] | None = None,
    **keywords: Any,
) -> ResumeReport | None:
    """The report of a run that goes on for two steps."""
    model = net(recipe or DELAYED, quantized=quantized)
    with InspectSession(config or statistics(), model=model, log_dir=folder, **keywords) as session:
        session.load_state_dict(state["session"])
        model.load_state_dict(state["model"], strict=False)
        if then is not None:
            then(model)
        train(model, session, recipe, 2)
        assert session.iteration == 5
    return session.resume_report


def findings(report: ResumeReport | None) -> list[str]:
    assert report is not None
    return [str(finding) for finding in report.findings]


def with_extra_state(state: State, change: Callable[[dict[str, Any]], None]) -> State:
    """The checkpoint with Transformer Engine's own state of each module changed."""
    for key, value in state["model"].items():
        if key.endswith("_extra_state"):
            content = pickle.loads(value.numpy().tobytes())
            change(content)
            state["model"][key] = torch.frombuffer(bytearray(pickle.dumps(content)), dtype=torch.uint8)
    return state


# ---------------------------------------------------------------------- nothing is said


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("name", RECIPES)
def test_a_good_resume_is_silent(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, quantized: bool
) -> None:
    recipe, capability = RECIPES[name]
    with any_capability():
        stand_for(capability)
        state = saved(tmp_path, recipe, quantized=quantized)
        fingerprint = Fingerprint.from_text(state["session"]["fingerprint"])
        caplog.clear()
        report = resumed(tmp_path, state, recipe, quantized=quantized, strict=True)
    assert findings(report) == []
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert {layer.weights.kind for layer in fingerprint.layers} == {"quantized" if quantized else "high"}
    assert all((layer.forward is not None) == (name == "delayed") for layer in fingerprint.layers)
