"""A byte-level language model of Transformer Engine layers, trained with Fabric in FP8 under precision debugging.

    python examples/fabric_fp8.py [--steps 20] [--config examples/demo.yaml]

It learns from the source files of Python's standard library, which are on every machine. With CUDA and a compiled
Transformer Engine it uses those; otherwise the reference backend of this project.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path
from typing import Any

import torch
from lightning.fabric import Fabric
from lightning.fabric.loggers.tensorboard import TensorBoardLogger
from rich.console import Console
from torch.utils.data import DataLoader

from te_precision_callbacks import PrecisionDebugFabricCallback, reference

HERE = Path(__file__).parent
WINDOW, BATCH = 64, 8


def windows(count: int) -> list[torch.Tensor]:
    """Windows of bytes from the source files of Python's standard library."""
    text = b"\n".join(path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    starts = torch.randint(len(data) - WINDOW, (count,), generator=torch.Generator().manual_seed(0))
    return [data[start : start + WINDOW + 1].long() for start in starts.tolist()]


class ByteLanguageModel(torch.nn.Module):
    """Predicts the next byte."""

    def __init__(self, layers: int = 2, hidden: int = 128) -> None:
        super().__init__()
        import transformer_engine.pytorch as te

        self.embedding = torch.nn.Embedding(256, hidden)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(hidden, 2 * hidden, 4, hidden_dropout=0.0, attention_dropout=0.0) for _ in range(layers)
        )
        self.head = torch.nn.Linear(hidden, 256)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        hidden = self.embedding(tokens[:, :-1].T)  # sequence first, as Transformer Engine has it
        with te.autocast(enabled=True):
            for layer in self.layers:
                hidden = layer(hidden)
        guesses = self.head(hidden).flatten(0, 1)
        return torch.nn.functional.cross_entropy(guesses, tokens[:, 1:].T.flatten())


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--config", type=Path, default=HERE / "demo.yaml", help="the debug config")
    parser.add_argument("--log-dir", type=Path, default=Path("runs/fabric_fp8"), help="where everything is written")
    options = parser.parse_args(arguments)
    reference.install_where_needed()

    callback = PrecisionDebugFabricCallback(options.config, log_dir=options.log_dir)
    board = TensorBoardLogger(options.log_dir, name="board", version="")
    fabric = Fabric(devices=1, loggers=board, callbacks=[callback])
    fabric.launch()
    fabric.seed_everything(0)
    model = ByteLanguageModel()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), lr=2e-3))
    data: Any = windows(options.steps * BATCH)  # a list is a data set too
    loader = fabric.setup_dataloaders(DataLoader(data, batch_size=BATCH))

    losses: list[float] = []
    with callback:
        for step, tokens in enumerate(loader):
            loss = model(tokens)
            fabric.backward(loss)
            losses.append(loss.item())
            callback.session.log({"loss": losses[-1]})
            fabric.log_dict({"loss": losses[-1]}, step)
            optimizer.step()
            optimizer.zero_grad()
    board.finalize("success")

    console = Console()
    console.print(callback.session.findings.summary)
    console.print(str(callback.session.coverage()))
    console.print(f"TensorBoard: tensorboard --logdir {options.log_dir / 'board'}", soft_wrap=True)
    console.print(f"Loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
