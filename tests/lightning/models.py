"""The models and the trainer of the Lightning tests."""

import csv
import re
from pathlib import Path
from typing import Any

import lightning as L
import torch
import transformer_engine.pytorch as te
from torch.utils.data import DataLoader


def sample(index: int) -> torch.Tensor:
    """Drawn from a separate seed, so that a test can make it again."""
    return torch.randn(32, generator=torch.Generator().manual_seed(index))


def samples(count: int) -> list[torch.Tensor]:
    return [sample(index) for index in range(count)]


def batch_of(index: int, size: int = 8) -> torch.Tensor:
    """The ``index``-th batch of an unshuffled loader."""
    return torch.stack([sample(i) for i in range(index * size, (index + 1) * size)])


def largest(*batches: int) -> float:
    return max(batch_of(index).max().item() for index in batches)


def loader(batches: int, size: int = 8) -> DataLoader[torch.Tensor]:
    return DataLoader(samples(batches * size), batch_size=size)


class Plain(L.LightningModule):
    def __init__(self, lr: float = 0.01) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(te.Linear(32, 32), te.LayerNormLinear(32, 32))
        self.lr = lr
        self.fail_at: dict[int, BaseException] = {}
        self.validation_outputs: list[torch.Tensor] = []

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        out = self.net(batch)
        if error := self.fail_at.get(batch_idx):
            raise error
        self.log("batch_idx", float(batch_idx))
        return out.pow(2).mean()

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.validation_outputs.append(self.net(100 * batch).clone())

    test_step = validation_step

    def predict_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.net(100 * batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class TwoOptimizers(Plain):
    """Manual optimization: both optimizers step in every ``every``-th batch."""

    def __init__(self, every: int = 1) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.every = every

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        first, second = self.optimizers()
        self.manual_backward(self.net(batch).pow(2).mean())
        if (batch_idx + 1) % self.every == 0:
            for optimizer in (first, second):
                optimizer.step()
                optimizer.zero_grad()
        self.log("batch_idx", float(batch_idx))

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        return [torch.optim.SGD(layer.parameters(), lr=0.01) for layer in self.net]


class Torch(L.LightningModule):
    """A model of torch layers, for Lightning's TransformerEnginePrecision to replace."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = torch.nn.Sequential(torch.nn.LayerNorm(32), torch.nn.Linear(32, 32), torch.nn.GELU())
        self.head = torch.nn.Linear(32, 16)

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        self.log("batch_idx", float(batch_idx))
        return self.head(self.body(batch)).pow(2).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def trainer(root: Path, **keywords: Any) -> L.Trainer:
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "max_epochs": 1,
        "log_every_n_steps": 1,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
    }
    return L.Trainer(default_root_dir=root, **{**defaults, **keywords})


def logged_lines(log_dir: Path, rank: int = 0) -> dict[tuple[str, int], float]:
    """The statistics log of a rank's last run: (name, iteration) -> value. A name that is there twice is an error."""
    results: dict[tuple[str, int], float] = {}
    for line in _number_lines(log_dir, rank):
        _, _, rest = line.partition(" - INFO - ")
        name, iteration, value, *_ = (part.strip() for part in rest.split("\t\t\t\t"))
        key = (name, int(iteration.removeprefix("iteration=")))
        assert key not in results, key
        results[key] = float(value.removeprefix("value="))
    return results


def largest_inputs(log_dir: Path, layer: str = "net.0", rank: int = 0) -> dict[int, float]:
    """Iteration -> the largest element of the layer's input, in the statistics log."""
    lines = logged_lines(log_dir, rank)
    return {iteration: value for (name, iteration), value in lines.items() if name == f"{layer}_activation_max"}


def _number_lines(log_dir: Path, rank: int) -> list[str]:
    parts = re.split(r".{23} - INFO - Here another run begins, of process \d+\.\n", log_of(log_dir, rank).read_text())
    return parts[-1].splitlines()


def log_of(log_dir: Path, rank: int) -> Path:
    return log_dir / "nvdlfw_inspect_statistics_logs" / f"nvdlfw_inspect_globalrank-{rank}.log"


def marked_lines(log_dir: Path, rank: int) -> dict[int, set[str]]:
    """Marks after the values in the statistics log of a rank: iteration -> marks."""
    results: dict[int, set[str]] = {}
    for line in _number_lines(log_dir, rank):
        _, iteration, _, *marks = (part.strip() for part in line.split("\t\t\t\t"))
        results.setdefault(int(iteration.removeprefix("iteration=")), set()).update(marks)
    return results


def board(folder: Path | str) -> Any:
    """All that is in the event files of a TensorBoard folder."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder), size_guidance={"scalars": 0, "histograms": 0})
    accumulator.Reload()
    return accumulator


def board_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Tag -> step -> value."""
    read = board(folder)
    return {tag: {event.step: event.value for event in read.Scalars(tag)} for tag in read.Tags()["scalars"]}


def csv_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Column -> step -> value, from the metrics.csv of a CSVLogger."""
    results: dict[str, dict[int, float]] = {}
    with (folder / "metrics.csv").open() as file:
        for row in csv.DictReader(file):
            step = int(row.pop("step"))
            for name, value in row.items():
                if value:
                    results.setdefault(name, {})[step] = float(value)
    return results
