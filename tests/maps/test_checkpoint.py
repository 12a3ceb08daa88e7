"""The stored formats of checkpoints."""

import json
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from te_precision_callbacks.maps import MapError, compare_maps, open_map
from te_precision_callbacks.maps.tool_files import Surroundings
from tests.maps.making import checkpoint, dense, fp8

E4M3 = torch.zeros(64, 128, dtype=torch.float8_e4m3fn)
PACKED = torch.zeros(64, 64, dtype=torch.uint8)


FORMATS_OF_WEIGHTS = [
    ({"weight": torch.zeros(64, 128, dtype=torch.bfloat16)}, "BF16"),
    ({"weight": E4M3, "weight_scale": torch.ones(())}, "FP8 E4M3"),
    ({"weight": E4M3, "weight_scale": torch.ones(64, 1)}, "FP8 E4M3"),
    ({"weight": E4M3.to(torch.float8_e5m2), "weight_scale": torch.ones(1)}, "FP8 E5M2"),
    ({"weight": E4M3, "weight_scale_inv": torch.ones(1, 1)}, "FP8 block E4M3"),
    (
        {"weight": torch.zeros(256, 256, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.ones(2, 2)},
        "FP8 block E4M3",
    ),
    ({"weight": E4M3, "weight_scale": torch.ones(64, 4, dtype=torch.uint8)}, "MXFP8 E4M3"),
    (
        {
            "weight": PACKED,
            "weight_scale": torch.ones(64, 8).to(torch.float8_e4m3fn),
            "weight_scale_2": torch.ones(()),
        },
        "NVFP4",
    ),
    ({"weight_packed": PACKED, "weight_scale": torch.ones(64, 8).to(torch.float8_e4m3fn)}, "NVFP4"),
    ({"weight_packed": PACKED, "weight_scale": torch.ones(64, 4, dtype=torch.uint8)}, "MXFP4"),
    ({"weight": PACKED}, "unknown (U8)"),
]


def test_the_format_of_a_weight_is_read_from_its_tensors(tmp_path: Path) -> None:
    for tensors, expected in FORMATS_OF_WEIGHTS:
        save_file({f"layers.0.fc.{name}": tensor for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
        ((name, formats),) = open_map(tmp_path).modules.items()
        assert (name, formats.weight) == ("layers.0.fc", expected)
        assert formats.said.startswith("model.safetensors: ")


STACKED = torch.zeros(4, 256, 256, dtype=torch.float8_e4m3fn)
FORMATS_OF_EXPERTS = [
    ({"": STACKED, "_weight_scale": torch.ones(())}, "FP8 E4M3"),
    ({"": STACKED, "_scale_inv": torch.ones(4, 2, 2)}, "FP8 block E4M3"),  # FP8Experts of transformers 5.23
    ({"": STACKED, "_scale_inv": torch.ones(4, 1, 1)}, "FP8 E4M3"),
    ({"_blocks": torch.zeros(4, 64, 2, 16, dtype=torch.uint8), "_scales": torch.zeros(4, 64, 2).byte()}, "MXFP4"),
]


def test_the_format_of_stacked_experts(tmp_path: Path) -> None:
    for tensors, expected in FORMATS_OF_EXPERTS:
        named = {f"layers.0.experts.up_proj{name}": tensor for name, tensor in tensors.items()}
        save_file(named, tmp_path / "model.safetensors")
        ((name, formats),) = open_map(tmp_path).modules.items()
        assert (name, formats.weight) == ("layers.0.experts.up_proj", expected)


def test_modules_of_transformer_engine(tmp_path: Path) -> None:
    weight = torch.zeros(8, 8)
    names = ("mlp.fc1_weight", "mlp.fc2_weight", "mlp.layer_norm_weight", "experts.weight0", "experts.weight1")
    sizes = {name: torch.zeros(8) if "norm" in name else weight.clone() for name in names}
    save_file(sizes, tmp_path / "model.safetensors")
    assert set(open_map(tmp_path).modules) == {"mlp.fc1", "mlp.fc2", "experts.gemm_0", "experts.gemm_1"}


def test_activations_that_are_not_quantized_differ_from_quantized_ones(tmp_path: Path) -> None:
    """Without torch_dtype, the format of the activations is not known, but it is no low precision."""
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}
    for name, activations in (("weight-only", None), ("both", group["weights"])):
        config = {
            "quant_method": "compressed-tensors",
            "config_groups": {"all": {**group, "input_activations": activations}},
        }
        folder = tmp_path / name
        folder.mkdir()
        save_file(
            {"layers.0.fc.weight": E4M3, "layers.0.fc.weight_scale": torch.ones(())}, folder / "model.safetensors"
        )
        (folder / "config.json").write_text(json.dumps({"quantization_config": config}))
        (folder / "hf_quant_config.json").write_text("{}")
    alone = open_map(tmp_path / "weight-only")
    assert alone.modules["layers.0.fc"][:2] == ("FP8 E4M3", "high precision")
    assert any("hf_quant_config.json was not read" in note for note in alone.notes)
    compared = compare_maps(open_map(tmp_path / "both"), alone)
    assert [entry.tensors for entry in compared.differences] == ["activation"]
    assert not compared.not_said


def test_the_config_says_the_rest(tmp_path: Path) -> None:
    names = dense()
    quantized = [name for name in names if "layers" in name and "down" not in name]
    kept = ["lm_head", "model.layers.*.mlp.down_proj"]
    result = open_map(checkpoint(tmp_path / "good", names, quantized=quantized, config=fp8(*kept)))
    assert result.findings == ()
    gate = result.modules["model.layers.0.mlp.gate_proj"]
    assert gate[:3] == ("FP8 block E4M3", "FP8 block E4M3", "")
    assert "F8_E4M3 [32, 32], weight_scale_inv F32 [2, 2]" in gate.said
    down = result.modules["model.layers.3.mlp.down_proj"]
    assert down[:2] == ("BF16", "BF16")
    tool = f"installed transformers {version('transformers')}"
    assert f"modules_to_not_convert[1] 'model.layers.*.mlp.down_proj' ({tool})" in down.said
    assert any("classes of modules are not in a checkpoint" in note for note in result.notes)

    wrong = open_map(checkpoint(tmp_path / "wrong", names, quantized=quantized, config=fp8("lm_head")))
    (finding,) = wrong.findings
    assert finding.kind == "checkpoint"
    assert finding.modules == tuple(name for name in names if "down" in name)
    assert "stored in BF16, but config.json says FP8 block E4M3: model.layers.{0-3}.mlp.down_proj" in finding.text


LINEAR = {"quant_method": "fp8", "activation_scheme": "dynamic"}
SIZE = 64
KINDS_OF_WEIGHTS: list[tuple[str, tuple[int, ...], bool]] = [
    ("model.layers.0.self_attn.q_proj.weight", (SIZE, SIZE), True),  # as many rows as Llama-2-7B has positions
    ("multi_modal_projector.linear_1.weight", (SIZE, SIZE), True),
    ("embed_vision.embedding_projection.weight", (SIZE, SIZE), True),
    ("vision_model.embeddings.patch_embedding.weight", (SIZE, SIZE), True),  # a Linear in Siglip2
    ("model.layers.0.mlp.experts.down_proj", (4, SIZE, SIZE), True),
    ("thinker.model.embed_tokens.weight", (96, SIZE), False),  # its size is in thinker_config.text_config
    ("model.layers.61.embed_tokens.weight", (96, SIZE), False),
    ("transformer.wte.weight", (96, SIZE), False),
    ("visual.pos_embed.weight", (96, SIZE), False),
    ("visual.patch_embed.proj.weight", (96, 3, 2, 14, 14), False),
    ("backbone.layers.0.mixer.A_log", (SIZE, 16), False),
]


def test_the_linear_layers_of_a_checkpoint(tmp_path: Path) -> None:
    tensors = {name: torch.zeros(shape, dtype=torch.bfloat16) for name, shape, _ in KINDS_OF_WEIGHTS}
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"hidden_size": SIZE, "max_position_embeddings": SIZE, "quantization_config": LINEAR}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for engine in (None, "vllm", "sglang"):
        result = open_map(tmp_path, around=Surroundings(engine))
        assert result.findings == ()
        for name, _, is_linear in KINDS_OF_WEIGHTS:
            assert (result.modules[name.removesuffix(".weight")].weight == "FP8 E4M3") == is_linear, name


def test_layers_that_the_model_keeps_beside_quantized_projections(tmp_path: Path) -> None:
    """DeepSeek-V3 and Kimi-K2 list no modules, and store these in BF16."""
    block = "model.layers.61."
    projections = [f"{block}{name}" for name in ("self_attn.kv_b_proj", "mlp.experts.0.up_proj", "mlp.up_proj")]
    kept = [f"{block}{name}" for name in ("mlp.gate", "eh_proj", "shared_head.head", "self_attn.indexer.weights_proj")]
    config = fp8()
    del config["modules_to_not_convert"]
    for engine in (None, "vllm", "sglang"):
        folder = checkpoint(tmp_path / "good", [*projections, *kept], quantized=projections, config=config)
        result = open_map(folder, around=Surroundings(engine))
        assert result.findings == ()
        assert {result.modules[name][:2] for name in kept} == {("BF16", "BF16")}
        assert any("though config.json does not name them: model.layers.61.eh_proj" in note for note in result.notes)
        for name in projections:
            folder = checkpoint(
                tmp_path / "wrong", [*projections, *kept], quantized={*projections} - {name}, config=config
            )
            assert [finding.modules for finding in open_map(folder, around=Surroundings(engine)).findings] == [(name,)]


def test_experts_of_gpt_oss(tmp_path: Path) -> None:
    """Its list is read by transformers alone; engines quantize the experts whatever it says."""
    block = "model.layers.0."
    experts = [f"{block}mlp.experts.{name}_proj" for name in ("gate_up", "down")]
    high = [f"{block}{name}" for name in ("self_attn.q_proj", "mlp.router")]
    tensors = {f"{name}.weight": torch.zeros(64, 64, dtype=torch.bfloat16) for name in (*high, "lm_head")}
    for name in experts:
        tensors[f"{name}_bias"] = torch.zeros(4, 64, dtype=torch.bfloat16)
    stacked = {name: torch.zeros(4, 64, 256, dtype=torch.bfloat16) for name in experts}
    packed: dict[str, torch.Tensor] = {}
    for name in experts:
        packed[f"{name}_blocks"] = torch.zeros(4, 64, 8, 16, dtype=torch.uint8)
        packed[f"{name}_scales"] = torch.zeros(4, 64, 8, dtype=torch.uint8)
    listed = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"]
    config = {"quant_method": "mxfp4", "modules_to_not_convert": listed}
    for engine, activation in ((None, "BF16"), ("vllm", ""), ("sglang", "")):
        for weights in (stacked, packed):
            save_file({**tensors, **weights}, tmp_path / "model.safetensors")
            text = {"torch_dtype": "bfloat16", "quantization_config": config}
            (tmp_path / "config.json").write_text(json.dumps(text))
            result = open_map(tmp_path, around=Surroundings(engine))
            assert result.findings == ()
            assert {name: formats[:2] for name, formats in result.modules.items()} == {
                **dict.fromkeys(experts, ("MXFP4", activation)),
                **dict.fromkeys((*high, "lm_head"), ("BF16", "BF16")),
            }


def test_incomplete_checkpoints(tmp_path: Path) -> None:
    save_file({"a.weight": torch.zeros(4, 4)}, tmp_path / "model-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a.weight": "model-1.safetensors", "b.weight": "model-2.safetensors"}}))
    with pytest.raises(MapError, match=r"model-2.safetensors, with 1 tensor such as b.weight, is missing"):
        open_map(tmp_path)
    save_file({"c.weight": torch.zeros(4, 4)}, tmp_path / "model-2.safetensors")
    index.write_text(json.dumps({"weight_map": []}))
    with pytest.raises(MapError, match=r"weight_map: .* valid dictionary"):
        open_map(tmp_path)
    index.unlink()
    (tmp_path / "config.json").write_text(json.dumps({"text_config": 3}))
    with pytest.raises(MapError, match=r"config.json: text_config: .* valid dictionary, not 3"):
        open_map(tmp_path)
    index.write_text("{")
    with pytest.raises(MapError, match="cannot be read"):
        open_map(tmp_path)


def test_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(MapError, match="there is no such file or folder"):
        open_map(tmp_path / "none")
    with pytest.raises(MapError, match="neither a checkpoint"):
        open_map(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(MapError, match=r"model.safetensors cannot be read as safetensors"):
        open_map(tmp_path)
    save_file({"norm.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    with pytest.raises(MapError, match=r"no weights in model.safetensors"):
        open_map(tmp_path)
    with pytest.raises(MapError, match="--engine needs a quantization_config"):
        open_map(checkpoint(tmp_path / "bf16", dense()), around=Surroundings(engine="vllm"))
