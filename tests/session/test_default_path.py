"""What the default config asks for leaves layers on their fused path, and what leaves it is named."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

from te_precision_callbacks.session import InspectSession

RECIPES = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling]
STEPS = 4


def train(net: torch.nn.Module, recipe: Any, folder: Path | None) -> list[torch.Tensor]:
    """The weights after some steps, of which most are due."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    session = None if folder is None else InspectSession(None, model=net, log_dir=folder, strict=True).start()
    torch.manual_seed(1)
    for _ in range(STEPS):
        with te.autocast(recipe=recipe()):
            loss = net(torch.randn(128, 128)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if session is not None:
            session.step()
    if session is not None:
        session.stop()
    return [parameter.detach().clone() for parameter in net.parameters()]


def linears() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(*(te.Linear(128, 128) for _ in range(3)))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if "path" in record.getMessage()]


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.__name__)
def test_linear_layers_stay_there(recipe: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """So the training is the same to the last bit, in the steps 0, 1 and 2 with statistics as well."""
    caplog.set_level(logging.INFO)
    alone = train(linears(), recipe, None)
    observed = train(linears(), recipe, tmp_path)
    assert all(map(torch.equal, alone, observed))
    assert not [text for text in said(caplog) if "debug path" in text]


def test_what_leaves_it_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A GELU that is fused into its GEMM has no function of its own that could run once more."""
    caplog.set_level(logging.INFO)
    net = torch.nn.Sequential(te.Linear(128, 128), te.LayerNormMLP(128, 128))
    net[1].gemm_gelu_fusion = True  # as NVTE_GEMM_GELU_FUSION=1 makes it where Userbuffers are initialized
    InspectSession(None, model=net, log_dir=tmp_path).start().stop()
    (text,) = [text for text in said(caplog) if "debug path" in text]
    assert "1 of 2 modules" in text
    assert "1: LogTensorStats: the fused path of LayerNormMLP never has its activation in high precision" in text
