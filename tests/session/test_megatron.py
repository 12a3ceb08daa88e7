"""The products of Megatron Core's GPT, counted by hand."""

import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformer_engine.pytorch as te
from transformer_engine.common import recipe as recipes

from te_precision_callbacks.session import InspectSession
from tests.coverage.test_coverage import (
    BATCH,
    HEADS,
    INNER,
    LENGTH,
    WIDTH,
    WORDS,
    attention,
    found,
    linear,
    lookup,
    words,
)

pytest.importorskip("megatron.core", reason="megatron-core is not installed")


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    """Megatron's groups of one rank; its models choose Transformer Engine's attention by environment variables."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    with mock.patch.dict(os.environ):
        yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_a_gpt_of_megatron_core(tmp_path: Path) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=WIDTH,
        ffn_hidden_size=INNER,
        num_attention_heads=HEADS,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        use_cpu_initialization=True,
    )
    model = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), WORDS, LENGTH)
    places = torch.arange(LENGTH).expand(BATCH, -1)
    with InspectSession(None, model=model, log_dir=tmp_path / "run", statistics_log="off") as session:
        with te.autocast(enabled=True, recipe=recipes.Float8CurrentScaling()):
            loss = model(words(), places, None, labels=words())
        loss.sum().backward()
        session.step()
        coverage = session.coverage()
    layer = "decoder.layers.0"
    assert found(coverage) == {
        **lookup("embedding.word_embeddings", "embedding.position_embeddings"),
        **linear(f"{layer}.self_attention.linear_qkv", WIDTH, 3 * WIDTH),
        **attention(f"{layer}.self_attention.core_attention"),
        **linear(f"{layer}.self_attention.linear_proj", WIDTH, WIDTH),
        **linear(f"{layer}.mlp.linear_fc1", WIDTH, INNER),
        **linear(f"{layer}.mlp.linear_fc2", INNER, WIDTH),
        **linear("output_layer", WIDTH, WORDS),
    }
    assert {product.layer for product in coverage if product.is_low} == {
        f"{layer}.{name}"
        for name in ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
    }
