"""The rules of other tools' precision files: against the tools themselves, or tables of their effect."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import save_file
from transformers import FineGrainedFP8Config, LlamaConfig, LlamaForCausalLM

from te_precision_callbacks.maps import MapError, PrecisionMap, open_map, tool_files
from te_precision_callbacks.maps.tool_files import Engine, Surroundings
from tests.maps.making import RECIPES, dense, fp8, matcher, modules, precision_file, written
from tests.session.test_megatron import one_rank  # noqa: F401

LAYER = "model.layers.0."
PARTS = (
    *("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
    *("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj", "mlp.gate"),
    *("mlp.experts.0.gate_proj", "mlp.experts.3.up_proj", "mlp.experts.3.down_proj"),
    *("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
)
QKV = {"self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"}
GATE_UP = {"mlp.gate_proj", "mlp.up_proj"}
ROUTED = {"mlp.experts.0.gate_proj", "mlp.experts.3.up_proj", "mlp.experts.3.down_proj"}
SHARED = {"mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj"}
SHARED_DOWN = "mlp.shared_experts.down_proj"

Kept = tuple[list[str], set[str]]
"""Entries of an ignore list (``@`` stands for the block's path) -> the modules that stay in high precision."""

VLLM: list[Kept] = [
    (["@mlp.gate"], {"mlp.gate"}),
    (["mlp.gate"], set()),
    (["@self_attn.q_proj", "@self_attn.k_proj", "@self_attn.v_proj"], QKV),
    (["@self_attn.qkv_proj"], QKV),
    (["self_attn"], set()),
    (["@mlp.experts.3.gate_proj"], ROUTED),
    (["mlp.experts"], set()),
    (["*mlp*"], set()),
    (["gate_proj", "up_proj"], set()),
    (["@mlp.shared_experts.down_proj"], {SHARED_DOWN}),
]
"""``is_layer_skipped`` of vLLM 0.24, as Fp8Config calls it, run on the engine's layers."""

MODELOPT: list[Kept] = [
    (["@mlp.gate"], {"mlp.gate", *GATE_UP}),
    (["mlp.gate"], {"mlp.gate", *GATE_UP}),
    (["@self_attn.qkv_proj"], QKV),
    (["self_attn"], {*QKV, "self_attn.o_proj"}),
    (["@mlp.experts.3.gate_proj"], ROUTED),
    (["mlp.experts"], ROUTED),
    (["*.o_proj"], {"self_attn.o_proj"}),
    (["gate_proj"], set()),
    (["gate_proj", "up_proj"], {*GATE_UP, *SHARED}),
    (["down_proj"], {"mlp.down_proj", SHARED_DOWN}),
    (["model.layers.0"], set(PARTS)),
    (["mlp.shared_experts"], {*SHARED, SHARED_DOWN}),
]
"""``ModelOptQuantConfigBase.is_layer_excluded`` of vLLM 0.24."""

SGLANG: list[Kept] = [
    (["@mlp.gate"], {"mlp.gate"}),
    (["mlp.gate"], {"mlp.gate"}),
    (["@self_attn.qkv_proj"], set()),
    (["self_attn"], {*QKV, "self_attn.o_proj"}),
    (["@mlp.experts.3.gate_proj"], ROUTED),
    (["mlp.experts"], ROUTED),
    (["*.o_proj"], set()),
    (["gate_proj", "up_proj"], {*GATE_UP, *SHARED}),
    (["down_proj"], {"mlp.down_proj", SHARED_DOWN}),
    (["model.layers.0"], set(PARTS)),
    (["mlp.shared_experts"], {*SHARED, SHARED_DOWN}),
]
"""``is_layer_skipped`` of SGLang 0.5.12."""


def mapped(folder: Path, data: Any, names: list[str], engine: Engine | None = None) -> PrecisionMap:
    return open_map(written(folder / "config.json", data), modules=modules(names), around=Surroundings(engine))


def llama() -> LlamaForCausalLM:
    config = LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, vocab_size=96
    )
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def high(source: PrecisionMap) -> set[str]:
    return {name.removeprefix(LAYER) for name, formats in source.modules.items() if formats.weight == "BF16"}


