"""Results in a notebook: as HTML, in which names are text."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling

from te_precision_callbacks.base import notebooks
from te_precision_callbacks.check import check_model
from te_precision_callbacks.config import load_config
from te_precision_callbacks.session import InspectSession
from te_precision_callbacks.session.summary import summary
from tests.conftest import feature

NAME = "<img src=x onerror=alert(1)>&amp;"


class _Read(HTMLParser):
    """The tags and the text of HTML."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)

    def handle_data(self, data: str) -> None:
        self.text += data


class Model(torch.nn.Module):
    """A layer of Transformer Engine and one of torch, under a name that is markup."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleDict({NAME: te.Linear(32, 32), "head": torch.nn.Linear(32, 16)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x)
        return x


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The results of a step, by what they are."""
    config = {"s": feature("LogTensorStats", ["all"], tensors=["weight"], stats=["max"])}
    model = Model()
    with InspectSession(config, model=model, log_dir=Path(tmp_path_factory.mktemp("logs"))) as session:
        with te.autocast(enabled=True, recipe=Float8CurrentScaling()):
            model(torch.randn(32, 32)).sum().backward()
        session.step()
    config["nothing"] = feature("LogTensorStats", ["missing"], tensors=["weight"], stats=["max"])
    checked = check_model(Model(), load_config(config), tokens=30, recipe="fp8_current_scaling")
    return {
        "coverage": session.coverage(),
        "precision": session.precision,
        "summary": summary(session),
        "plan": checked,
        "finding": checked.findings[0],
    }


@pytest.mark.parametrize("name", ["coverage", "precision", "summary", "plan", "finding"])
def test_names_are_text(shown: dict[str, Any], name: str) -> None:
    html = shown[name]._repr_html_()
    read = _Read(html)
    assert "img" not in read.tags
    assert "script" not in read.tags
    assert name == "finding" or NAME[:8] in read.text  # tables of a terminal break lines
    assert "<img" not in html


def test_what_is_shown(shown: dict[str, Any]) -> None:
    texts = {name: _Read(result._repr_html_()).text for name, result in shown.items()}
    assert str(shown["coverage"]) in texts["coverage"]
    assert "FP8 E5M2 * E4M3" in texts["precision"]
    assert "fp8_current_scaling" in texts["precision"]
    assert "Logs: " in texts["summary"]
    assert all(finding.text in texts["plan"] for finding in shown["plan"].findings)
    assert texts["finding"] == f"{shown['finding'].kind}: {shown['finding'].text}"


def test_a_table_is_bounded() -> None:
    html = notebooks.table(("a",), [(number,) for number in range(1000)])
    assert html.count("<tr>") == 201
    assert "and 800 more" in html
    assert notebooks.table(("a",), []) == ""
