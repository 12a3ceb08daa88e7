"""What is kept, or passed on, in which type, beside the operands of products."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from te_precision_callbacks.session import InspectSession
from tests.coverage.test_coverage import BATCH, INNER, LENGTH, TOKENS, WIDTH, WORDS, Layers, llama, words

Rows = dict[tuple[str, str], tuple[int, int]]
"""(subject, type) -> tensors and bytes."""


def kept(model: torch.nn.Module, step: Callable[[], torch.Tensor], folder: Path, *, micro: int = 1) -> Rows:
    """What a step keeps."""
    optimizer = torch.optim.AdamW(model.parameters())
    with InspectSession(None, model=model, log_dir=folder, statistics_log="off", strict=True) as session:
        for _ in range(micro):
            step().backward()
        optimizer.step()
        session.step()
        rows = session.coverage().state
    assert not any(module._forward_pre_hooks for module in model.modules()), "the session has taken its hooks back"
    return {(row.subject, row.dtype): (row.tensors, row.bytes) for row in rows}


def test_a_gpt(tmp_path: Path) -> None:
    model = Layers()
    found = kept(model, lambda: model(words()).sum(), tmp_path, micro=2)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    tensors = len(list(model.parameters()))
    assert found["parameter", "float32"] == found["gradient", "float32"] == (tensors, 4 * numbers)
    assert found["optimizer_state", "float32"] == (2 * tensors, 2 * 4 * numbers)
    assert found["residual", "float32"] == (2 * 2, 2 * 2 * 4 * TOKENS * WIDTH), "of two blocks, in two micro-batches"
    assert found["logits", "float32"] == (2, 2 * 4 * TOKENS * WORDS)
    assert not any(subject == "reduce" for subject, _ in found), "there is one rank"


def test_under_autocast(tmp_path: Path) -> None:
    """torch.autocast keeps the residual stream of a Llama in float32, and makes its logits bfloat16."""
    model = llama()

    def step() -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: torch.Tensor = model(input_ids=words(), labels=words()).loss
        return loss

    found = kept(model, step, tmp_path)
    assert found["residual", "float32"] == (2, 2 * 4 * TOKENS * WIDTH)
    assert found["logits", "bfloat16"] == (1, 2 * TOKENS * WORDS)


@pytest.mark.parametrize("reentrant", [False, True])
def test_what_a_checkpoint_computes_again_is_not_counted_again(reentrant: bool, tmp_path: Path) -> None:
    def again(layer: torch.nn.Module, x: torch.Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=reentrant)

    model = Layers(block=again)
    found = kept(model, lambda: model(words()).sum(), tmp_path)
    assert found["residual", "float32"] == (2, 2 * 4 * TOKENS * WIDTH)


def test_a_model_that_returns_its_loss(tmp_path: Path) -> None:
    """Its logits are what cross entropy takes."""

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = torch.nn.Sequential(torch.nn.Linear(WIDTH, INNER), torch.nn.Linear(INNER, 8)).bfloat16()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.cross_entropy(self.body(x).float(), torch.zeros(len(x), dtype=torch.int64))

    model = Net()
    found = kept(model, lambda: model(torch.ones(TOKENS, WIDTH, dtype=torch.bfloat16)), tmp_path)
    assert found["logits", "float32"] == (1, 4 * TOKENS * 8)
    assert not any(subject == "residual" for subject, _ in found), "a list of plain layers is no list of blocks"


def test_blocks_are_the_outermost_lists_of_modules_of_one_class(tmp_path: Path) -> None:
    class Block(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = torch.nn.ModuleList(torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH)) for _ in range(2))

        def forward(self, *, scale: float, hidden: torch.Tensor) -> torch.Tensor:
            return torch.stack([expert(hidden) for expert in self.experts]).sum(0) * scale

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(scale=0.5, hidden=x)
            return x

    model = Net().double()
    found = kept(model, lambda: model(torch.ones(BATCH, LENGTH, WIDTH, dtype=torch.float64)).sum(), tmp_path)
    assert found["residual", "float64"] == (3, 3 * 8 * TOKENS * WIDTH)


def test_a_contract_on_the_residual_stream(tmp_path: Path) -> None:
    from te_precision_callbacks.session import PrecisionContractError

    model = Layers().bfloat16()
    demanded = {"state": {"residual": "float32"}, "by_step": 1}
    with (
        pytest.raises(PrecisionContractError, match=r"residual must be float32: some are bfloat16"),
        te.autocast(enabled=False),
        InspectSession(None, model=model, log_dir=tmp_path, require=demanded) as session,
    ):
        model(words()).sum().backward()
        session.step()