def modelopt(*ignored: str) -> dict[str, Any]:
    return {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": [*ignored]}


def cases() -> Iterator[tuple[Any, dict[str, Any], set[str]]]:
    for engine, make, table in (("vllm", fp8, VLLM), ("sglang", fp8, SGLANG), ("vllm", modelopt, MODELOPT)):
        for entries, kept in table:
            listed = [entry.replace("@", LAYER) for entry in entries]
            yield engine, make(*listed), kept


def test_a_fused_layer_with_some_parts_kept_is_no_layer_of_an_engine(tmp_path: Path) -> None:
    names = [LAYER + part for part in PARTS]
    for entries, affected in (
        ([f"{LAYER}self_attn.v_proj"], {f"{LAYER}self_attn.v_proj"}),
        ([f"{LAYER}self_attn.qkv_proj"], set()),
    ):
        findings = mapped(tmp_path, fp8(*entries), names, "vllm").findings
        assert {name for entry in findings if entry.kind == "part_of_a_layer" for name in entry.modules} == affected


def test_a_head_that_is_the_embedding_may_be_listed(tmp_path: Path) -> None:
    for tied, kinds in ((True, []), (False, ["unmatched"])):
        data = {"tie_word_embeddings": tied, "quantization_config": fp8("lm_head")}
        findings = mapped(tmp_path, data, [f"{LAYER}self_attn.o_proj"]).findings
        assert [entry.kind for entry in findings] == kinds


@pytest.mark.parametrize(
    ("config", "shows"),
    [
        (fp8(), ""),
        (modelopt() | {"kv_cache_quant_algo": "FP8"}, "'FP8'"),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"0": {"targets": ["Linear"], "weights": {"type": "float", "num_bits": 8}}},
                "kv_cache_scheme": {"num_bits": 8, "type": "float"},
            },
            "{'num_bits': 8, 'type': 'float'}",
        ),
    ],
)
def test_the_format_of_a_kv_cache_is_a_note(config: dict[str, Any], shows: str, tmp_path: Path) -> None:
    notes = mapped(tmp_path, {"quantization_config": config}, [f"{LAYER}self_attn.o_proj"]).notes
    told = [note for note in notes if "KV cache" in note]
    assert [note.partition(" quantizes ")[2] for note in told] == [
        f"the KV cache too, which is in no map: {shows}."
    ] * bool(shows)


@pytest.mark.parametrize("engine", [None, "vllm"])
def test_fbgemm_keeps_the_listed_modules(engine: Engine | None, tmp_path: Path) -> None:
    config = {"quant_method": "fbgemm_fp8", "modules_to_not_convert": [f"{LAYER}mlp.down_proj"]}
    names = [f"{LAYER}{part}" for part in ("mlp.down_proj", "mlp.gate_proj", "mlp.up_proj")]
    source = mapped(tmp_path, {"quantization_config": config}, names, engine)
    assert high(source) == {"mlp.down_proj"}
    assert source.modules[names[1]].weight == "FP8 E4M3"


NORM = f"{LAYER}input_layernorm"
CORRECTION = f"{LAYER}mlp.gate.e_score_correction_bias"


@pytest.mark.parametrize("engine", [None, "vllm", "sglang"])
def test_norms_and_parameters_may_be_listed(tmp_path: Path, engine: Engine | None) -> None:
    """As published for Qwen3 in FP8, and for MiniMax-M2: they exist, and tools quantize no vectors."""
    tensors = {f"{LAYER}mlp.gate.weight": torch.zeros(2, 2), f"{NORM}.weight": torch.ones(2), CORRECTION: torch.ones(2)}
    save_file({**tensors, f"{LAYER}self_attn.q_proj.bias": torch.ones(2)}, tmp_path / "model.safetensors")
    config = fp8(f"{LAYER}mlp.gate", NORM, "e_score_correction_bias", "layernorm", "self_attn.k_norm", "mlp.gate.x")
    findings = open_map(written(tmp_path / "config.json", config), around=Surroundings(engine)).findings
    unmatched = ["self_attn.k_norm", "mlp.gate.x"]
    if engine is not None:
        unmatched.insert(0, "layernorm")  # ends a name only for transformers
    assert [finding.text.split("'")[1] for finding in findings] == unmatched


