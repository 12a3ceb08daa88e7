"""``te-precision check --memory``, and ``check_model(memory=True)``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.check import check_model
from te_precision_callbacks.config import load_config
from te_precision_callbacks.layers.naming import named_te_modules
from te_precision_callbacks.speed.memory import Memory, plan_memory
from tests.capability import any_capability, stand_for
from tests.check.running import BF16
from tests.conftest import feature
from tests.manual.test_command import one_line


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = te.Linear(64, 128, bias=False, params_dtype=BF16)
        self.second = te.Linear(128, 64, bias=False, params_dtype=BF16)
        self.head = torch.nn.Linear(64, 32, bias=False, dtype=BF16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.head(self.second(self.first(x)[:64]))
        return result


KEPT = {"kept": feature("DisableFP8Layer", ["second"])}


def memory_of(config: dict[str, Any] = KEPT, **keywords: Any) -> Memory:
    with any_capability():
        stand_for((9, 0))
        model = Net()
        checked = check_model(
            model, load_config(config), recipe="fp8_current_scaling", memory=True, allow_unmatched=True, **keywords
        )
    assert checked.memory is not None
    return checked.memory


def test_a_layer_that_the_config_keeps_in_high_precision() -> None:
    memory = memory_of(tokens=256)
    assert memory.bytes("saved_columnwise", layer="first") == (256 * 64, 0)
    assert memory.bytes("saved_high", layer="second") == (256 * 128 * 2, 256 * 128 * 2)
    assert memory.bytes("saved_high", layer="head") == (256 * 64 * 2, 256 * 64 * 2)
    assert memory.bytes("weight_rowwise", layer="second") == (0, 0)


def test_a_batch_has_the_tokens_of_each_layer() -> None:
    memory = memory_of(batch=torch.empty(256, 64, dtype=BF16))
    assert memory.bytes("saved_columnwise", layer="first") == (256 * 64, 0)
    assert memory.bytes("saved_high", layer="second").low == 64 * 128 * 2
    assert memory.bytes("saved_high", layer="head").low == 64 * 64 * 2


def test_a_feature_for_some_gemms_is_said() -> None:
    memory = memory_of({"kept": feature("DisableFP8GEMM", ["second"], gemms=["dgrad"])}, tokens=256)
    assert memory.bytes("saved_columnwise", layer="second").low == 256 * 128
    assert any("some of their GEMMs" in note and "second" in note for note in memory.notes)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    (tmp_path / "c.yaml").write_text("s: {enabled: False}\n")
    (tmp_path / "nets_of_memory.py").write_text(
        "from tests.speed.memory.test_check import Net\n\n\ndef build():\n    return Net()\n"
    )
    monkeypatch.chdir(tmp_path)
    with any_capability():
        stand_for((9, 0))
        yield tmp_path
    sys.modules.pop("nets_of_memory", None)


PLAN = ["check", "c.yaml", "--model", "nets_of_memory:build", "--recipe", "fp8_delayed_scaling", "--tokens", "256"]


def test_the_command(folder: Path) -> None:
    printed = CliRunner().invoke(cli.app, [*PLAN, "--memory", "--cached-weights"])
    assert printed.exit_code == 0, printed.output
    assert "codes of weights kept over micro-batches" in printed.stdout
    found = json.loads(CliRunner().invoke(cli.app, [*PLAN, "--memory", "--json"]).stdout)["memory"]
    rowwise = [row for row in found["rows"] if row["kind"] == "weight_rowwise"]
    assert [(row["low"], row["high"]) for row in rowwise] == [(64 * 128, 0)] * 2
    assert {row["layer"] for row in found["rows"]} == {"first", "second", "head"}
    assert json.loads(CliRunner().invoke(cli.app, [*PLAN, "--json"]).stdout)["memory"] is None


@pytest.mark.parametrize(
    ("words", "text"),
    [(["check", "c.yaml", "--memory"], "give --model"), ([*PLAN, "--cached-weights"], "give --memory")],
)
def test_wrong_use(words: list[str], text: str, folder: Path) -> None:
    result = CliRunner().invoke(cli.app, words)
    assert result.exit_code == 2
    assert text in one_line(result.output.replace("│", " "))


def test_many_layers_have_few_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Quantizers are made once for a class, and buffers worked out once for a size, however many layers there are."""
    from te_precision_callbacks.coverage import planned_products
    from te_precision_callbacks.speed.memory import planned

    made: list[str] = []
    own = planned_products._made_quantizers, planned.planned_bytes
    monkeypatch.setattr(
        planned_products, "_made_quantizers", lambda *a, **k: made.append("quantizers") or own[0](*a, **k)
    )
    monkeypatch.setattr(planned, "planned_bytes", lambda *a, **k: made.append("bytes") or own[1](*a, **k))
    with any_capability():
        stand_for((10, 0))
        from transformer_engine.common.recipe import MXFP8BlockScaling

        model = torch.nn.ModuleList(te.Linear(64, 64, params_dtype=BF16, device="meta") for _ in range(200))
        before = {name: set(vars(module)) for name, module in model.named_modules()}
        memory = plan_memory(model, named_te_modules(model), MXFP8BlockScaling(), tokens=128)
        assert {name: set(vars(module)) for name, module in model.named_modules()} == before, "nothing of it changes"
    assert len(memory.layers) == 200
    assert made == ["quantizers", "bytes", "bytes", "bytes"]
