"""Operations of torch that multiply matrices in a kernel of their own: counted, or named, in a run and in a plan."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks import InspectSession, load_config
from te_precision_callbacks.check import CheckedModel, check_model
from te_precision_callbacks.coverage.coverage import Coverage
from tests.conftest import statistics

SIZE = 32
OF_TE = 3 * SIZE**3
"""The multiply-adds of the layer of Transformer Engine: forward and backward."""


class Net(torch.nn.Module):
    """A layer of Transformer Engine, and something of torch behind it."""

    def __init__(self, part: torch.nn.Module | None, call: Callable[[Net, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.fc = te.Linear(SIZE, SIZE)
        self.part = part
        self.rows = torch.nn.Parameter(torch.ones(48, SIZE))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            x = self.fc(x)
        return self.call(self, x)


def recurrent(kind: type[torch.nn.Module]) -> Net:
    return Net(kind(SIZE, 64), lambda net, x: net.part(x.view(4, 8, SIZE))[0])


NAMED: dict[str, tuple[str, Callable[[], Net]]] = {
    "LSTM": ("has no counterpart", lambda: recurrent(torch.nn.LSTM)),
    "matrix_exp": ("linalg_matrix_exp decomposes", lambda: Net(None, lambda net, x: torch.matrix_exp(x))),
}
"""Name -> the reason, and a model whose only counted products are those of Transformer Engine."""

CONFIG = statistics(freq=100)
CONTRACT = {"share": "fp8 >= 99%", "by_step": 1, "on_broken": "warn"}


def ran(net: Net, folder: Path) -> Coverage:
    with InspectSession(CONFIG, model=net, log_dir=folder, require=CONTRACT, records="off") as session:
        net(torch.randn(SIZE, SIZE, requires_grad=True)).sum().backward()
        session.step()
    return session.coverage()


def plan_of(net: Net) -> CheckedModel:
    batch = torch.randn(SIZE, SIZE, requires_grad=True)
    return check_model(net, load_config(CONFIG), batch=batch, require=CONTRACT, recipe=Float8CurrentScaling())


@pytest.mark.parametrize("name", NAMED)
def test_named_and_told_where_a_contract_holds(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    what, make = NAMED[name]
    planned = plan_of(make())
    for coverage in (ran(make(), tmp_path), planned.coverage):
        assert coverage.share("fp8") == 1
        assert any(what in text for text in coverage.not_counted)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert any("cannot be checked" in text and what in text for text in warned)
    [finding] = planned.findings
    assert "fp8 >= 99%: cannot be checked: not counted: " in finding.text
    assert what in finding.text


def test_a_plan_by_tokens_names_the_modules_that_it_leaves_out() -> None:
    planned = check_model(
        recurrent(torch.nn.LSTM), load_config(CONFIG), recipe=Float8CurrentScaling(), require="fp8 >= 99%"
    )
    assert "part" in planned.not_counted
    assert [finding.kind for finding in planned.findings] == ["not_sized", "contract"]
    for finding in planned.findings:
        assert "part" in finding.text
        assert "cannot be sized without" in finding.text


def test_a_plan_by_tokens_says_that_attention_is_not_in_its_shares() -> None:
    def noted(**keywords: Any) -> list[str]:
        model, recipe = te.TransformerLayer(64, 128, 4), Float8CurrentScaling()
        planned = check_model(model, load_config(CONFIG), recipe=recipe, **keywords)
        assert (planned.coverage.share("fp8") == 1) == ("tokens" in keywords)
        return [note for note in planned.notes if "products of attention" in note]

    [note] = noted(tokens=64)
    assert "lengths of sequences: transformer_layer.self_attention. A batch" in note
    assert not noted(batch=torch.ones(16, 4, 64))
