"""The files of a choice: Megatron's file goes through the reader of megatron-core."""

from pathlib import Path
from typing import Any

import pytest

from te_precision_callbacks.base.vocabulary import GEMMS
from te_precision_callbacks.search.units import Units
from te_precision_callbacks.search.writing import write_config, write_megatron, write_recipe
from tests.search.models import RECIPES, Net
from tests.session.test_megatron import one_rank  # noqa: F401  # pytest finds it here


def test_a_written_recipe_needs_no_package_of_ours(tmp_path: Path) -> None:
    model = Net(None, blocks=1)
    units = Units(model)
    names = write_recipe(tmp_path / "r.py", frozenset({("blocks.0.up", "dgrad")}), units, RECIPES["current"]())
    assert "te_precision_callbacks" not in (tmp_path / "r.py").read_text()
    assert names["HIGH"]["blocks.0.up"] == ("dgrad",)
    assert set(names["HIGH"]) == {"blocks.0.up", "blocks.0.mlp.fc1", "blocks.0.mlp.fc2", "blocks.0.down"}


def test_a_config_of_nothing_is_valid(tmp_path: Path) -> None:
    model = Net(None, blocks=1)
    write_config(tmp_path / "config.yaml", frozenset(), Units(model), model, RECIPES["current"]())


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_the_reader_of_megatron_core(tmp_path: Path) -> None:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.quantization.utils import load_quantization_recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    def build(**options: Any) -> Any:
        sizes = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "use_cpu_initialization": True}
        config = TransformerConfig(**sizes, **options)
        return GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), 96, 16)

    model = build()
    units = Units(model)
    wholly = "decoder.layers.0.mlp.linear_fc2"
    partly = "decoder.layers.1.self_attention.linear_qkv"
    choice = frozenset({*((wholly, gemm) for gemm in GEMMS), (partly, "fprop")})
    (note,) = write_megatron(tmp_path / "megatron.yaml", choice, units)
    assert note == f"megatron.yaml has no GEMMs: it keeps these modules wholly in high precision: {partly}."
    built = build(quant_recipe=load_quantization_recipe(str(tmp_path / "megatron.yaml")))
    params = {
        name: module.te_quant_params for name, module in built.named_modules() if hasattr(module, "te_quant_params")
    }
    assert len(params) == 8
    for name, given in params.items():
        assert (given is not None) == (name in (wholly, partly)), name
    recipe = params[wholly].training_recipe
    assert (recipe.fp8_quantization_recipe, recipe.fp4_quantization_recipe) == (None, None)
    assert recipe.override_quantized_autocast
