"""Fine-tune a tiny Llama in FP8 with TRL's SFTTrainer: Accelerate converts the layers that it is made of.

Usage::

    ACCELERATE_MIXED_PRECISION=fp8 ACCELERATE_FP8_BACKEND=TE python train_sft.py

Without any code for the debugger: it stands for a script of a user of TRL. The vocabulary is not a multiple of 16, so
``lm_head`` stays a layer of torch; SFTTrainer's loss takes its weight and bias.
"""

import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

VOCABULARY, SEQUENCE, BATCH, STEPS = 120, 32, 4, 3


def main() -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_hidden_layers=2,
            max_position_embeddings=SEQUENCE,
        )
    )
    words = {"<pad>": 0, "<eos>": 1} | {f"w{number}": number for number in range(2, VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel(words, unk_token="<pad>")), pad_token="<pad>", eos_token="<eos>"
    )
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(2, VOCABULARY, (BATCH * STEPS, SEQUENCE), generator=generator)
    trainer = SFTTrainer(
        model=model,
        args=SFTConfig(
            output_dir="out",
            max_steps=STEPS,
            per_device_train_batch_size=BATCH,
            max_length=SEQUENCE,
            bf16=False,
            gradient_checkpointing=False,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
        ),
        train_dataset=Dataset.from_list([{"input_ids": row} for row in tokens.tolist()]),
        processing_class=tokenizer,
    )
    trainer.train()


if __name__ == "__main__":
    main()
