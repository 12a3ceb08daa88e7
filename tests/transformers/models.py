"""The models, the data and the trainers of the Hugging Face tests."""

from pathlib import Path
from typing import Any

import torch
import transformer_engine.pytorch as te
import transformers
from transformer_engine.common.recipe import Recipe

from tests.lightning.models import sample

SIZE = 32


class Net(torch.nn.Module):
    """Two TE layers. It keeps the indices of the samples of each forward, and fails in the named ones."""

    _keys_to_ignore_on_save = None  # the Trainer reads it where a key is missing in a checkpoint

    def __init__(self, recipe: Recipe | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = torch.nn.Sequential(te.Linear(SIZE, SIZE), te.LayerNormLinear(SIZE, SIZE))
        self.recipe = recipe
        self.trained_on: list[list[int]] = []
        self.fail_at: dict[int, BaseException] = {}

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
        if not self.training:
            inputs = 100 * inputs
        with te.autocast(enabled=self.recipe is not None, recipe=self.recipe):
            output = self.net(inputs)
        if self.training and labels is not None:
            self.trained_on.append(labels.tolist())
            if error := self.fail_at.pop(len(self.trained_on) - 1, None):
                raise error
        return {"loss": output.pow(2).mean(), "logits": output}

    def largest(self, *batches: int) -> float:
        """The largest input of the first layer over the training forwards of these numbers."""
        return max(sample(index).max().item() for batch in batches for index in self.trained_on[batch])


def llama(*, of_te: bool = True) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=SIZE,
        intermediate_size=2 * SIZE,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=SIZE,
    )
    model = transformers.LlamaForCausalLM(config)
    for parent in list(model.modules()) if of_te else ():
        for name, child in list(parent.named_children()):
            if isinstance(child, torch.nn.Linear):
                setattr(parent, name, te.Linear(child.in_features, child.out_features, bias=child.bias is not None))
    return model


def vectors(count: int = 64) -> list[dict[str, torch.Tensor]]:
    return [{"inputs": sample(index), "labels": torch.tensor(index)} for index in range(count)]


def tokens() -> list[dict[str, torch.Tensor]]:
    rows = torch.randint(64, (32, 16), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in rows]


def arguments(folder: Path, kind: Any = transformers.TrainingArguments, **keywords: Any) -> Any:
    defaults: dict[str, Any] = {
        "use_cpu": True,
        "max_steps": 4,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "learning_rate": 0.01,
    }
    return kind(output_dir=str(folder), **{**defaults, **keywords})


def trainer(
    args: Any, *callbacks: Any, model: Any = None, kind: Any = transformers.Trainer, **keywords: Any
) -> transformers.Trainer:
    data = tokens() if isinstance(model, transformers.PreTrainedModel) else vectors()
    made = kind(model=model or Net(), args=args, train_dataset=data, eval_dataset=data, **keywords)
    made.remove_callback(transformers.PrinterCallback)
    for callback in callbacks:
        made.add_callback(callback)
    return made  # type: ignore[no-any-return]
