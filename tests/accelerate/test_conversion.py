"""A run in BF16 gets the layers of Transformer Engine that a run in FP8 has, and both are compared."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformer_engine.pytorch as te
from accelerate.state import is_initialized
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.accelerate import PrecisionDebugger, convert_to_te
from te_precision_callbacks.base.errors import OptionError
from te_precision_callbacks.runs import open_run
from te_precision_callbacks.views.compare import compare
from tests.accelerate.loops import Torch, fresh, run


def recorded(folder: Path, precision: str, model: torch.nn.Module) -> Path:
    accelerator, *loop = fresh(model, size=16, mixed_precision=precision)
    with PrecisionDebugger(accelerator, loop[0], log_dir=folder / precision, quiet=True) as debugger:
        run(accelerator, debugger, *loop)
    return folder / precision


def test_a_model_is_converted_as_accelerate_does(tmp_path: Path) -> None:
    model = Torch()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert convert_to_te(model) is model
    assert not is_initialized()  # an Accelerator that is made later chooses its own precision
    assert [type(layer) for layer in model.children()] == [te.Linear, te.Linear, torch.nn.Linear]
    after = model.state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    with pytest.raises(OptionError, match="not a list"):
        convert_to_te([model])  # type: ignore[type-var]


def test_bf16_against_fp8_in_accelerate(tmp_path: Path) -> None:
    fp8, bf16 = (recorded(tmp_path, precision, Torch()) for precision in ("fp8", "bf16"))
    result = compare(open_run(bf16), open_run(fp8))
    assert result.loss is not None
    assert result.loss.steps == 6
    assert "convert_to_te(model)" in result.layers_apart
    shown = CliRunner().invoke(cli.app, ["compare", str(bf16), str(fp8)])
    assert "has no statistics of layers, so no layer can be compared" in " ".join(shown.stdout.split("A: ")[0].split())

    bf16 = recorded(tmp_path / "converted", "bf16", convert_to_te(Torch()))
    result = compare(open_run(bf16), open_run(fp8))
    assert (result.layers_apart, result.pairing.layers) == ("", 2)