def test_norms_of_a_model_may_be_listed(tmp_path: Path) -> None:
    file = written(tmp_path / "config.json", fp8("lm_head", NORM, "model.norm", f"{LAYER}norm"))
    result = open_map(file, modules=llama())
    assert [finding.text.count(f"'{LAYER}norm' takes no module") for finding in result.findings] == [1]
    assert "model.norm" not in result.modules


def test_the_ignore_lists_of_engines(tmp_path: Path) -> None:
    for engine, config, kept in cases():
        result = mapped(tmp_path, config, [LAYER + part for part in PARTS], engine)
        assert high(result) == kept
        assert any("may keep layers" in note for note in result.notes)


@pytest.fixture(params=["called", "read"])
def library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The matching functions of libraries, and the rules that were read from them."""
    tool_files._library.cache_clear()
    if request.param == "read":
        for module, _, _ in tool_files._LIBRARIES.values():
            monkeypatch.setitem(sys.modules, module, None)
    yield
    tool_files._library.cache_clear()


@pytest.mark.usefixtures("library")
def test_fp8_of_transformers(tmp_path: Path) -> None:
    """The modules that transformers itself replaces in a model."""
    for skipped in [
        ["lm_head"],
        ["lm_head", "model.layers.1"],
        ["mlp.gate"],
        ["q_proj"],
        [r"model.layers.*.mlp.down_proj"],
    ]:
        from transformers.integrations.finegrained_fp8 import replace_with_fp8_linear

        model = llama()
        file = written(tmp_path / "config.json", {"quantization_config": fp8(*skipped)})
        result = open_map(file, modules=model)
        replace_with_fp8_linear(
            model,
            modules_to_not_convert=skipped,
            quantization_config=FineGrainedFP8Config(modules_to_not_convert=skipped),
        )
        replaced = {name for name, module in model.named_modules() if "FP8Linear" in type(module).__name__}
        assert {name for name, formats in result.modules.items() if formats.weight == "FP8 block E4M3"} == replaced
        assert result.modules["model.embed_tokens"].weight == "BF16"


CHANNEL = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCK = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
FP4 = {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 16}
DOWN = {"0.mlp.down_proj", "1.mlp.down_proj"}
MLP = {f"{number}.mlp.{part}_proj" for number in range(2) for part in ("gate", "up", "down")}
ALL = {name.removeprefix("model.layers.") for name in dense(2)} - {"model.embed_tokens"}
COMPRESSED: list[Any] = [
    (["lm_head"], [(["Linear"], CHANNEL)], ALL - {"lm_head"}, set()),
    (["lm_head", "re:.*mlp.down.*"], [(["Linear"], CHANNEL)], ALL - DOWN - {"lm_head"}, set()),
    (["lm_head"], [(["re:.*mlp.*_proj"], FP4), (["re:.*self_attn.*"], CHANNEL)], ALL - MLP - {"lm_head"}, MLP),
    (["lm_head"], [(["Linear"], CHANNEL), (["re:.*down_proj"], FP4)], ALL - DOWN - {"lm_head"}, DOWN),
    ([], [([f"{LAYER}mlp.up_proj"], FP4), (["re:.*up_proj"], BLOCK)], {"1.mlp.up_proj"}, {"0.mlp.up_proj"}),
    (["down_proj"], [(["Linear"], CHANNEL)], ALL, set()),
    (["re:down_proj"], [(["Linear"], CHANNEL)], ALL, set()),
    ([f"{LAYER}self_attn.qkv_proj", f"{LAYER}mlp.gate_up_proj"], [(["Linear"], CHANNEL)], ALL, set()),
    (["Linear"], [(["re:.*proj"], CHANNEL)], set(), set()),
    ([], [(["Linear"], CHANNEL), (["Linear"], FP4)], set(), ALL),
]
"""Ignored, groups, modules in FP8 and in FP4: what compressed-tensors 0.20.1 does with a Llama of two blocks."""


def compressed(ignored: list[str], groups: Any) -> dict[str, Any]:
    listed = {f"group_{n}": {"targets": targets, "weights": scheme} for n, (targets, scheme) in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "ignore": ignored, "config_groups": listed}


@pytest.mark.usefixtures("library")
def test_compressed_tensors(tmp_path: Path) -> None:
    for ignored, groups, in_fp8, in_fp4 in COMPRESSED:
        result = mapped(tmp_path, compressed(ignored, groups), dense(2))
        by_format: dict[str, set[str]] = {}
        for name, formats in result.modules.items():
            by_format.setdefault(formats.weight.split()[0], set()).add(name.removeprefix("model.layers."))
        assert (by_format.get("FP8", set()), by_format.get("NVFP4", set())) == (in_fp8, in_fp4)


@pytest.mark.usefixtures("library")
def test_what_compressed_tensors_itself_does(tmp_path: Path) -> None:
    for ignored, groups in [case[:2] for case in COMPRESSED]:
        from compressed_tensors import quantization

        config = compressed([*ignored, "LlamaMLP", "re:.*[01].self_attn.[kv]_proj$"], groups)
        model = llama()
        result = open_map(written(tmp_path / "config.json", config), modules=model)
        quantization.apply_quantization_config(model, quantization.QuantizationConfig.model_validate(config))
        for name, module in model.named_modules():
            if name in result.modules:
                scheme = getattr(module, "quantization_scheme", None)
                bits = {"FP8": 8, "NVFP4": 4}.get(result.modules[name].weight.split()[0])
                assert bits == (scheme and scheme.weights.num_bits), name


def test_modelopt_of_several_precisions(tmp_path: Path) -> None:
    names = [LAYER + part for part in PARTS]
    layers = {f"{LAYER}mlp.up_proj": {"quant_algo": "NVFP4"}, f"{LAYER}mlp.down_proj": {"quant_algo": "FP8"}}
    data = {
        "quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": layers, "exclude_modules": ["lm_head"]}
    }
    result = mapped(tmp_path, data, [*names, "lm_head"])
    assert result.modules[f"{LAYER}mlp.up_proj"][:3] == ("NVFP4", "NVFP4", "")
    assert result.modules[f"{LAYER}mlp.down_proj"][:3] == ("FP8 E4M3", "FP8 E4M3", "")
    assert len(high(result)) == len(names) - 2 + 1
    assert result.findings == ()


EXPERTS = f"{LAYER}mlp.experts"
MIXED: list[tuple[list[str], set[str], set[str]]] = [
    ([EXPERTS], ROUTED, ROUTED),
    ([f"{EXPERTS}.3.up_proj"], {"mlp.experts.3.up_proj"}, ROUTED),
    ([f"{LAYER}self_attn.q_proj"], {"self_attn.q_proj"}, QKV),
    ([f"{LAYER}self_attn.qkv_proj"], QKV, QKV),
    ([f"{LAYER}mlp.gate"], {"mlp.gate"}, {"mlp.gate"}),
    ([f"{LAYER}{part}" for part in PARTS], set(PARTS), set(PARTS)),
]
"""Keys of quantized_layers, and the quantized modules: all that are named, and ``_resolve_quant_algo`` of vLLM 0.24."""


def test_the_layers_of_a_mixed_precision(tmp_path: Path) -> None:
    names = [LAYER + part for part in PARTS]
    for keys, named, of_vllm in MIXED:
        layers = {key: {"quant_algo": "NVFP4"} for key in keys}
        config = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
        for engine, low in ((None, named), ("vllm", of_vllm)):
            result = mapped(tmp_path, config, names, engine)  # type: ignore[arg-type]
            assert set(PARTS) - high(result) == low
            assert result.findings == ()


def test_vision_towers_that_vllm_keeps(tmp_path: Path) -> None:
    towers = ["visual.blocks.0.attn.qkv", "model.vision_tower.layers.0.mlp.fc1", "vision_model.layers.0.mlp.fc2"]
    names = [*towers, f"{LAYER}self_attn.o_proj"]
    assert high(mapped(tmp_path, modelopt(), names, "vllm")) == set(towers)
    for config, engine in ((modelopt(), None), (fp8(), "vllm")):
        assert high(mapped(tmp_path, config, names, engine)) == set()  # type: ignore[arg-type]


def test_torchao_by_name(tmp_path: Path) -> None:
    dynamic = {"_type": "Float8DynamicActivationFloat8WeightConfig", "_data": {}}
    named = {"re:.*_proj": dynamic, f"{LAYER}mlp.up_proj": None, "_default": {"_type": "Int8WeightOnlyConfig"}}
    quant_type = {"default": {"_type": "FqnToConfig", "_data": {"fqn_to_config": named}}}
    config = {"quant_method": "torchao", "quant_type": quant_type, "modules_to_not_convert": ["lm_head"]}
    result = mapped(tmp_path, config, [*(LAYER + part for part in PARTS), "lm_head"])
    assert high(result) == {"mlp.up_proj", "lm_head"}
    assert result.modules[f"{LAYER}mlp.gate"][:2] == ("INT8", "BF16")
    assert result.modules[f"{LAYER}mlp.down_proj"][:2] == ("FP8 E4M3", "FP8 E4M3")


def test_an_entry_behind_another(tmp_path: Path) -> None:
    file = precision_file(tmp_path, first=matcher("*mlp*", "bf16"), second=matcher("*down_proj", "mxfp8"))
    result = open_map(file, modules=modules(dense()), around=Surroundings(recipe="nvfp4"))
    (finding,) = result.findings
    assert finding.kind == "shadowed"
    assert "matchers.first '*mlp*'" in finding.text
    assert len(finding.modules) == 4
    assert result.modules[f"{LAYER}self_attn.q_proj"].gradient == "NVFP4", "of the recipe around the model"


def test_entries_of_all_blocks_are_one_finding(tmp_path: Path) -> None:
    routers = [f"model.layers.{number}.mlp.router" for number in range(4)]
    (finding,) = mapped(tmp_path, fp8(*routers), dense()).findings
    assert "'model.layers.{0-3}.mlp.router' takes no module" in finding.text


# ---------------------------------------------------------------------- Megatron


@pytest.mark.usefixtures("one_rank")
@pytest.mark.filterwarnings("ignore")
def test_the_reader_of_megatron_core(tmp_path: Path) -> None:
    """The recipes that Megatron gives to the modules of a model that it builds from the file."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.quantization.utils import load_quantization_recipe
    from megatron.core.transformer.transformer_config import TransformerConfig

    file = precision_file(
        tmp_path,
        off=matcher("*", "nvfp4", enabled=False),
        first=matcher("decoder.layers.0.*fc?", "bf16"),
        fc=matcher("*linear_fc[12]", "mxfp8"),
        proj=matcher("*LINEAR_PROJ", "nvfp4"),
    )
    config = TransformerConfig(
        num_layers=2,
        hidden_size=64,
        num_attention_heads=4,
        use_cpu_initialization=True,
        quant_recipe=load_quantization_recipe(str(file)),
    )
    model = GPTModel(config, get_gpt_layer_with_transformer_engine_spec(), 96, 16)
    result = open_map(file, modules=model, around=Surroundings(recipe="fp8_block_scaling"))
    checked = 0
    for name, module in model.named_modules():
        if not hasattr(module, "te_quant_params"):
            continue
        checked += 1
        params = module.te_quant_params
        expected = "FP8 block E4M3"
        if params is not None:
            recipe = params.training_recipe
            chosen = recipe.fp8_quantization_recipe or recipe.fp4_quantization_recipe
            expected = {None: "FP32", "mxfp8": "MXFP8 E4M3", "nvfp4": "NVFP4"}[chosen]
        assert result.modules[name].weight == expected, name
    assert checked == 8
    assert result.modules["output_layer"].weight == "FP32", "no module of Transformer Engine"
    assert {finding.kind for finding in result.findings} == {"disabled", "unmatched"}
    assert json.loads(json.dumps(RECIPES)) == yaml.safe_load(file.read_text())["configs"]


