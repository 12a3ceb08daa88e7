"""The models and the loop of the Accelerate tests, and what reads the trackers' files."""

import json
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
from accelerate import Accelerator

from te_precision_callbacks.accelerate import PrecisionDebugger
from tests.accelerate.conftest import reset
from tests.lightning.models import loader


class Plain(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1 = te.Linear(32, 32)
        self.fc2 = te.LayerNormLinear(32, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.fc1(inputs))


class Torch(torch.nn.Module):
    """Three layers of torch, which Accelerate's FP8 replaces: the last one cannot be."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc1 = torch.nn.Linear(32, 64)
        self.fc2 = torch.nn.Linear(64, 32)
        self.head = torch.nn.Linear(32, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.fc2(self.fc1(inputs).relu()))


def prepared(accelerator: Accelerator, model: torch.nn.Module, batches: int = 6, size: int = 8) -> tuple[Any, Any, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return accelerator.prepare(model, optimizer, loader(batches, size))


def fresh(model: torch.nn.Module | None = None, batches: int = 6, size: int = 8, **keywords: Any) -> Any:
    reset()
    accelerator = Accelerator(**keywords)
    return accelerator, *prepared(accelerator, model or Plain(), batches, size)


def train(
    accelerator: Accelerator, debugger: PrecisionDebugger, model: Any, optimizer: Any, loader: Any
) -> Iterator[torch.Tensor]:
    """One epoch of a user's loop; gives the loss after each optimizer step, before the debugger's step."""
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(batch).pow(2).mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        yield loss.detach()
        debugger.step()


def run(accelerator: Accelerator, debugger: PrecisionDebugger, model: Any, optimizer: Any, loader: Any) -> None:
    for _ in train(accelerator, debugger, model, optimizer, loader):
        pass


# ---------------------------------------------------------------------- what trackers wrote


def mlflow_metrics(store: Path) -> dict[str, dict[int, float]]:
    """Name -> step -> value, from MLflow's files of the only run: a line is a time, a value and a step."""
    (folder,) = store.glob("*/*/metrics")
    results: dict[str, dict[int, float]] = {}
    for path in (path for path in folder.rglob("*") if path.is_file()):
        lines = [line.split() for line in path.read_text().splitlines()]
        results[str(path.relative_to(folder))] = {int(step): float(value) for _, value, step in lines}
        assert len(results[str(path.relative_to(folder))]) == len(lines), f"{path.name}: two values at one step"
    return results


def wandb_history(folder: Path) -> dict[int, dict[str, Any]]:
    """Step -> name -> value, from the file of the only offline run, once the service has written its end."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    records: list[Any] = []
    deadline = time.monotonic() + 60
    while not any(record.WhichOneof("record_type") == "exit" for record in records) and time.monotonic() < deadline:
        records = [wandb_internal_pb2.Record.FromString(content) for content in _leveldb_log(path.read_bytes())]
    rows: dict[int, dict[str, Any]] = {}
    for record in records:
        if record.WhichOneof("record_type") == "history":
            items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
            row = rows.setdefault(record.history.step.num, {})
            row.update({name: json.loads(value) for name, value in items.items() if not name.startswith("_")})
    return rows


def _leveldb_log(data: bytes) -> Iterator[bytes]:
    """The records of a LevelDB log, after a header of 7 bytes: https://github.com/google/leveldb doc/log_format.md"""
    block, header = 32768, struct.Struct("<IHB")
    position, parts = 7, b""
    while position + header.size <= len(data):
        if (left := block - position % block) < header.size:
            position += left
            continue
        _, length, kind = header.unpack_from(data, position)
        position += header.size
        if position + length > len(data):  # being written
            return
        parts += data[position : position + length]
        position += length
        if kind in (1, 4):  # a whole record, or its last part
            yield parts
            parts = b""
