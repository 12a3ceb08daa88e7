"""The outputs of one small training with a defect, of the same training without it, and of the commands that read them.

Folders, times, names of runs, versions and the machine are masked.
"""

import io
import os
import re
import sys
import warnings
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from lightning.fabric import Fabric
from transformer_engine.common.recipe import Float8CurrentScaling
from typer.testing import CliRunner

from te_precision_callbacks import cli
from te_precision_callbacks.accelerate import PrecisionDebugger
from te_precision_callbacks.fabric import PrecisionDebugFabricCallback
from te_precision_callbacks.lightning import PrecisionDebugCallback
from te_precision_callbacks.transformers import PrecisionDebugTrainerCallback
from tests.diagnosis.planted import blocks, train
from tests.forked import executable
from tests.lightning.models import log_of, trainer
from tests.transformers.models import arguments
from tests.transformers.models import trainer as hf_trainer

STEPS = 3
WIDTH = 110
ENVIRONMENT = {"COLUMNS": str(WIDTH), "TE_PRECISION_QUIET": "", "CUDA_VISIBLE_DEVICES": ""}

CONFIG = """\
gradients:
  enabled: True
  layers: {layer_types: [fc]}
  transformer_engine:
    LogTensorStats: {enabled: True, tensors: [gradient], stats: [max, std], freq: 10}
first:
  enabled: True
  layers: {layer_numbers: [0]}
  transformer_engine:
    DisableFP8GEMM: {enabled: True, gemms: [dgrad]}
"""

MODEL = """\
from tests.diagnosis.planted import blocks

def build():
    return blocks()
"""

COMMANDS = {
    "show": "show defect",
    "diagnose": "diagnose defect",
    "diagnose_healthy": "diagnose healthy",
    "check": "check config.yaml --model model:build --tokens 128 --recipe fp8_current_scaling",
    "check_wrong": "check wrong.yaml",
    "compare": "compare healthy defect",
    "doctor": "doctor --log-dir defect",
    "features": "features DisableFP8GEMM",
    "statistics": "statistics underflows%",
    "statistics_of_a_recipe": "statistics mxfp8_e5m2_mse_columnwise",
    "features_with_tensors": "features FakeQuant",
    "rules": "rules sibling",
}
"""Golden file -> the command in a folder with the runs, a config, and a module with a model."""

MASKS = (
    (r"\d{4}-\d{2}-\d{2}[T ]\d{2}:\d{2}:\d{2}([,.]\d+)?(\+00:00|Z)?", "<time>"),
    (r"\d{8}-\d{6}-\d+-[0-9a-f]{6}", "<run>"),
    (r"(te-precision doctor on|free space\b).*", r"\1 <machine>"),
)
VERSION = r"\d+(\.\d+)+(\+\w+)?"
"""Masked in the output of ``doctor``. Other outputs have no version, and their numbers may differ a little."""


def golden() -> dict[str, str]:
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted(Path(__file__).parent.glob("*.txt"))}


def outputs(folder: Path) -> Mapping[str, str]:
    # Where doctor looks for a compiled build, importing takes most of the time.
    python = mock.patch.object(sys, "executable", executable())
    with mock.patch.dict(os.environ, ENVIRONMENT), python, chdir(folder):
        made = {f"closing_{name}": closing_lines(run) for name, run in INTEGRATIONS.items()}
        train(Path("healthy"), steps=STEPS, defect=False, quiet=True)
        Path("config.yaml").write_text(CONFIG)
        Path("wrong.yaml").write_text(CONFIG.replace("[max, std]", "[maxx]").replace("dgrad", "dgrat"))
        Path("model.py").write_text(MODEL)
        made |= {name: printed(command) for name, command in COMMANDS.items()}
        made["statistics_log"] = "".join(log_of(Path("defect"), 0).read_text().splitlines(keepends=True)[:12])
        made["doctor"] = re.sub(" +", " ", re.sub(VERSION, "<version>", made["doctor"]))
        # A torch that was built for CUDA has versions of CUDA and cuDNN where there is no driver, too.
        made["doctor"] = made["doctor"].replace("none, <version>, <version>", "none")
    return {name: masked(text, folder) for name, text in made.items()}