# ---------------------------------------------------------------------- wrong files

MXFP8 = {"configs": RECIPES, "matchers": {"all": matcher("*", "mxfp8")}}


def megatron_with(**changed: Any) -> dict[str, Any]:
    return {"configs": RECIPES, "matchers": {"all": {**matcher("*", "mxfp8"), **changed}}}


def config_with(**recipe: Any) -> dict[str, Any]:
    config = {"transformer_engine_config_type": "TEQuantizationParams", "training_recipe": recipe}
    return {"configs": {"mxfp8": config}, "matchers": {}}


WRONG = [
    ({}, "file.json: this is no precision file: its keys are"),
    (
        {"matchers": {}, "quant_method": "fp8"},
        "this is Megatron's precision file and a quantization_config: ",
    ),
    ({"quant_method": "fp9"}, "quant_method: 'fp9' is not known. Did you mean 'fp8'"),
    ({"quantization_config": 8}, "the quantization: .* valid dictionary, not 8"),
    (fp8(3), r"modules_to_not_convert: 0: .* valid string, not 3"),
    ({**fp8("a"), "expert_dtype": "fp4"}, "expert_dtype 'fp4' is not read"),
    ({**fp8("a"), "ignored_layers": ["b"]}, "modules_to_not_convert and ignored_layers differ"),
    ({"quant_method": "modelopt", "quant_algo": "NVFP5"}, "quant_algo: 'NVFP5' is not known. Did you mean 'NVFP4'"),
    ({"quant_method": "modelopt"}, "quant_algo: None is not known"),
    (fp8("*mlp"), r"modules_to_not_convert\[0\] '\*mlp' cannot be matched .* transformers .*: nothing to repeat"),
    (
        {
            "quant_method": "compressed-tensors",
            "config_groups": {"g": {"targets": [], "weights": {"type": "float", "num_bits": 6}}},
        },
        "config_groups.g.weights: .* is not a known format",
    ),
    (
        {"quant_method": "torchao", "quant_type": {"default": {"_type": "Float9"}}},
        "quant_type.default._type: 'Float9'",
    ),
    (megatron_with(config="mxfp9"), "matchers.all.config: 'mxfp9' is not known. Did you mean 'mxfp8'"),
    (megatron_with(type="regex"), "matchers.all.type: .*'glob', not 'regex'"),
    (megatron_with(pattern=None), "matchers.all.pattern: .* valid string, not None"),
    (
        {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Conv1D"], "weights": CHANNEL}}},
        "targets 'Conv1D' cannot be matched by the rules of .*: it is a class",
    ),
    (
        config_with(fp8_quantization_recipe="mxfp9"),
        "mxfp8.training_recipe.fp8_quantization_recipe: Input should be 'tensorwise', .* not 'mxfp9'",
    ),
    (config_with(fp8_quantization_recipe="mxfp8", fp4_quantization_recipe="nvfp4"), "exclude each other"),
    (config_with(fp8_quantization_recipe="custom", custom_recipe_factory="a.b"), "is code"),
    (config_with(fp8_recipe="mxfp8"), "training_recipe.fp8_recipe: Extra inputs are not permitted"),
    (config_with(fp8_quantization_recipe="nvfp4"), "fp8_quantization_recipe: .* not 'nvfp4'"),
    (config_with(fp8_quantization_recipe="mxfp8", fp8_format="e5m2"), "fp8_format: .* 'hybrid', not 'e5m2'"),
    (
        {"configs": {"a": {"kitchen_config_type": "QLinearParams"}}},
        "configs.a.transformer_engine_config_type: Field required",
    ),
]


def test_wrong_files(tmp_path: Path) -> None:
    for data, message in WRONG:
        file = written(tmp_path / "file.json", data)
        with pytest.raises(MapError, match=message):
            open_map(file, modules=modules(dense()), around=Surroundings(recipe="mxfp8"))


def test_the_keys_of_a_recipe_of_megatron_core() -> None:
    extensions = pytest.importorskip("megatron.core.extensions.transformer_engine")
    assert set(tool_files._Recipe.model_fields) == extensions.TEQuantizationRecipe.get_config_keys()


def test_what_a_file_needs(tmp_path: Path) -> None:
    file = precision_file(tmp_path, all=matcher("*", "mxfp8"))
    with pytest.raises(MapError, match="Give this recipe with --recipe"):
        open_map(file, modules=modules(dense()))
    with pytest.raises(MapError, match="Give the modules of the model with --modules"):
        open_map(file, around=Surroundings(recipe="mxfp8"))
    with pytest.raises(MapError, match=r"the matching of sglang is not known for modelopt"):
        mapped(tmp_path, {"quant_method": "modelopt", "quant_algo": "FP8"}, dense(), "sglang")
    with pytest.raises(MapError, match=r"--recipe: 'mxfp9' is not known. Did you mean 'mxfp8'"):
        open_map(file, modules=modules(dense()), around=Surroundings(recipe="mxfp9"))
