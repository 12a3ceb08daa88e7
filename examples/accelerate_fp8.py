"""A small Llama from transformers, trained with Accelerate in FP8 under precision debugging.

    python examples/accelerate_fp8.py [--steps 20] [--config examples/accelerate_fp8.yaml]
    accelerate launch --num_processes 8 --multi_gpu examples/accelerate_fp8.py

Accelerate replaces the Linear layers of the model by Transformer Engine's. It learns from the source files of Python's
standard library, which are on every machine. With CUDA and a compiled Transformer Engine it uses those; otherwise the
reference backend of this project.
"""

from __future__ import annotations

import argparse
import sysconfig
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs, set_seed
from rich.console import Console
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

from te_precision_callbacks import reference
from te_precision_callbacks.accelerate import PrecisionDebugger

HERE = Path(__file__).parent
WINDOW, BATCH, ACCUMULATION = 64, 8, 2


class StandardLibraryBytes(Dataset[torch.Tensor]):
    """Windows of bytes from the source files of Python's standard library."""

    def __init__(self, window: int, count: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(path.read_bytes() for path in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.window = window
        starts = torch.Generator().manual_seed(0)
        self.starts = torch.randint(len(self.bytes) - window, (count,), generator=starts)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = int(self.starts[index])
        return self.bytes[start : start + self.window].long()


def main(arguments: list[str] | None = None) -> list[float]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimizer steps (default: 20)")
    parser.add_argument("--config", type=Path, default=HERE / "accelerate_fp8.yaml", help="the debug config")
    parser.add_argument("--log-dir", type=Path, default=Path("runs/accelerate_fp8"), help="where everything is written")
    options = parser.parse_args(arguments)
    reference.install_where_needed()

    set_seed(0)
    accelerator = Accelerator(
        mixed_precision="fp8",
        kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID", amax_history_len=16, amax_compute_algo="max")],
        gradient_accumulation_steps=ACCUMULATION,
        log_with="tensorboard",
        project_dir=options.log_dir,
    )
    accelerator.init_trackers("board")
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=2,
            num_attention_heads=4,
            tie_word_embeddings=False,  # Accelerate copies the weights that it converts, which unties them
        )
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    data = StandardLibraryBytes(WINDOW, count=options.steps * ACCUMULATION * BATCH * accelerator.num_processes)
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH))

    losses: list[float] = []
    model.train()
    with PrecisionDebugger(accelerator, model, options.config) as debugger:
        for tokens in loader:
            with accelerator.accumulate(model):
                loss = model(input_ids=tokens, labels=tokens).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            debugger.step()
            if accelerator.sync_gradients:
                losses.append(loss.item())
                accelerator.log({"loss": losses[-1]}, step=len(losses))
    accelerator.end_training()

    if accelerator.is_main_process:
        console = Console()
        console.print(debugger.session.findings.summary)
        console.print(str(debugger.session.coverage()))
        console.print(f"TensorBoard: tensorboard --logdir {options.log_dir / 'board'}", soft_wrap=True)
        console.print(f"Loss: {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
