"""A byte-level language model of Transformer Engine layers, trained with Lightning in FP8 under precision debugging.

    python examples/byte_lm.py [--steps 32] [--config examples/demo.yaml]

It learns from the source files of Python's standard library, which are on every machine. With CUDA and a compiled
Transformer Engine it uses those; otherwise the reference backend of this project.
"""

from __future__ import annotations

import argparse
import logging
import os
import sysconfig
import warnings
from pathlib import Path

import lightning as L
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from te_precision_callbacks import PrecisionDebugCallback, reference

HERE = Path(os.path.relpath(Path(__file__).parent))


class StandardLibraryBytes(Dataset[torch.Tensor]):
    """Windows of bytes from the source files of Python's standard library."""

    def __init__(self, window: int, count: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(path.read_bytes() for path in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.window = window
        starts = torch.Generator().manual_seed(0)
        self.starts = torch.randint(len(self.bytes) - window - 1, (count,), generator=starts)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self.starts[index])
        return self.bytes[start : start + self.window + 1].long()


class ByteLanguageModel(L.LightningModule):
    """Predicts the next byte."""

    def __init__(self, layers: int = 3, hidden: int = 192, heads: int = 4, window: int = 128) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(256, hidden)
        self.positions = torch.nn.Embedding(window, hidden)
        self.sizes = (layers, hidden, heads)
        self.layers = torch.nn.ModuleList()
        self.head = torch.nn.Linear(hidden, 256)
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if len(self.layers):
            return
        import transformer_engine.pytorch as te

        count, hidden, heads = self.sizes
        self.layers.extend(
            te.TransformerLayer(
                hidden, 4 * hidden, heads, self_attn_mask_type="causal", attn_input_format="bshd", device=self.device
            )
            for _ in range(count)
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        import transformer_engine.pytorch as te

        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.embedding(tokens) + self.positions(positions)
        with te.autocast(enabled=True):
            for layer in self.layers:
                hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self(batch[:, :-1])
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())
        self.log("loss", loss, prog_bar=True)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def main(arguments: list[str] | None = None) -> ByteLanguageModel:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=32, help="training steps (default: 32)")
    parser.add_argument("--config", type=Path, default=HERE / "demo.yaml", help="the debug config")
    parser.add_argument("--log-dir", type=Path, default=Path("runs"), help="where everything is written")
    options = parser.parse_args(arguments)
    reference.install_where_needed()

    # Lightning's own notices and a deprecation inside of it are not what this example is about.
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*LeafSpec.*")
    L.seed_everything(0, verbose=False)
    board = TensorBoardLogger(options.log_dir, name="byte_lm")
    trainer = L.Trainer(
        max_epochs=1,
        logger=board,
        callbacks=[PrecisionDebugCallback(options.config)],
        accelerator="auto",
        devices=1,
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    model = ByteLanguageModel()
    data = DataLoader(StandardLibraryBytes(window=128, count=8 * options.steps), batch_size=8)
    trainer.fit(model, data)

    console = Console()
    console.print(f"TensorBoard: tensorboard --logdir {board.log_dir}", soft_wrap=True)
    console.print("Loss: " + _curve(model.losses))
    return model


def _curve(losses: list[float], points: int = 6) -> str:
    """The first loss, and a few points of the curve, each the mean of the steps around it."""
    size = max(1, len(losses) // points)
    parts = [losses[start : start + size] for start in range(0, len(losses), size)]
    return " -> ".join(f"{value:.3f}" for value in [losses[0], *(sum(part) / len(part) for part in parts[:points])])


if __name__ == "__main__":
    main()
