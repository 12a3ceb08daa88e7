"""Train LoRA adapters of a tiny BERT in FP8: PEFT wraps the layers, Accelerate converts the layers inside.

Usage::

    python train_lora.py

Without any code for the debugger: it stands for a script of a user of PEFT and Accelerate.
"""

import torch
from accelerate import Accelerator
from accelerate.utils import TERecipeKwargs
from peft import LoraConfig, get_peft_model
from transformers import BertConfig, BertForSequenceClassification

VOCABULARY, SEQUENCE, BATCH, STEPS = 128, 32, 16, 3


def main() -> None:
    torch.manual_seed(0)
    model = BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_hidden_layers=2,
            max_position_embeddings=SEQUENCE,
            num_labels=16,
        )
    )
    lora = LoraConfig(task_type="SEQ_CLS", r=16, lora_alpha=32, target_modules=["query", "value", "dense"])
    model = get_peft_model(model, lora)
    model.print_trainable_parameters()

    accelerator = Accelerator(mixed_precision="fp8", kwargs_handlers=[TERecipeKwargs(fp8_format="HYBRID")])
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3)
    model, optimizer = accelerator.prepare(model, optimizer)

    model.train()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        tokens = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator).to(accelerator.device)
        labels = torch.randint(0, 16, (BATCH,), generator=generator).to(accelerator.device)
        loss = model(input_ids=tokens, labels=labels).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        print(f"step {step}: loss {loss.item()!r}", flush=True)


if __name__ == "__main__":
    main()
