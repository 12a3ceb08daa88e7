"""A small language model of Transformer Engine layers, trained with Lightning in FP8 in a few seconds.

    python examples/small_model.py

docs/start.md runs and imports it. With CUDA and a compiled Transformer Engine it uses those; otherwise the reference
backend of this project.
"""

from __future__ import annotations

import logging
import warnings
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader

from te_precision_callbacks import PrecisionDebugCallback, reference

reference.install_where_needed()  # without a GPU: before the first import of transformer_engine

import transformer_engine.pytorch as te  # noqa: E402
from transformer_engine.common.recipe import DelayedScaling, Recipe  # noqa: E402

FP8 = DelayedScaling()

torch.set_num_threads(1)  # on a CPU, tensors this small gain nothing from more
# Lightning's own notices and a deprecation inside of it are not what this example is about.
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
warnings.filterwarnings("ignore", message=".*LeafSpec.*|.*does not have many workers.*")


class SmallModel(L.LightningModule):
    """Continues sequences such as 3, 7, 11, 15.

    Args:
        recipe: how Transformer Engine quantizes; None for no FP8.
        padding: the value of the embedding where a row has zeros, after the end of a sequence.
    """

    def __init__(self, recipe: Recipe | None = FP8, padding: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recipe, self.padding = recipe, padding
        self.embedding = torch.nn.Embedding(256, 64)
        self.project = te.Linear(64, 64)
        self.layers = torch.nn.ModuleList(
            te.TransformerLayer(
                64,
                256,
                4,
                self_attn_mask_type="causal",
                attn_input_format="bshd",
                hidden_dropout=0,
                attention_dropout=0,
            )
            for _ in range(3)
        )
        self.head = torch.nn.Linear(64, 256)
        self.losses: list[float] = []

    def embed(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(tokens)
        return hidden.masked_fill(tokens[..., None] == 0, self.padding)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens)
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            hidden = self.project(hidden)
            for layer in self.layers:
                hidden = layer(hidden)
        logits: torch.Tensor = self.head(hidden)
        return logits

    def training_step(self, tokens: torch.Tensor, batch_idx: int) -> torch.Tensor:
        logits = self(tokens[:, :-1]).flatten(0, 1)
        loss = torch.nn.functional.cross_entropy(logits, tokens[:, 1:].flatten(), ignore_index=0)
        self.log("loss", loss)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def sequences(steps: int = 30, seed: int = 0) -> torch.Tensor:
    """Eight rows for each step, of 17 numbers from 1 to 32."""
    generator = torch.Generator().manual_seed(seed)
    starts, distances = torch.randint(0, 224, (2, 8 * steps, 1), generator=generator)
    rows: torch.Tensor = 1 + (starts + distances % 7 * torch.arange(17)) % 32
    return rows


def train(model: SmallModel, rows: Any, config: Any = None, **options: Any) -> Any:
    """Trains for an epoch under the callback, which takes the options. The session of the run."""
    callback = PrecisionDebugCallback(config, **options)
    trainer = L.Trainer(
        max_epochs=1,
        precision="bf16-mixed",
        devices=1,
        callbacks=[callback],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(rows, batch_size=8))
    return callback.session


if __name__ == "__main__":
    model = SmallModel()
    session = train(model, sequences(), log_dir="runs/start")
    print(f"loss: {model.losses[0]:.2f} -> {model.losses[-1]:.2f}")
    print(session.coverage())
