"""Gradient checkpointing through the Trainer under Accelerate's FP8: what docs/transformers.md says of it."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformer_engine.pytorch as te
import transformer_engine.pytorch.module.linear as te_linear
from transformer_engine.pytorch.tensor.storage.float8_tensor_storage import Float8TensorStorage

from te_precision_callbacks.session import Reason
from te_precision_callbacks.transformers import Trainer, TrainingArguments
from tests.transformers.models import arguments, llama
from tests.transformers.models import trainer as any_trainer


class LoRA(torch.nn.Module):
    def __init__(self, base: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.lora_A = torch.nn.Linear(base.in_features, 16, bias=False)
        self.lora_B = torch.nn.Linear(16, base.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base_layer(x) + self.lora_B(self.lora_A(x))  # type: ignore[no-any-return]


def with_adapters(model: Any) -> Any:
    model.requires_grad_(False)
    model.enable_input_require_grads()
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRA(layer.self_attn.q_proj)
        layer.self_attn.v_proj = LoRA(layer.self_attn.v_proj)
    return model


def trainer(folder: Path, *, reentrant: bool | None, lora: bool = False) -> Any:
    args = arguments(
        folder,
        TrainingArguments,
        debug="te_precision",
        max_steps=1,
        gradient_checkpointing=reentrant is not None,
        gradient_checkpointing_kwargs=None if reentrant is None else {"use_reentrant": reentrant},
    )
    model = llama(of_te=False)
    return any_trainer(args, model=with_adapters(model) if lora else model, kind=Trainer)


def warnings_of_checkpoints(caplog: pytest.LogCaptureFixture) -> list[str]:
    results = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    return [text for text in results if text.startswith("Gradient checkpointing")]


@pytest.mark.usefixtures("fp8_of_accelerate")
def test_a_reentrant_checkpoint_trains_and_recomputes_without_fp8(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of the products of the seven checkpointed layers only the first forward's are FP8, and `precision` tells both."""
    run: Counter[tuple[str, bool]] = Counter()
    multiply = te_linear.general_gemm

    def spy(first: Any, second: Any, *arguments: Any, **options: Any) -> Any:
        parts = [getattr(first, f"{way}_gemm_tensor", first) for way in ("rowwise", "columnwise")]  # of a debug tensor
        run[options.get("layout", "TN"), any(isinstance(part, Float8TensorStorage) for part in parts)] += 1
        return multiply(first, second, *arguments, **options)

    monkeypatch.setattr(te_linear, "general_gemm", spy)
    made = trainer(tmp_path, reentrant=True)
    made.train()
    assert made.state.global_step == 1
    assert run == {
        ("TN", True): 7 + 1,  # and the head, which no checkpoint computes again
        ("TN", False): 7,
        ("NN", True): 1,
        ("NN", False): 7,
        ("NT", True): 1,
        ("NT", False): 7,
    }
    stated = list(made.debug_session.precision)
    assert len(stated) == 8 * 3
    for entry in stated:
        checkpointed = {"FP8 E4M3 -> BF16"} if entry.gemm == "fprop" else {"BF16"}
        formats = {"FP8 E4M3", "FP8 E5M2"} if entry.layer == "lm_head" else checkpointed
        assert set(entry.operands.values()) <= formats, entry
        assert entry.seen, entry
    coverage = made.debug_session.coverage()
    of_te = [product for product in coverage if product.family == "te" and not product.is_low]
    assert {product.reason for product in of_te} == {Reason.RECOMPUTED}
    assert len({product.layer for product in of_te}) == 7
    [text] = warnings_of_checkpoints(caplog)
    assert text.startswith("Gradient checkpointing (use_reentrant=True) computes the forward of 7 layers again outside")
    assert "before the training call model.gradient_checkpointing_enable() and" in text
    assert "(a checkpoint computes it again outside of te.autocast)" in str(coverage)


@pytest.mark.usefixtures("fp8_of_accelerate")
def test_adapters_on_a_checkpointed_model_have_the_true_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(tmp_path, reentrant=True, lora=True)
    made.train()
    coverage = made.debug_session.coverage()
    reasons = {product.layer: product.reason for product in coverage if product.family == "te" and product.macs}
    assert reasons.pop("lm_head") is None
    assert len(reasons) == 11
    assert set(reasons.values()) == {Reason.RECOMPUTED}
    assert coverage.share("fp8") < 0.2
    [text] = warnings_of_checkpoints(caplog)
    assert "of 11 layers" in text


@pytest.mark.usefixtures("fp8_of_accelerate")
def test_the_checkpoint_that_the_warning_names_recomputes_in_fp8(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = trainer(tmp_path, reentrant=None)
    forwards: list[str] = []
    made.model.model.layers[0].mlp.register_forward_hook(lambda *_: forwards.append("mlp"))
    made.model.gradient_checkpointing_enable()
    made.model._set_gradient_checkpointing(gradient_checkpointing_func=te.checkpoint)
    made.train()
    assert len(forwards) == 2, "the layer was computed again"
    entries = list(made.debug_session.precision)
    assert len(entries) == 8 * 3
    assert all(text.startswith("FP8 ") and "->" not in text for entry in entries for text in entry.operands.values())
    assert not warnings_of_checkpoints(caplog)
