"""A Llama of a few layers, trained by the Hugging Face Trainer in FP8 under precision debugging.

    accelerate launch --config_file examples/hf_trainer_fp8_launch.yaml examples/hf_trainer_fp8.py \\
        --debug te_precision activation_overflow --te_precision_config examples/hf_trainer_fp8.yaml

It learns bytes from the source files of Python's standard library, which are on every machine; the model comes from a
config, so that nothing is downloaded. Every argument of transformers' TrainingArguments can be given. With CUDA and a
compiled Transformer Engine it uses those; otherwise the reference backend of this project.
"""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from torch.utils.data import Dataset
from transformers import HfArgumentParser, LlamaConfig, LlamaForCausalLM, set_seed

from te_precision_callbacks import reference
from te_precision_callbacks.debug_options import TE_PRECISION
from te_precision_callbacks.transformers import Trainer, TrainingArguments


class StandardLibraryBytes(Dataset[dict[str, torch.Tensor]]):
    """Windows of bytes from the source files of Python's standard library."""

    def __init__(self, window: int, count: int, seed: int) -> None:
        files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"\n".join(path.read_bytes() for path in files)
        self.bytes = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.window = window
        starts = torch.Generator().manual_seed(seed)
        self.starts = torch.randint(len(self.bytes) - window, (count,), generator=starts)

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        start = int(self.starts[index])
        tokens = self.bytes[start : start + self.window].long()
        return {"input_ids": tokens, "labels": tokens}


def byte_llama(window: int) -> LlamaForCausalLM:
    """A Llama for bytes. All sizes are multiples of 16: Accelerate converts no other Linear layer."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=window,
    )
    return LlamaForCausalLM(config)


def main(arguments: list[str] | None = None) -> Trainer:
    parser = HfArgumentParser(TrainingArguments, description=__doc__)  # type: ignore[arg-type]
    parser.set_defaults(
        output_dir="runs/hf_trainer_fp8",
        max_steps=60,
        per_device_train_batch_size=8,
        learning_rate=2e-3,
        logging_steps=10,
        eval_strategy="steps",
        eval_steps=30,
        save_strategy="no",
        report_to=["tensorboard"],
        disable_tqdm=True,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    (args,) = parser.parse_args_into_dataclasses(arguments)
    reference.install_where_needed()  # without a GPU: before Accelerate imports Transformer Engine
    set_seed(args.seed)
    window = 128
    trainer = Trainer(
        model=byte_llama(window),
        args=args,
        train_dataset=StandardLibraryBytes(window, count=4096, seed=0),
        eval_dataset=StandardLibraryBytes(window, count=32, seed=1),
    )
    trainer.train()
    if TE_PRECISION in args.debug and trainer.is_world_process_zero():
        print(trainer.debug_session.findings.summary)
        print(trainer.debug_session.coverage())
    return trainer


if __name__ == "__main__":
    main()