def printed(command: str) -> str:
    result = CliRunner().invoke(cli.app, command.split(), env=ENVIRONMENT)
    error = f"{result.exception}\n" if isinstance(result.exception, cli.PrecisionDebugError) else ""
    lines = "".join(f"{line.rstrip()}\n" for line in f"{result.output}{error}".splitlines())
    return f"$ te-precision {command}\n{lines}exit code {result.exit_code}\n"


def masked(text: str, folder: Path) -> str:
    text = re.sub(r"(folder)\n +<folder>", r"\1 <folder>", text.replace(str(folder), "<folder>"))  # a long path wraps
    for pattern, mask in MASKS:
        text = re.sub(pattern, mask, text)
    return text


def closing_lines(run: Callable[[], object]) -> str:
    """Return the output of a training from the verdict on."""
    with redirect_stderr(io.StringIO()) as printed_lines, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run()
    lines = printed_lines.getvalue().splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("te-precision: "))
    return "".join(f"{line}\n" for line in lines[first:] if line.startswith(("te-precision: ", "  ")))


# ---------------------------------------------------------------------- the same training in each integration


def batches() -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    return [torch.randn(16, 32, generator=draw) for _ in range(STEPS)]


class Module(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = blocks()

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        with te.autocast(recipe=Float8CurrentScaling()):
            loss = (self.net(batch) - 1).pow(2).mean()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class ForTrainer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = blocks()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        with te.autocast(recipe=Float8CurrentScaling()):
            return {"loss": (self.net(inputs) - 1).pow(2).mean()}


def by_session() -> None:
    torch.manual_seed(0)
    train(Path("defect"), steps=STEPS)


def by_lightning() -> None:
    made = trainer(Path(), callbacks=[PrecisionDebugCallback(log_dir=Path("lightning"))])
    made.fit(Module(), torch.utils.data.DataLoader(batches(), batch_size=None))


def by_accelerate() -> None:
    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(net := blocks(), torch.optim.SGD(net.parameters(), lr=1e-3))
    with PrecisionDebugger(accelerator, model, log_dir=Path("accelerate")) as debugger:
        for batch in batches():
            step(model, batch, optimizer, accelerator.backward)
            debugger.step()
    AcceleratorState._reset_state(reset_partial_state=True)


def by_trainer() -> None:
    args = arguments(Path("trainer"), max_steps=STEPS, per_device_train_batch_size=16, learning_rate=1e-3)
    hf_trainer(args, PrecisionDebugTrainerCallback(), model=ForTrainer()).train()
    AcceleratorState._reset_state(reset_partial_state=True)


def by_fabric() -> None:
    callback = PrecisionDebugFabricCallback(log_dir=Path("fabric"))
    fabric = Fabric(accelerator="cpu", devices=1, callbacks=[callback])
    fabric.launch()
    model, optimizer = fabric.setup(net := blocks(), torch.optim.SGD(net.parameters(), lr=1e-3))
    with callback:
        for index, batch in enumerate(batches()):
            fabric.call("on_train_batch_end", step(model, batch, optimizer, fabric.backward), index)


def step(model: Any, batch: torch.Tensor, optimizer: Any, backward: Callable[[torch.Tensor], object]) -> torch.Tensor:
    with te.autocast(recipe=Float8CurrentScaling()):
        loss: torch.Tensor = (model(batch) - 1).pow(2).mean()
    backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return loss


INTEGRATIONS: dict[str, Callable[[], None]] = {
    "session": by_session,
    "lightning": by_lightning,
    "accelerate": by_accelerate,
    "trainer": by_trainer,
    "fabric": by_fabric,
}
