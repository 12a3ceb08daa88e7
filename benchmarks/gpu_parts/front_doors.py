"""A short training in FP8 under each front door: Lightning, Accelerate, the Hugging Face Trainer.

Statistics must reach a sink in every step and be finite, and the session must know the precision of the GEMMs and the
matrix products. A framework that is not installed is left out.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

from gpu_parts.rows import Rows, Settings, in_one_line, run_part
from te_precision_callbacks.session.session import running_session
from te_precision_callbacks.sinks import RunInfo, StepRecords

STEPS = 4
SIZE, BATCH = 64, 32
"""Multiples of what any recipe needs."""
CONFIG: dict[str, Any] = {
    "statistics": {
        "enabled": True,
        "layers": {"layer_name_regex_pattern": ".*"},
        "transformer_engine": {
            "LogTensorStats": {
                "enabled": True,
                "tensors": ["activation", "weight", "gradient"],
                "stats": ["max", "std"],
            },
            "LogFp8TensorStats": {"enabled": True, "tensors": ["activation", "gradient"], "stats": ["underflows%"]},
        },
    }
}
STATISTICS_OF_A_LAYER = 3 * 2 + 2


class Sink:
    """Keeps the records of each step."""

    def __init__(self) -> None:
        self.steps: list[StepRecords] = []

    def start(self, run: RunInfo) -> None:
        pass

    def write(self, records: StepRecords) -> None:
        self.steps.append(records)

    def close(self, error: BaseException | None) -> None:
        pass


class Vectors(Dataset[Any]):
    """Random vectors; as a mapping, for the Hugging Face Trainer."""

    def __init__(self, *, as_mapping: bool = False) -> None:
        self._as_mapping = as_mapping

    def __len__(self) -> int:
        return STEPS * BATCH

    def __getitem__(self, index: int) -> Any:
        vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(index))
        return {"inputs": vector, "labels": torch.tensor(index)} if self._as_mapping else vector


def _layers(settings: Settings) -> torch.nn.Module:
    te = settings.transformer_engine()
    first = te.Linear(SIZE, 2 * SIZE, device=settings.device)
    return torch.nn.Sequential(first, te.LayerNormLinear(2 * SIZE, SIZE, device=settings.device))


def _loss(layers: torch.nn.Module, inputs: torch.Tensor, settings: Settings) -> torch.Tensor:
    te = settings.transformer_engine()
    with te.autocast(enabled=True):
        result: torch.Tensor = layers(inputs)
    return result.square().mean()


def lightning(settings: Settings, sink: Sink, folder: Path) -> Any:
    """PrecisionDebugCallback in a Trainer."""
    import lightning as L

    from te_precision_callbacks import PrecisionDebugCallback

    class Model(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers(settings)

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return _loss(self.layers, batch, settings)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callback = PrecisionDebugCallback(CONFIG, log_dir=folder, sinks=[sink])
    trainer = L.Trainer(
        accelerator="gpu" if settings.on_gpu else "cpu",
        devices=1,
        max_steps=STEPS,
        logger=False,
        callbacks=[callback],
        default_root_dir=folder,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    trainer.fit(Model(), DataLoader(Vectors(), batch_size=BATCH))
    return callback.session


def accelerate(settings: Settings, sink: Sink, folder: Path) -> Any:
    """PrecisionDebugger in a loop, with the layers that Accelerate's own FP8 puts in the place of torch's."""
    settings.transformer_engine()
    from accelerate import Accelerator
    from accelerate.utils import TERecipeKwargs

    from te_precision_callbacks.accelerate import PrecisionDebugger

    prepares = Accelerator(
        cpu=not settings.on_gpu, mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID")]
    )
    model: Any = torch.nn.Sequential(torch.nn.Linear(SIZE, 2 * SIZE), torch.nn.Linear(2 * SIZE, SIZE))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01)
    model, optimizer, loader = prepares.prepare(model, optimizer, DataLoader(Vectors(), batch_size=BATCH))
    with PrecisionDebugger(prepares, model, CONFIG, log_dir=folder, sinks=[sink]) as debugger:
        for batch in loader:
            prepares.backward(model(batch).square().mean())
            optimizer.step()
            optimizer.zero_grad()
            debugger.step()
    return debugger.session


def transformers(settings: Settings, sink: Sink, folder: Path) -> Any:
    """PrecisionDebugTrainerCallback in the Hugging Face Trainer."""
    settings.transformer_engine()
    from transformers import PrinterCallback, Trainer, TrainingArguments

    from te_precision_callbacks import PrecisionDebugTrainerCallback

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = _layers(settings)

        def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> Mapping[str, torch.Tensor]:
            return {"loss": _loss(self.layers, inputs, settings)}

    callback = PrecisionDebugTrainerCallback(CONFIG, log_dir=folder, sinks=[sink])
    arguments = TrainingArguments(
        output_dir=str(folder / "output"),
        use_cpu=not settings.on_gpu,
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=settings.on_gpu,
    )
    trainer = Trainer(model=Model(), args=arguments, train_dataset=Vectors(as_mapping=True), callbacks=[callback])
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return callback.session


DOORS: dict[str, Callable[[Settings, Sink, Path], Any]] = {
    "lightning": lightning,
    "accelerate": accelerate,
    "transformers": transformers,
}


def _judge(name: str, session: Any, sink: Sink, rows: Rows) -> None:
    values = [row.value for records in sink.steps for row in records]
    layers = {row.layer for records in sink.steps for row in records}
    rows.equal(f"{name}: steps", len(sink.steps), STEPS)
    rows.equal(f"{name}: layers", len(layers), 2)
    rows.equal(f"{name}: statistics", len(values), STEPS * 2 * STATISTICS_OF_A_LAYER)
    rows.equal(f"{name}: statistics that are not finite", sum(not math.isfinite(value) for value in values), 0)
    formats = sorted({text for entry in session.precision for text in entry.operands.values()})
    rows.add(
        f"{name}: formats of the GEMMs",
        ", ".join(formats),
        expected="FP8 or MXFP8",
        ok=any("FP8" in text for text in formats),
    )
    rows.equal(f"{name}: GEMMs whose precision is known", len(session.precision) >= 5, True)
    share = session.coverage().share("quantized") if len(session.coverage()) else 0.0
    rows.add(f"{name}: multiply-adds in low precision", share, expected="> 0", ok=share > 0)
    rows.equal(f"{name}: sessions that still run", int(running_session() is not None), 0)


def check(settings: Settings, rows: Rows) -> None:
    for name in ("lightning.pytorch", "transformers"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for name, train in DOORS.items():
        if importlib.util.find_spec(name) is None:
            rows.left_out(name, f"{name} is not installed")
            continue
        sink = Sink()
        with tempfile.TemporaryDirectory() as folder:
            try:
                session = train(settings, sink, Path(folder))
            except Exception as error:
                rows.add(f"{name}: training", "failed", expected="ran", ok=False, note=in_one_line(error))
                if (left := running_session()) is not None:
                    left.stop(error)
                continue
        _judge(name, session, sink, rows)


if __name__ == "__main__":
    run_part("front_doors", check)
